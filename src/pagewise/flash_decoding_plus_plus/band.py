"""The band of scores in which sums with a unified maximum are exact (lesson 8)."""

import math
from typing import NamedTuple

import torch

KEYS, LARGEST_VALUE = 2**20, torch.finfo(torch.float16).max  # the band allows this many keys, and values this large


def smallest_sum(num_keys: int, dtype: torch.dtype) -> float:
    """Return tiny · num_keys / eps. A larger sum is exact to within eps even if every number loses all below tiny."""
    return torch.finfo(dtype).tiny * num_keys / torch.finfo(dtype).eps


# At the lower edge, the largest weight of a row still outweighs everything that underflowed. At the upper edge, the
# sums of weights and of float16 values do not overflow. Rounding inwards makes both edges exact in float32.
LOW = math.ceil(math.log(smallest_sum(KEYS, torch.float32)))  # −57
HIGH = math.floor(math.log(torch.finfo(torch.float32).max / (KEYS * LARGEST_VALUE)))  # 63


class Band(NamedTuple):
    """The safe band of a `UnifiedMax`, limited to the range of sums over a number of keys: low < m − φ < high.

    Weights below 1 make acc smaller than the values. Where acc is below `smallest`, numbers that underflowed may
    matter.
    """

    phi: float
    low: float
    high: float
    smallest: float

    @classmethod
    def of(cls, phi: float, low: float, high: float, num_keys: int, dtype: torch.dtype) -> "Band":
        smallest = smallest_sum(max(1, num_keys), dtype)
        return cls(float(phi), max(float(low), math.log(smallest)), float(high), smallest)
