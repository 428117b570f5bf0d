"""Online softmax with m, l or acc in fewer bits, and weights from a stored log-sum-exp (lesson 3 in depth)."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
CHOICES: Mapping[str, dict[str, torch.dtype]] = MappingProxyType(
    {
        "all in float32": {},
        "m in bfloat16": {"m": BFLOAT16},
        "l in bfloat16": {"l": BFLOAT16},
        "acc in bfloat16": {"acc": BFLOAT16},
        "l and acc in float16": {"l": FLOAT16, "acc": FLOAT16},
    }
)


def in_tiles(
    scores: Tensor,
    values: Tensor,
    *,
    m: torch.dtype = FLOAT32,
    l: torch.dtype = FLOAT32,
    acc: torch.dtype = FLOAT32,
    tile_size: int = 64,
) -> Tensor:
    """Return softmax(scores [S]) @ values [S] from tiles of keys, with the state in these dtypes between two tiles."""
    top, total, weighted = torch.tensor(-torch.inf), torch.tensor(0.0), torch.tensor(0.0)
    for s, v in zip(scores.split(tile_size), values.split(tile_size), strict=True):
        new = torch.maximum(top, s.max()).to(m).float()
        shrink, weights = torch.exp(top - new), torch.exp(s - new)
        total = (shrink * total + weights.sum()).to(l).float()
        weighted = (shrink * weighted + weights @ v).to(acc).float()
        top = new
    return weighted / total


def errors(lengths: Sequence[int] = tuple(2**e for e in range(8, 18))) -> dict[str, list[float]]:
    """Return the relative error of the output for each of `CHOICES` and each length, averaged over four rows."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, list[float]] = {name: [] for name in CHOICES}
    for S in lengths:
        rows = [torch.randn(2, S, generator=generator) for _ in range(4)]
        for name, dtypes in CHOICES.items():
            wrong = 0.0
            for scores, values in rows:
                values = values + 1  # the output is about 1
                exact = torch.softmax(scores.double(), dim=0) @ values.double()
                wrong += abs(in_tiles(scores, values, **dtypes) / exact - 1).item() / len(rows)
            found[name].append(max(wrong, 1e-8))
    return found


def errors_of_stored(largest: Sequence[float] = (1.0, 10.0, 100.0, 1e3, 1e4, 6e4)) -> dict[str, list[float]]:
    """Return by how much the weights of a row, recomputed in float32 from what was stored, do not sum to 1.

    The largest of 1024 scores is about `largest`. The mean of ten rows.
    """
    generator = torch.Generator().manual_seed(0)
    found: dict[str, list[float]] = {"from lse": [], "from m and l": []}
    for top in largest:
        wrong = [0.0, 0.0]
        for _ in range(10):
            scores = torch.randn(1024, generator=generator) + top
            m = scores.max()
            l = torch.exp(scores - m).sum()
            stored = torch.exp(scores - (m + torch.log(l))), torch.exp(scores - m) / l
            wrong = [sum_ + abs(p.double().sum() - 1).item() / 10 for sum_, p in zip(wrong, stored, strict=True)]
        for series, each in zip(found.values(), wrong, strict=True):
            series.append(max(each, 1e-8))
    return found
