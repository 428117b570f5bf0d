"""The unified max and lazy rescaling in Triton: the decode kernel of lesson 7 with another fold (lesson 8).

Rows that leave the band are recomputed by a second launch, with the synchronised fold, whose programs look first if one
of their rows is flagged and end at once if not. So the host never waits to see, and a CUDA graph holds both.
"""

import math

import torch
from torch import Tensor

from pagewise.options import ScoreOptions
from pagewise.paged_attention.in_triton import DecodeInputs, Softmax, filling, launch
from pagewise.paged_attention.splits import Splits


@torch.library.custom_op("pagewise::decode_unified", mutates_args=())
def decode_unified(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi: float,
    low: float,
    high: float,
    smallest: float,
    scale: float | None,
    causal: bool,
    num_splits: int | None,
) -> tuple[Tensor, Tensor]:
    """(out, recomputed) of `unified_max_attention`, for inputs that the kernel does not refuse."""
    out, lse, flags = _results(q)
    if q.numel():
        arguments = _arguments(q, k, v, scale, causal, num_splits)
        launch(*arguments, out, lse, Softmax("unified", phi, low, high, smallest), flags)
        launch(*arguments, out, lse, flags=flags)
    return out, flags.view(torch.bool)


@decode_unified.register_fake
def _(q, *others):
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:3], dtype=torch.bool)


@torch.library.custom_op("pagewise::decode_lazily", mutates_args=())
def decode_lazily(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    threshold: float,
    scale: float | None,
    causal: bool,
    num_splits: int | None,
) -> Tensor:
    """`lazy_rescale_attention`, for inputs that the kernel does not refuse."""
    out, lse, _ = _results(q)
    if q.numel():
        softmax = Softmax("lazy", threshold * math.log(2))
        launch(*_arguments(q, k, v, scale, causal, num_splits), out, lse, softmax)
    return out


@decode_lazily.register_fake
def _(q, *others):
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def _arguments(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, num_splits: int | None
) -> tuple[DecodeInputs, ScoreOptions, Splits]:
    inputs = DecodeInputs(q, k, v)
    splits = filling(inputs) if num_splits is None else Splits("num", num_splits)
    return inputs, ScoreOptions(scale, causal), splits


def _results(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Room for out, lse and flags."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty(q.shape[:3], dtype=torch.float32), q.new_empty(q.shape[:3], dtype=torch.uint8)
