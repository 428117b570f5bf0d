"""Exercises of lesson 7: the merge of splits, their number, a whole split decode, and equal ranges of a batch."""

import math

import torch
from torch import Tensor

from pagewise.exercises.exercise import Case
from pagewise.exercises.python import call, python_exercise
from pagewise.exercises.values import small_numbers


def merge_splits(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out [D], lse) over all keys from the results of n splits: outs [n, D], each normalised, and lses [n].

    A split that saw no key has lse −inf. Do not read its `out`: it may hold NaN. If no split saw a key, out is 0 and
    lse is −inf. Scores may be large: lse = 200 is an ordinary number.
    """
    m = lses.max()
    weights = torch.exp(lses - torch.where(m == -torch.inf, 0.0, m))  # (−inf) − (−inf) would be NaN
    l = weights.sum()
    seen = torch.where(weights[:, None] > 0, outs, 0.0)
    return weights @ seen / torch.where(l == 0, 1.0, l), m + torch.log(l)


def _lses(*numbers: float) -> Tensor:
    return torch.tensor(numbers)


_WEIGHTS = "torch.exp(lses - torch.where(m == -torch.inf, 0.0, m))"

MERGE_SPLITS = python_exercise(
    merge_splits,
    [
        call(torch.tensor([[5.0]]), _lses(2.0)),
        call(torch.tensor([[4.0], [8.0]]), _lses(0.0, math.log(3.0))),
        call(torch.tensor([[4.0, 1.0], [8.0, 3.0]]), _lses(1.0, 1.0 + math.log(3.0))),
        call(small_numbers(3, 2), _lses(2.0, 1.0, 0.5)),
        call(torch.tensor([[4.0], [0.0]]), _lses(1.0, -math.inf)),
        call(torch.tensor([[4.0], [8.0]]), _lses(200.0, 199.0)),
        call(torch.tensor([[4.0], [math.nan]]), _lses(1.0, -math.inf)),
        call(torch.zeros(2, 1), _lses(-math.inf, -math.inf)),
    ],
    [
        "the mean: That is the mean of the splits. The weight of a split is exp(its lse).",
        (_WEIGHTS, "(lses > -torch.inf).float()"),
        ("m + torch.log(l)", "torch.logsumexp(lses, 0)"),
        "lse as a weight: lse is a logarithm. The weight of a split is exp(lse), not lse.",
        (_WEIGHTS, "torch.where(lses > -torch.inf, lses, 0.0)"),
        ("m + torch.log(l)", "torch.logsumexp(lses, 0)"),
        "not divided: Divide the weighted sum by the sum of the weights.",
        (" / torch.where(l == 0, 1.0, l)", ""),
        "no maximum: exp(200) overflows. First subtract the largest lse, as softmax does.",
        ("lses.max()", "torch.zeros(())"),
        "the lse without m: Your logarithm is relative to m. The lse of all keys is m + log l.",
        ("m + torch.log(l)", "torch.log(l)"),
        "the largest lse: That is the lse of the heaviest split alone. All splits together have m + log l.",
        ("m + torch.log(l)", "m"),
        "the sum of the lses: Do not add logarithms. Add exp(lse), then take the logarithm.",
        ("m + torch.log(l)", "lses.sum()"),
        "exp overflows: exp(200) is infinite in float32, and infinite / infinite is NaN. Subtract the largest lse "
        "before you call exp.",
        ("torch.exp(lses - torch.where(m == -torch.inf, 0.0, m))", "torch.exp(lses)"),
        ("m + torch.log(l)", "lses.logsumexp(dim=0)"),
        "NaN times 0: The empty split has weight 0, and 0 · NaN is NaN. Do not read its output.",
        ("torch.where(weights[:, None] > 0, outs, 0.0)", "outs"),
        "NaN without keys: No split saw a key, so m is −inf, and (−inf) − (−inf) is NaN. Subtract 0 there.",
        ("torch.where(m == -torch.inf, 0.0, m)", "m"),
        ("torch.where(l == 0, 1.0, l)", "l"),
        "0 / 0: No split saw a key, and 0 / 0 is NaN. The output must be 0.",
        ("torch.where(l == 0, 1.0, l)", "l"),
    ],
    "one output and one number per split are enough to merge exactly.",
    imports="import torch\nfrom torch import Tensor",
    start="return outs.mean(dim=0), lses.logsumexp(dim=0)  # yours",
)


def smallest_good_split(num_programs: int, num_slots: int, max_splits: int) -> int:
    """Return the smallest number s ≤ max_splits of splits that is nearly as fast as the best number.

    A GPU runs `num_slots` programs at a time. Cut in s, each of `num_programs` programs becomes s programs that take
    1 / s of its time. They run in waves of num_slots, and a wave that is not full takes as long as a full wave. Return
    the smallest s whose total time is at most 1 / 0.85 of the shortest possible.
    """
    times = [math.ceil(num_programs * s / num_slots) / s for s in range(1, max_splits + 1)]
    return 1 + next(i for i, time in enumerate(times) if 0.85 * time <= min(times))


_FIRST_GOOD = "next(i for i, time in enumerate(times) if 0.85 * time <= min(times))"
_TIME = "math.ceil(num_programs * s / num_slots) / s"

SMALLEST_GOOD_SPLIT = python_exercise(
    smallest_good_split,
    [
        call(8, 8, 4),
        call(1, 4, 8),
        call(1, 10, 16),
        call(3, 8, 8),
        call(10, 8, 4),
        call(8, 132, 16),
        call(8, 264, 3),
        call(48, 132, 16),
        call(5, 6, 8),
    ],
    [
        "the best one: That s is the fastest. A smaller s within 1 / 0.85 of its time leaves less to merge.",
        (_FIRST_GOOD, "times.index(min(times))"),
        "the largest good one: Several s are fast enough. Return the smallest, because each split must be merged.",
        ("next(i for", "max(i for"),
        "until all slots are taken: You fill the slots once, but the time decides. Compute the time of every s. A "
        "smaller s may be within 1 / 0.85 of the shortest time, and several waves may be faster than one.",
        (f"1 + {_FIRST_GOOD}", "max(1, min(num_slots // num_programs, max_splits))"),
        "0.85 of a full GPU: Compare with the shortest time among s ≤ max_splits, not with the time of a full GPU.",
        (_FIRST_GOOD, "next((i for i, t in enumerate(times) if 0.85 * t <= num_programs / num_slots), max_splits - 1)"),
        "waves for time: The number of waves grows with s, but each wave takes 1 / s of the time.",
        (_TIME, "math.ceil(num_programs * s / num_slots)"),
        "a wave too many: ⌊x⌋ + 1 counts one wave too many where x is whole: use ⌈x⌉.",
        ("math.ceil(num_programs * s / num_slots)", "(num_programs * s // num_slots + 1)"),
        "max_splits left out: s may be max_splits itself, and range ends before its end.",
        ("range(1, max_splits + 1)", "range(1, max(max_splits, 2))"),
        "counted from 0: That is one too small: the first s is 1.",
        ("1 + next", "next"),
    ],
    "`num_splits_heuristic` follows this rule, with a few limits.",
    imports="import math",
    start="return max(1, min(num_slots // num_programs, max_splits))  # yours",
)


def split_decode(q: Tensor, k: Tensor, v: Tensor, num_slots: int, tile: int) -> tuple[Tensor, Tensor]:
    """Return (out [H, D], lses [n, H]) of attention of one query over S keys, read in n splits.

    q is [H, D]; k and v are [Hkv, S, D]. One program serves all query heads of a KV head. The keys are t tiles of
    `tile` keys, and the last tile may be shorter. With n = smallest_good_split(programs, num_slots, t), split i has
    tiles t · i // n … t · (i + 1) // n − 1. Row i of lses holds what split i found.
    """
    (H, D), (Hkv, S, _) = q.shape, k.shape
    t = -(-S // tile)
    n = smallest_good_split(Hkv, num_slots, t)
    outs, lses = [], []
    for i in range(n):
        keys = slice(t * i // n * tile, t * (i + 1) // n * tile)
        scores = q.view(Hkv, H // Hkv, D) @ k[:, keys].mT / D**0.5
        outs.append((scores.softmax(dim=-1) @ v[:, keys]).view(H, D))
        lses.append(scores.logsumexp(dim=-1).view(H))
    outs, lses = torch.stack(outs, dim=1), torch.stack(lses)
    return torch.stack([merge_splits(outs[h], lses[:, h])[0] for h in range(H)]), lses


def _decode(H: int, Hkv: int, S: int, num_slots: int, tile: int) -> Case:
    k, v = small_numbers(Hkv, S, 4), small_numbers(Hkv, S + 1, 4)[:, 1:]
    return call(small_numbers(H, 4), k, v, num_slots, tile)


SPLIT_DECODE = python_exercise(
    split_decode,
    [
        call(torch.zeros(1, 2), torch.eye(2)[None], torch.tensor([[[2.0, 4.0], [6.0, 8.0]]]), 2, 1),
        _decode(1, 1, 4, 2, 2),
        _decode(1, 1, 5, 2, 2),
        _decode(1, 1, 7, 2, 2),
        _decode(1, 1, 3, 8, 2),
        _decode(2, 1, 4, 2, 1),
        _decode(4, 2, 12, 6, 3),
    ],
    [
        "one split: That is attention in one split. Choose n, cut the keys, and merge.",
        ("smallest_good_split(Hkv, num_slots, t)", "1"),
        "a split per slot: There may be fewer tiles than slots. Then some splits have no key: allow t splits at most.",
        ("num_slots, t)", "num_slots, num_slots)"),
        "a program per query head: A program serves all query heads of its KV head: Hkv programs, not H.",
        ("smallest_good_split(Hkv", "smallest_good_split(H"),
        "keys, not tiles: You cut a tile in two. Share out whole tiles, and then multiply by `tile`.",
        ("t * i // n * tile, t * (i + 1) // n * tile", "S * i // n, S * (i + 1) // n"),
        "the last tile left out: The last tile may be shorter. Round the number of tiles up.",
        ("-(-S // tile)", "S // tile"),
        "the mean: That is the mean of the splits. Merge them with their lses: `merge_splits`.",
        ("merge_splits(outs[h], lses[:, h])[0]", "outs[h].mean(dim=0)"),
        "no scale: The scores lack the division by √D.",
        (" / D**0.5", ""),
        "heads in another order: Query head h belongs to KV head h // (H // Hkv): neighbours share a KV head.",
        ("q.view(Hkv, H // Hkv, D)", "q.view(H // Hkv, Hkv, D).transpose(0, 1)"),
    ],
    "this is Flash-Decoding: the number of splits, the splits and the merge.",
    imports="import torch\nfrom torch import Tensor\n\nfrom pagewise.exercises.lesson_7 import merge_splits, "
    "smallest_good_split",
    start="""\
