"""Exercises of lesson 7, how the work is shared out: a number of splits, and equal ranges of a ragged batch."""

import math
from collections.abc import Callable

from pagewise.exercises.exercise import Mistake
from pagewise.exercises.python import call, python_exercise

# ------------------------------------------------------------------------------------------------ smallest_good_split


def smallest_good_split(num_programs: int, num_slots: int, max_splits: int) -> int:
    """The smallest s ≤ max_splits whose last turn is nearly as full as the best one's.

    `num_programs` programs, each cut in s, run on `num_slots` slots: in turns(s) = num_programs · s / num_slots turns,
    of which the last is begun as a whole, so efficiency(s) = turns(s) / ⌈turns(s)⌉. The answer is the smallest s with
    at least 0.85 of the best efficiency.
    """
    turns = [num_programs * s / num_slots for s in range(1, max_splits + 1)]
    efficiency = [t / math.ceil(t) for t in turns]
    return 1 + next(i for i, e in enumerate(efficiency) if e >= 0.85 * max(efficiency))


def _split_with(mistake: str) -> Callable:
    def smallest_good_split(num_programs, num_slots, max_splits):
        stop = max_splits if mistake == "one less" else max_splits + 1
        turns = [num_programs * s / num_slots for s in range(1, stop)] or [num_programs / num_slots]
        if mistake == "per split":
            turns = [num_programs / (s * num_slots) for s in range(1, stop)]
        efficiency = [t / (math.floor(t) + 1 if mistake == "floor" else math.ceil(t)) for t in turns]
        if mistake == "turns":
            efficiency = turns
        limit = 0.85 if mistake == "absolute" else 0.85 * max(efficiency)
        if mistake == "best":
            return 1 + efficiency.index(max(efficiency))
        if mistake == "last":
            return max(i + 1 for i, e in enumerate(efficiency) if e >= limit)
        if mistake == "full":
            return next((s for s in range(1, stop) if num_programs * s >= num_slots), max_splits)
        index = next((i for i, e in enumerate(efficiency) if e >= limit), max_splits - 1)
        return index if mistake == "from 0" else index + 1

    return smallest_good_split


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
    {
        "the best one": Mistake(
            _split_with("best"),
            "That is the best one: the smallest with 0.85 of it has fewer partial results to merge.",
        ),
        "the largest good one": Mistake(
            _split_with("last"), "Of those that are good enough the smallest is wanted: each split has to be merged."
        ),
        "until all slots are taken": Mistake(
            _split_with("full"), "The first s that fills all slots may begin a second turn with hardly anything in it."
        ),
        "85 % of everything": Mistake(
            _split_with("absolute"),
            "0.85 of the best efficiency, not of 1: with few splits allowed none may reach that.",
        ),
        "turns for efficiency": Mistake(
            _split_with("turns"), "More turns are not better: efficiency is turns(s) / ⌈turns(s)⌉, 1 at most."
        ),
        "a full turn too many": Mistake(
            _split_with("floor"), "⌊turns⌋ + 1 counts one turn too many where they come out even: round up, ⌈turns⌉."
        ),
        "fewer programs": Mistake(
            _split_with("per split"), "Cut in s, there are s times as many programs, not a share of them."
        ),
        "max_splits left out": Mistake(
            _split_with("one less"), "s may be max_splits itself: range ends before its end."
        ),
        "counted from 0": Mistake(_split_with("from 0"), "That is one too small: the first s is 1."),
    },
    "the rule by which kernels choose their splits, but for its limits.",
    imports="import math",
)

# ------------------------------------------------------------------------------------------------ pieces_of_program


def pieces_of_program(p: int, num_programs: int, tiles: list[int]) -> list[tuple[int, int, int]]:
    """What program p of a ragged batch does: a list of (item, first tile, one behind the last), tiles of that item.

    Item i has tiles[i] tiles. Laid end to end they are W, and program p takes those from W · p // num_programs up to
    W · (p + 1) // num_programs, wherever items begin and end in there. No piece is empty.
    """
    W, begin, pieces = sum(tiles), 0, []
    start, stop = W * p // num_programs, W * (p + 1) // num_programs
    for item, count in enumerate(tiles):
        first, last = max(start, begin), min(stop, begin + count)
        if first < last:
            pieces.append((item, first - begin, last - begin))
        begin += count
    return pieces


def _pieces_with(mistake: str) -> Callable:
    def pieces_of_program(p, num_programs, tiles):
        W, begin, pieces = sum(tiles), 0, []
        start, stop = W * p // num_programs, W * (p + 1) // num_programs
        if mistake == "rounded up":
            per = -(-W // num_programs)
            start, stop = min(W, per * p), min(W, per * (p + 1))
        if mistake == "rounded down":
            start, stop = W // num_programs * p, W // num_programs * (p + 1)
        if mistake == "each by itself":
            return [
                (i, t * p // num_programs, t * (p + 1) // num_programs)
                for i, t in enumerate(tiles)
                if t * p // num_programs < t * (p + 1) // num_programs
            ]
        for item, count in enumerate(tiles):
            first, last = max(start, begin), min(stop, begin + count)
            if first < last or (mistake == "empty" and count == 0 and start <= begin < stop):
                base = 0 if mistake == "of the batch" else begin
                pieces.append((item, first - base, last - base))
            begin += count
        return {"one item": pieces[:1], "inclusive": [(i, a, b - 1) for i, a, b in pieces]}.get(mistake, pieces)

    return pieces_of_program


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
    {
        "each item by itself": Mistake(
            _pieces_with("each by itself"),
            "That cuts every item into as many pieces as there are programs: cut the batch as a whole, end to end.",
        ),
        "one item only": Mistake(
            _pieces_with("one item"), "A range goes on behind the end of an item, into the next one and those after it."
        ),
        "tiles of the batch": Mistake(
            _pieces_with("of the batch"),
            "These tiles count from the batch's first: a piece counts from its item's first.",
        ),
        "rounded up": Mistake(
            _pieces_with("rounded up"),
            "With ⌈W / n⌉ tiles for each, the last programs have less or nothing: W · p // n shares evenly.",
        ),
        "rounded down": Mistake(
            _pieces_with("rounded down"), "With ⌊W / n⌋ tiles for each, the batch's last tiles belong to nobody."
        ),
        "empty pieces": Mistake(_pieces_with("empty"), "An item without tiles is no piece: nobody has to merge it."),
        "the last tile, not one behind": Mistake(
            _pieces_with("inclusive"), "The third number is one behind the last tile, as in a range."
        ),
    },
    "every program has the same work, give or take a tile, however ragged the batch.",
)

EXERCISES = [SMALLEST_GOOD_SPLIT, PIECES_OF_PROGRAM]
