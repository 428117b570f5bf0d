"""What the options of attention cost (lesson 1 in depth): bytes, and clock cycles of a streaming multiprocessor.

An option changes a score by the score itself and by the positions of its query and key. As an operation of its own, it
reads and writes all scores. In a kernel that has the scores on the chip, it moves nothing.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from cudascope.gpus import H100, SPECIAL_PER_CLOCK
from pagewise.naive_attention import attention
from pagewise.tools.roofline import AttentionCost
from pagewise.tools.work import count_work

GPT_2 = MappingProxyType({"B": 1, "H": 12, "Hkv": 12, "T": 1024, "S": 1024, "D": 64})  # a layer
SLOPES = torch.full((12,), 0.5)
OPTIONS: Mapping[str, dict] = MappingProxyType(
    {
        "no option": {},
        "causal": {"causal": True},
        "causal, ALiBi": {"causal": True, "alibi_slopes": SLOPES},
        "causal, window": {"causal": True, "window": 256},
        "causal, softcap": {"causal": True, "softcap": 50.0},
    }
)


def moved_by_option() -> tuple[dict[str, float], dict[str, float]]:
    """Return the MB that each option's attention moves in float32: by separate torch operations, and in one kernel."""
    q, k, v = torch.zeros(3, 1, 12, 1024, 64)
    apart = {
        name: count_work(lambda options=options: attention(q, k, v, **options)).bytes_moved / 1e6
        for name, options in OPTIONS.items()
    }
    fused = dict.fromkeys(OPTIONS, AttentionCost(**GPT_2, itemsize=4).bytes_moved / 1e6)
    fused["causal, ALiBi"] += SLOPES.nbytes / 1e6
    return apart, fused


def cycles_per_score(D: int) -> dict[str, tuple[str, float]]:
    """Return part → (unit, clock cycles of an SM of an H100 at its peak) for one score of a head of size D.

    Besides exp, a softmax compares with the maximum, subtracts it (with the scale, in one multiply-add) and sums.
    A softcap needs a division, which is a multiplication, and a tanh. ALiBi needs a multiply-add with the distance.
    """
    lanes, tensor = H100.fp32_lanes, H100.tensor_rate("f16", "f32")
    return {
        "two products": ("tensor cores", 4 * D / tensor),
        "exp of the softmax": ("special functions", 1 / SPECIAL_PER_CLOCK),
        "rest of the softmax: maximum, multiply-add, sum": ("float32 lanes", 3 / lanes),
        "softcap: tanh": ("special functions", 1 / SPECIAL_PER_CLOCK),
        "softcap: two multiplications": ("float32 lanes", 2 / lanes),
        "ALiBi: a multiply-add": ("float32 lanes", 1 / lanes),
        "window: a comparison": ("float32 lanes", 1 / lanes),
    }


def cycles_by_change(D: int) -> dict[str, dict[str, float]]:
    """Return change → unit → clock cycles for one score, of attention without a change and with one change each."""
    parts, changes = cycles_per_score(D), ("ALiBi", "window", "softcap")
    busy = {name: dict.fromkeys((unit for unit, _ in parts.values()), 0.0) for name in ("no change", *changes)}
    for name, units in busy.items():
        for part, (unit, cycles) in parts.items():
            if part.startswith(name) or not part.startswith(changes):
                units[unit] += cycles
    return busy
