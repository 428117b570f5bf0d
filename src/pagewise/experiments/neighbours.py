"""Do the bits of one sequence's attention depend on the other sequences of its batch? (lesson 7 in depth)

Each schedule of `decode_schedules` cuts the keys of a sequence into pieces. Every piece is computed tile by tile and
leaves its output and log-sum-exp, and these are merged in the order of the keys. So the cut alone decides how the sums
are rounded.
"""

from functools import reduce

import torch
from torch import Tensor

from pagewise.experiments.decode_schedules import KV_HEADS, SCHEDULES, TILE, equal_shares, of_ideal
from pagewise.online_softmax import Partial, merge_attention
from pagewise.tools.sizes import cdiv


def cut_of(name: str, lengths: list[int], sequence: int) -> list[int]:
    """Return the tiles of each piece of a sequence's first KV head, in the order of the keys.

    `name` is a key of `SCHEDULES`.
    """
    cut = SCHEDULES[name]
    pieces = [share.tiles for program in cut(lengths) for share in program if share.sequence == sequence]
    if cut is not equal_shares:  # all KV heads are cut alike, and only the last piece of a head may be shorter
        return sorted(pieces, reverse=True)[::KV_HEADS]
    left, first = cdiv(lengths[sequence], TILE), []
    while left:
        first.append(pieces.pop(0))
        left -= first[-1]
    return first


def attend(scores: Tensor, values: Tensor, cut: list[int]) -> Tensor:
    """Return softmax(scores [S]) @ values [S, D], computed in pieces of these numbers of tiles."""
    tiles = [Partial.of(s, v) for s, v in zip(scores.split(TILE), values.split(TILE), strict=True)]
    pieces, start = [], 0
    for count in cut:
        pieces.append(reduce(Partial.merge, tiles[start : start + count]))
        start += count
    outs, lses = torch.stack([piece.output() for piece in pieces]), torch.stack([piece.lse() for piece in pieces])
    return merge_attention(outs, lses)[0]


def same_bits(name: str, lengths: list[int], sequence: int) -> bool:
    """Return whether a sequence's output has the same bits alone as in the batch, for random scores and values."""
    draw, S = torch.Generator().manual_seed(0), lengths[sequence]
    scores, values = torch.randn(S, generator=draw), torch.randn(S, 64, generator=draw)
    alone = attend(scores, values, cut_of(name, [S], 0))
    return torch.equal(alone, attend(scores, values, cut_of(name, lengths, sequence)))


def compared(lengths: list[int], sequence: int) -> list[tuple[str, float, bool]]:
    """Return (schedule, % of the bandwidth for the whole batch, `same_bits` of the sequence) for each schedule."""
    return [
        (name, 100 * of_ideal(lengths, cut(lengths)), same_bits(name, lengths, sequence))
        for name, cut in SCHEDULES.items()
    ]
