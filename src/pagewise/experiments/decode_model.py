"""The time of attention in one decode step, from three counts: padded products, bytes and launches (lesson 7).

Modelled, not measured. A program attends with a tile of queries to one range of the keys. It takes the longer of

    its products      4 · rows of the tile · keys · D, padding included, at SHARE of the peak of one SM
    its bytes         at IN_FLIGHT per LATENCY alone; all programs together at most at the bandwidth

and programs run in waves of one per SM. A second kernel, if the keys are cut, reads the partial results that the first
one wrote. Each kernel adds LAUNCH.
"""

from typing import NamedTuple

from pagewise.experiments.decode_schedules import IN_FLIGHT, LATENCY, LAUNCH
from pagewise.tools.roofline import Gpu
from pagewise.tools.sizes import cdiv

SHARE = 0.690  # of the peak: the constant of FlashAttention-2 on long prompts, D 128, in flash-attention #307
D = 128


class DecodeTimes(NamedTuple):
    """The terms of a decode step, in seconds."""

    products: float
    reading: float
    merging: float
    launches: float

    @property
    def total(self) -> float:
        """The time of the step: arithmetic and reading overlap, and the rest comes after them."""
        return max(self.products, self.reading) + self.merging + self.launches


def decode_times(
    B: int, H: int, Hkv: int, S: int, gpu: Gpu, *, splits: int = 1, rows: int = 16, packed: bool = True
) -> DecodeTimes:
    """Return the modelled terms for B sequences of S keys, with a head size of 128 and numbers of 16 bits.

    Args:
        splits: the number of ranges into which the keys of a sequence are cut.
        rows: the rows of a tile of queries. Rows without a query are multiplied like all others.
        packed: all query heads of a KV head share a tile. False: each query head has a program of its own.
    """
    programs = B * (Hkv if packed else H) * splits
    full_waves, rest = divmod(programs, gpu.num_sms)
    flops = 4 * rows * cdiv(S, splits) * D
    products = cdiv(programs, gpu.num_sms) * flops / (SHARE * gpu.peak_flops / gpu.num_sms)

    kv = 2 * B * Hkv * S * D * 2 / programs  # bytes that a program must bring from memory
    reading = sum(n * kv / speed(n, gpu) for n in [gpu.num_sms] * full_waves + [rest] if n)
    partials = 2 * B * H * splits * (D + 2) * 4 if splits > 1 else 0  # written, and read again
    return DecodeTimes(products, reading, partials / gpu.bandwidth, LAUNCH * (2 if splits > 1 else 1))


def speed(programs: int, gpu: Gpu) -> float:
    """Return the bytes/s that this number of programs reads together (Little's law)."""
    return min(programs * IN_FLIGHT / LATENCY, gpu.bandwidth)
