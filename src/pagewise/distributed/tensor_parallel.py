"""Tensor parallelism: each process computes some heads and columns of every layer (lesson 10).

A layer has two pairs of products. Between the products of a pair, every head or column is computed on its own:

    attention   W_o attend(W_q x, W_k x, W_v x)
    MLP         W_down (silu(W_gate x) ∘ W_up x)

A process keeps its share of the heads and columns. Its share of the first product is a part of the output (column
parallel). Its share of the second product is a term of a sum (row parallel), and an all-reduce adds the terms:

    W_o a = Σ over ranks r of W_o[:, r's channels] a[r's channels]

So a layer needs two all-reduces of [tokens, hidden_size], and none between the products of a pair. A bias of the second
product is added once, after the all-reduce. Embeddings, norms and the output head are whole in every process.

Shoeybi et al. 2019 (Megatron-LM). This module slices the weights itself. `torch.distributed.tensor.parallel` does not
know GPT-2's Conv1D, whose weight holds q, k and v, and its plans are longer than the slicing.
"""

import copy
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear

from pagewise.distributed.communication import all_reduce, rank_and_size
from pagewise.models import gpt2, llama

SHARED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
"""The sizes of a config that processes share."""
FIRST = {
    llama.Attention: ("q_proj", "k_proj", "v_proj"),
    llama.SwiGLU: ("gate_proj", "up_proj"),
    gpt2.Attention: ("c_attn",),
    gpt2.FeedForward: ("c_fc",),
}
"""The layers of the first product of a pair."""
SECOND = {llama.Attention: "o_proj", llama.SwiGLU: "down_proj", gpt2.Attention: "c_proj", gpt2.FeedForward: "c_proj"}
"""The layer of the second product of a pair."""
FUSED = {"c_attn": 3}
"""The number of equal parts of a layer's output: q, k and v of GPT-2."""


def tensor_parallel(model: nn.Module, group: Any = None) -> nn.Module:
    """Return the share of a model that this process computes. All processes of the group must call the share together.

    The result takes and returns what the model does, for the same config. Its `attend` gets H / n query heads and
    Hkv / n KV heads in a group of n processes. `num_kv_heads` of the result is Hkv / n.

    The split weights are copies. All other weights are those of `model`, which does not change. The result is for
    inference: no weight of it requires a gradient.

    Args:
        model: a Llama or a GPT2, with the same weights in every process.
        group: a group of torch.distributed, or a backend such as ProcessGroupGloo. None: all processes.

    Raises:
        ValueError, TypeError: the model is another one, or its heads do not divide evenly. No process waits.
    """
    if group is None:
        rank_and_size(None)  # is there a group?
        group = dist.group.WORLD
    rank, size = group.rank(), group.size()
    check_splits(model, size)
    # deepcopy takes the tensors of `same` instead of copies of the weights, so only the modules are new
    same = {id(weight): nn.Parameter(weight.detach(), requires_grad=False) for weight in model.parameters()}
    share = copy.deepcopy(model, same)
    for module in list(share.modules()):
        if type(module) in SECOND:
            for name in FIRST[type(module)]:
                _keep_outputs(getattr(module, name), rank, size, FUSED.get(name, 1))
            name = SECOND[type(module)]
            setattr(module, name, RowParallel(getattr(module, name), group))
    return share


def check_splits(model: nn.Module, size: int) -> None:
    """Check that `size` processes can share the heads and columns of a model evenly. Raise ValueError or TypeError."""
    if not isinstance(model, llama.Llama | gpt2.GPT2):
        raise TypeError(f"tensor_parallel = {size} takes a Llama or a GPT2, got {type(model).__name__}")
    sizes = {name: getattr(model.config, name) for name in SHARED}
    for name, number in sizes.items():
        if number % size:
            possible = " or ".join(str(n) for n in range(1, size) if not any(one % n for one in sizes.values()))
            raise ValueError(f"tensor_parallel = {size} must divide {name} = {number}: give {possible}")


class RowParallel(nn.Module):
    """x Wᵀ + bias, where each process of a group has some columns of W [out, in] and the same columns of x."""

    def __init__(self, layer: nn.Module, group: Any) -> None:
        super().__init__()
        weight = _share(_matrix(layer), group.rank(), group.size(), dim=1)
        self.weight, self.bias, self.group = nn.Parameter(weight, requires_grad=False), layer.bias, group

    def forward(self, x: Float[Tensor, "*rows K"]) -> Float[Tensor, "*rows N"]:
        out = all_reduce(linear(x, self.weight), self.group, "all-reduce")
        return out if self.bias is None else out + self.bias


def _keep_outputs(layer: nn.Module, rank: int, size: int, parts: int) -> None:
    """Reduce a layer to the outputs of one rank: to its share of each of `parts` equal parts."""
    weight = _share(_matrix(layer), rank, size, parts=parts)
    weight = weight.T if isinstance(layer, gpt2.Conv1D) else weight
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if layer.bias is not None:
        layer.bias = nn.Parameter(_share(layer.bias, rank, size, parts=parts), requires_grad=False)


def _matrix(layer: nn.Module) -> Float[Tensor, "N K"]:
    """Return the weight of a layer as [out, in]."""
    return layer.weight.T if isinstance(layer, gpt2.Conv1D) else layer.weight


def _share(x: Tensor, rank: int, size: int, *, dim: int = 0, parts: int = 1) -> Tensor:
    """Return a copy of the share of one rank in each of `parts` equal parts of x."""
    return torch.cat([part.chunk(size, dim)[rank] for part in x.chunk(parts, dim)], dim)
