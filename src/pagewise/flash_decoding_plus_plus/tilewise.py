"""Keys split by split and tile by tile, in plain torch: the loop under the softmaxes of this lesson.

On a GPU the splits run side by side. Here they run one after the other. A `fold` function handles each tile of scores.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from pagewise.naive_attention import masked_scores, query_positions
from pagewise.online_softmax import Partial
from pagewise.options import ScoreOptions
from pagewise.tools.sizes import cdiv
from pagewise.tools.transforms import outside_graphs

TILE = 64  # keys

Fold = Callable[[Partial, Float[Tensor, "B H T n"], Float[Tensor, "B Hkv n D"]], Partial]
"""fold(seen, scores of a tile, its values) -> what has been seen now."""


@outside_graphs('lazy_rescale_attention(backend="torch")', remedy='backend="triton"')
def attend_in_splits(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S D"],
    options: ScoreOptions,
    num_splits: int | None,
    fold: Fold,
) -> list[Partial]:
    """Return the `Partial` of each split, in float32 (float64 for float64). Split i of n begins at tile N·i // n."""
    (B, H, T, D), S = q.shape, k.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    queries, num_tiles, splits = query_positions(T, S, q.device), cdiv(S, TILE), []
    n = max(1, min(num_splits or 1, num_tiles))
    for i in range(n):
        seen = Partial.empty(B, H, T, head_size=D, dtype=wide, device=q.device)
        for tile in range(num_tiles * i // n, num_tiles * (i + 1) // n):
            keys = torch.arange(tile * TILE, min((tile + 1) * TILE, S), device=q.device)
            scores = masked_scores(q, k[:, :, keys], queries, keys, options)
            seen = fold(seen, scores, v[:, :, keys].to(wide))
        splits.append(seen)
    return splits
