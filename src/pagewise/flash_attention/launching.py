"""What launches of FlashAttention's Triton kernels have in common: room, strides, the choice of tiles (lesson 6)."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from pagewise.options import ScoreOptions
from pagewise.tools.device import triton_mode
from pagewise.tools.sizes import padded

LOG2_E = 1.4426950408889634
FAR_ROWS = 2**24  # elements from row to row; beyond, an offset in a tile would not fit 32 bits
WORTH_TUNING = 2**32  # operations of a product Q Kᵀ; below, what a launch costs hides the tiles


def room_like(x: Float[Tensor, "B heads rows D"]) -> Float[Tensor, "B heads rows D"]:
    """Room for numbers that lie as x does, if its rows are contiguous; else contiguous."""
    room = torch.empty_like(x)
    return room if room.stride(-1) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)


class Saved(NamedTuple):
    """What a forward leaves for its backward, and nobody else needs; empty where no gradient is wanted.

    out and lse would do, and do without it, less exactly where scores are large or one weight is nearly 1.
    """

    rest: Float[Tensor, "..."]  # as out: what rounding took from it; empty for float32
    stats: Float[Tensor, "..."]  # [2, B, H, T]: the largest score in units of log 2, and log₂ Σ 2^(score − it)

    @classmethod
    def room(cls, q: Float[Tensor, "B H T D"], learns: bool, *, stats: bool = True) -> "Saved":
        """Room for what q's dtype calls for; stats: or leave them out, for a backward that goes by lse."""
        rest = room_like(q) if learns and q.element_size() == 2 else q.new_empty(0)
        return cls(rest, q.new_empty(2, *q.shape[:3], dtype=torch.float32) if learns and stats else q.new_empty(0))

    def stats_or(self, lse: Float[Tensor, "B H T"]) -> tuple[Float[Tensor, "B H T"], Float[Tensor, "B H T"]]:
        """(m, log₂ l), or as good as lse has it."""
        if self.stats.numel():
            return self.stats[0], self.stats[1]
        return (lse * LOG2_E).masked_fill(lse == -torch.inf, torch.inf), torch.zeros_like(lse)


def round_into(out: Tensor, rest: Tensor, written: Tensor) -> None:
    """Do what the kernel does where it writes 16 bits: the interpreter wrote bfloat16 as float32."""
    if written is not out:
        out.copy_(written)
        if rest.numel():
            rest.copy_(written - out.float())


def strides(x: Float[Tensor, "B heads rows D"]) -> tuple[int, int, int]:
    return x.stride()[:3]


def with_close_rows(x: Float[Tensor, "B heads rows D"]) -> Float[Tensor, "B heads rows D"]:
    """x, copied only where its rows are not contiguous, or lie farther apart than the kernels count."""
    return x if (x.stride(-1) == 1 or x.shape[-1] == 1) and x.stride(-2) < FAR_ROWS else x.contiguous()


def in_base_2(options: ScoreOptions, head_size: int) -> tuple[float, float]:
    """(scale, softcap) of scores in units of log 2; with a softcap, scale is that of the tanh's argument."""
    scale, softcap = options.scale_for(head_size), options.softcap
    return scale / softcap if softcap > 0 else scale * LOG2_E, softcap * LOG2_E


def kind(q: Tensor) -> tuple[int, int, int]:
    """What the choice of tiles depends on: BLOCK_D, bytes per element, and compute capability; 0: interpreted."""
    major = torch.cuda.get_device_capability(q.device)[0] if q.is_cuda else 0
    return padded(q.shape[-1]), q.element_size(), major


def launch(
    kernel: Any,
    choices: tuple[dict[str, int], ...],
    grid: Callable[[dict[str, Any]], tuple[int]],
    arguments: tuple,
    constants: dict[str, Any],
    *,
    operations: int,  # of a product Q Kᵀ
) -> None:
    """Launch with the first of these tiles; on a GPU, where it matters, with the fastest, found out once and kept."""
    compiled = triton_mode() == "compiled" and not torch.cuda.is_current_stream_capturing()
    if compiled and len(choices) > 1 and operations > WORTH_TUNING:
        _tuned(kernel, tuple(tuple(choice.items()) for choice in choices))[grid](*arguments, **constants)
    else:
        kernel[grid](*arguments, **constants, **choices[0])


@functools.cache
def _tuned(kernel: Any, choices: tuple[tuple[tuple[str, int], ...], ...]) -> Any:
    import triton

    configs = []
    for choice in map(dict, choices):
        threads = {name: choice.pop(name) for name in ("num_warps", "num_stages")}
        configs.append(triton.Config(choice, **threads))
    key = ["D", "CAUSAL", "WINDOW", "SOFTCAP", "ALIBI", "MASK", "DROPOUT", "PACKED"]  # and dtypes
    return triton.autotune(configs, key, cache_results=True)(kernel)
