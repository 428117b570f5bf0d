"""Linear layers, and weights that are packed once on a CPU.

A product of few rows takes as long as reading its weight W. torch's `linear` cannot know whether W has changed since
its last call. So in every call it copies W into the layout that its kernel reads, which takes as long again. An engine
packs the weights of its model once, and computes its steps inside the context `PackedWeights`.
"""

import threading
from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear, pad


class Packed(NamedTuple):
    """A packed copy of a weight as it was."""

    copy: Tensor
    weight: Tensor  # held, so that no other weight gets its id
    state: tuple[int, int]  # its address and version, which change with it
    rows: range  # numbers of rows for which the copy is read


class _Here(threading.local):
    packed: Mapping[int, Packed] = {}  # by the id of the weight


_here = _Here()


def product(layer: nn.Module, x: Float[Tensor, "*rows K"]) -> Float[Tensor, "*rows N"]:
    """Return x Wᵀ + b of a layer with a weight, by a packed copy of the weight where there is one."""
    weight, bias = layer.weight, getattr(layer, "bias", None)
    if not torch.compiler.is_compiling() and (packed := _here.packed.get(id(weight))) is not None:
        changed = packed.state != (weight.data_ptr(), weight._version)
        converts = x.dtype != weight.dtype or torch.is_autocast_enabled("cpu")
        rows = x.numel() // x.shape[-1]
        if not changed and not converts and rows in packed.rows:
            # oneDNN keeps a kernel for each number of rows, so there are only multiples of 8
            flat = x.reshape(rows, -1)
            padded = pad(flat, (0, 0, 0, -rows % 8)) if rows % 8 else flat
            out = torch.ops.mkldnn._linear_pointwise(padded, packed.copy, bias, "none", [], "")
            return out[:rows].view(*x.shape[:-1], -1)
    return linear(x, weight.T if isinstance(layer, Conv1D) else weight, bias)


class Linear(nn.Linear):
    """x @ weight[out, in].T + bias."""

    forward = product


class Conv1D(nn.Module):
    """x @ weight[in, out] + bias: a linear layer, by the name and shape that GPT-2's checkpoints have for it.

    In memory, the weights of an output are neighbours. So `weight.T` has contiguous rows, as in nn.Linear, and lesson
    8's products take it.
    """

    forward = product

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        bound = num_in**-0.5
        self.weight = nn.Parameter(torch.empty(num_in, num_out).uniform_(-bound, bound).T.contiguous().T)
        self.bias = nn.Parameter(torch.zeros(num_out))


class PackedWeights:
    """A context in which `product` uses packed copies of a model's weights, for the thread that enters it.

    The copies take as much memory as the weights. A weight that has changed since is read as it is.

    Args:
        model: of this package. Its linear layers are packed, and its embedding if the output head is tied to it.
        most: the bytes that all copies may take. Nothing is packed if they would take more.
    """

    def __init__(self, model: nn.Module, most: int) -> None:
        layers = [layer for layer in model.modules() if isinstance(layer, Linear | Conv1D)]
        if layers and model.config.tie_word_embeddings:
            layers.append(next(layer for layer in model.modules() if isinstance(layer, nn.Embedding)))
        layers = [layer for layer in layers if _can_pack(layer.weight)]
        fits = sum(layer.weight.nbytes for layer in layers) <= most
        self._packed = {id(layer.weight): _pack(layer) for layer in layers} if fits else {}

    def __len__(self) -> int:
        return len(self._packed)

    def __enter__(self) -> None:
        _here.packed = self._packed

    def __exit__(self, *_: object) -> None:
        _here.packed = {}


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or weight.is_inference() or not torch.backends.mkldnn.is_available():
        return False
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):  # not measured
        return False
    return weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def _pack(layer: nn.Module) -> Packed:
    weight = layer.weight.detach().T if isinstance(layer, Conv1D) else layer.weight.detach()
    copy = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    # torch reads a weight in float32 as it is for a single row, and for many rows the copy gains little
    rows = range(2, 65) if weight.dtype == torch.float32 else range(1, 2**31)
    return Packed(copy, layer.weight, (weight.data_ptr(), layer.weight._version), rows)
