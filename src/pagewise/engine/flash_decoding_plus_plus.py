"""Lesson 8 in the engine: products chosen from a table (lesson 9).

The engine does not change the model. While the engine runs the model, a context of torch hands every call of
`torch.nn.functional.linear` to `Dataflow.linear`. Such calls come from nn.Linear, from GPT-2's Conv1D, and from output
heads that are tied to the embedding. CUDA graphs capture the products that the table chose.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from pagewise.engine.config import without_attention
from pagewise.flash_decoding_plus_plus import Dataflow
from pagewise.flash_decoding_plus_plus.dataflow import device_label


class LinearBy(TorchFunctionMode):
    """A context in which `compute(input, weight, bias=None)` replaces torch's `linear`, for the thread that enters."""

    def __init__(self, compute: Callable[..., Tensor]) -> None:
        super().__init__()
        self.compute = compute

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return (self.compute if function is linear else function)(*args, **(kwargs or {}))


@torch.inference_mode()
def product_shapes(model: nn.Module) -> list[tuple[int, int]]:
    """Return (N, K) of all linear products of a model, each once, as `Dataflow.profile` takes them.

    The model computes one token, so layers with a bias and tied heads are found too.
    """
    shapes = []

    def compute(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        shapes.append(tuple(weight.shape))
        return linear(input, weight, bias)

    token = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
    with LinearBy(compute):
        model(token, token, without_attention(model))
    return list(dict.fromkeys(shapes))


def products_by(model: nn.Module, dataflow: Dataflow) -> LinearBy:
    """Return the context in which `dataflow` computes all linear products of a model. The model stays as it is.

    Raises:
        ValueError, TypeError: dataflow is not a Dataflow, or was profiled for another device, dtype or model.
    """
    if not isinstance(dataflow, Dataflow):
        raise TypeError(f"dataflow must be a Dataflow, got {type(dataflow).__name__}: Dataflow.load reads a file")
    remedy = "profile one by Dataflow.profile(product_shapes(model), device, dtype=dtype)"
    weight = next(model.parameters())
    here = device_label(weight.device)
    if (dataflow.device, dataflow.dtype) != (here, weight.dtype):
        said = f"profiled on {dataflow.device} for {dataflow.dtype}, but the model is on {here} in {weight.dtype}"
        raise ValueError(f"dataflow was {said}: {remedy}")
    shapes = product_shapes(model)
    if not dataflow.table.keys() & shapes:
        has, needs = (", ".join(map(str, map(list, found))) or "none" for found in (dataflow.table, shapes))
        raise ValueError(f"dataflow has no weights of the model: its table has {has}, the model has {needs}: {remedy}")
    return LinearBy(dataflow.linear)