(H, D), Hkv = q.shape, k.shape[0]
scores = q.view(Hkv, H // Hkv, D) @ k.mT / D**0.5  # yours
return (scores.softmax(dim=-1) @ v).view(H, D), scores.logsumexp(dim=-1).view(1, H)""",
)


def pieces_of_program(p: int, num_programs: int, tiles: list[int]) -> list[tuple[int, int, int]]:
    """Return the work of program p of a ragged batch: a list of (item, first tile, one past the last tile).

    Item i has tiles[i] tiles, and tiles count from 0 in each item. All items laid end to end have W tiles. Program p
    takes the tiles from W · p // num_programs up to W · (p + 1) // num_programs, from one item or several. No piece is
    empty.
    """
    W, begin, pieces = sum(tiles), 0, []
    start, stop = W * p // num_programs, W * (p + 1) // num_programs
    for item, count in enumerate(tiles):
        first, last = max(start, begin), min(stop, begin + count)
        if first < last:
            pieces.append((item, first - begin, last - begin))
        begin += count
    return pieces


_RANGE = "max(start, begin), min(stop, begin + count)"

PIECES_OF_PROGRAM = python_exercise(
    pieces_of_program,
    [
        call(0, 1, [4]),
        call(1, 2, [4]),
        call(1, 2, [2, 2]),
        call(0, 3, [8]),
        call(1, 3, [8]),
        call(0, 2, [1, 5]),
        call(1, 4, [3, 1, 8]),
        call(0, 2, [2, 0, 4]),
        call(3, 8, [2, 1]),
        call(0, 1, [1, 2, 1]),
    ],
    [
        "each item by itself: You cut every item into num_programs pieces. Lay all items end to end, and cut the "
        "whole once.",
        (_RANGE, "begin + count * p // num_programs, begin + count * (p + 1) // num_programs"),
        "the first item: That is all of item 0, for every p. Lay all items end to end, and give each program its range "
        "of the tiles.",
        ("return pieces", "return [(0, 0, tiles[0])]"),
        "one item only: A range may continue into the next item, and into several more.",
        ("return pieces", "return pieces[:1]"),
        "empty pieces: An item without a tile for this program is not in the list. Append a piece only if its first "
        "tile comes before its end.",
        (
            "        if first < last:\n            pieces.append((item, first - begin, last - begin))",
            "        pieces.append((item, first - begin, last - begin))",
        ),
        "tiles of the batch: You count tiles from the start of the batch. Count them from the start of their item.",
        ("first - begin, last - begin", "first, last"),
        "rounded up: With ⌈W / n⌉ tiles for each, the last programs have fewer tiles or none. Use W · p // n.",
        ("W * p // num_programs", "-(-W // num_programs) * p"),
        ("W * (p + 1) // num_programs", "-(-W // num_programs) * (p + 1)"),
        "rounded down: With ⌊W / n⌋ tiles for each, no program has the batch's last tiles. Use W · p // n.",
        ("W * p // num_programs", "W // num_programs * p"),
        ("W * (p + 1) // num_programs", "W // num_programs * (p + 1)"),
        "empty pieces: An item without tiles has no piece. Leave it out.",
        ("if first < last", "if first < last or count == 0 and start <= begin < stop"),
        "the last tile, not one past it: The third number is one past the last tile, as in a range.",
        ("last - begin)", "last - begin - 1)"),
    ],
    "every program has the same work, up to one tile, for any lengths.",
    start="return [(0, 0, tiles[0])]  # yours",
)

EXERCISES = [MERGE_SPLITS, SMALLEST_GOOD_SPLIT, SPLIT_DECODE, PIECES_OF_PROGRAM]
