"""Exercises of lesson 7, how the work is shared out: a number of splits, and equal ranges of a ragged batch."""

import math

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


_FIRST_GOOD = "next(i for i, e in enumerate(efficiency) if e >= 0.85 * max(efficiency))"

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
        "the best one: That is the best one: the smallest with 0.85 of it has fewer partial results to merge.",
        (_FIRST_GOOD, "efficiency.index(max(efficiency))"),
        "the largest good one: Of those that are good enough the smallest is wanted: each split has to be merged.",
        ("next(i for", "max(i for"),
        "until all slots are taken: The first s that fills all slots may begin a second turn with hardly anything in "
        "it.",
        (f"1 + {_FIRST_GOOD}", "next((s for s, t in enumerate(turns, 1) if t >= 1), max_splits)"),
        "85 % of everything: 0.85 of the best efficiency, not of 1: with few splits allowed none may reach that.",
        (_FIRST_GOOD, "next((i for i, e in enumerate(efficiency) if e >= 0.85), max_splits - 1)"),
        "turns for efficiency: More turns are not better: efficiency is turns(s) / ⌈turns(s)⌉, 1 at most.",
        ("[t / math.ceil(t) for t in turns]", "turns"),
        "a full turn too many: ⌊turns⌋ + 1 counts one turn too many where they come out even: round up, ⌈turns⌉.",
        ("math.ceil(t)", "(math.floor(t) + 1)"),
        "fewer programs: Cut in s, there are s times as many programs, not a share of them.",
        ("num_programs * s / num_slots", "num_programs / (s * num_slots)"),
        "max_splits left out: s may be max_splits itself: range ends before its end.",
        ("range(1, max_splits + 1)", "range(1, max(max_splits, 2))"),
        "counted from 0: That is one too small: the first s is 1.",
        ("1 + next", "next"),
    ],
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
        "each item by itself: That cuts every item into as many pieces as there are programs: cut the batch as a "
        "whole, end to end.",
        (_RANGE, "begin + count * p // num_programs, begin + count * (p + 1) // num_programs"),
        "one item only: A range goes on behind the end of an item, into the next one and those after it.",
        ("return pieces", "return pieces[:1]"),
        "tiles of the batch: These tiles count from the batch's first: a piece counts from its item's first.",
        ("first - begin, last - begin", "first, last"),
        "rounded up: With ⌈W / n⌉ tiles for each, the last programs have less or nothing: W · p // n shares evenly.",
        ("W * p // num_programs", "-(-W // num_programs) * p"),
        ("W * (p + 1) // num_programs", "-(-W // num_programs) * (p + 1)"),
        "rounded down: With ⌊W / n⌋ tiles for each, the batch's last tiles belong to nobody.",
        ("W * p // num_programs", "W // num_programs * p"),
        ("W * (p + 1) // num_programs", "W // num_programs * (p + 1)"),
        "empty pieces: An item without tiles is no piece: nobody has to merge it.",
        ("if first < last", "if first < last or count == 0 and start <= begin < stop"),
        "the last tile, not one behind: The third number is one behind the last tile, as in a range.",
        ("last - begin)", "last - begin - 1)"),
    ],
    "every program has the same work, give or take a tile, however ragged the batch.",
)

EXERCISES = [SMALLEST_GOOD_SPLIT, PIECES_OF_PROGRAM]
