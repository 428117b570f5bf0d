"""Exercises of lesson 6: the numbers that both loops move, and the tiles that a causal mask leaves."""

from pagewise.exercises.python import call, python_exercise


def numbers_moved(T: int, S: int, D: int, Br: int, Bc: int) -> tuple[int, int]:
    """Return how many numbers versions 1 and 2 load and store for T queries and S keys of one head.

    Br and Bc are the queries and keys of a tile. The last tile may be smaller. Every query sees every key.
    Version 1 stores its first O, m and l before the loops. Inside the loops it loads and stores all three.
    Version 2 stores O, and one number L for each query.
    """
    row_tiles, col_tiles = -(-T // Br), -(-S // Bc)
    state = T * D + 2 * T  # O, m and l
    version_1 = state + 2 * S * D + col_tiles * (T * D + 2 * state)
    version_2 = T * D + row_tiles * 2 * S * D + T * D + T
    return version_1, version_2


NUMBERS_MOVED = python_exercise(
    numbers_moved,
    [
        call(1, 1, 1, 1, 1),
        call(2, 1, 1, 2, 1),
        call(1, 2, 1, 1, 1),
        call(2, 2, 1, 1, 2),
        call(3, 5, 2, 2, 2),
        call(1024, 1024, 64, 64, 384),
    ],
    [
        "each number once: These are the numbers of Q, K, V and O, each counted once. The loops load or store some "
        "of them again, and also m, l and L. Look at each line with `load` or `store`, and at the loop that it is in.",
        (
            "state + 2 * S * D + col_tiles * (T * D + 2 * state)",
            "2 * T * D + 2 * S * D",
        ),
        ("T * D + row_tiles * 2 * S * D + T * D + T", "2 * T * D + 2 * S * D"),
        "the first O is missing: Version 1 stores zeros in O and l, and −∞ in m, before its loops.",
        ("version_1 = state + 2", "version_1 = 2"),
        "m and l are missing: Version 1 also moves m and l: two numbers for each query, wherever it moves O.",
        ("state = T * D + 2 * T", "state = T * D"),
        "L is missing: Version 2 also stores L, one number for each query.",
        (" + T * D + T\n", " + T * D\n"),
        "O is only stored: Version 1 loads O, m and l of a tile before it stores them: both directions count.",
        ("T * D + 2 * state", "T * D + state"),
        "O in every iteration of version 2: Version 2 keeps O on the chip until the row is done: it stores O once.",
        ("+ T * D + T\n", "+ col_tiles * T * D + T\n"),
        "K and V once: Version 2 loads all of K and V for each tile of queries.",
        ("row_tiles * 2 * S * D", "2 * S * D"),
        "K and V for each query: The queries of a tile share the K and V that are loaded: count tiles of queries, not "
        "queries.",
        ("row_tiles * 2", "T * 2"),
        "Q, O for each key: The keys of a tile share the Q and O that are loaded: count tiles of keys, not keys.",
        ("col_tiles * (", "S * ("),
        "whole tiles only: The last tile may be smaller, and it needs its own iteration: round the number of tiles up.",
        ("-(-T // Br), -(-S // Bc)", "T // Br, S // Bc"),
        "tiles exchanged: Version 1 repeats its inner loop once per tile of keys, version 2 once per tile of queries.",
        ("-(-T // Br), -(-S // Bc)", "-(-S // Bc), -(-T // Br)"),
    ],
    "the same count as `count_work` finds in the package's loops.",
)


def tile_range(i: int, Br: int, Bc: int, T: int, S: int) -> tuple[int, int]:
    """Return (full, stop) for row tile i under a causal mask: query t sees key s if s ≤ t + S − T.

    The queries of the tile are i · Br … min((i + 1) · Br, T) − 1.
    Column tiles 0 … full − 1 need no mask: every query sees all Bc keys. Column tiles full … stop − 1 need a mask.
    The other column tiles hold no key that a query of the tile sees.
    """
    first, last = i * Br + S - T, min((i + 1) * Br, T) - 1 + S - T  # the last keys that its first and last query see
    return max(0, first + 1) // Bc, -(-max(0, last + 1) // Bc)


TILE_RANGE = python_exercise(
    tile_range,
    [
        call(0, 2, 2, 8, 8),
        call(1, 2, 2, 8, 8),
        call(3, 3, 2, 12, 12),
        call(1, 4, 4, 16, 16),
        call(0, 2, 2, 4, 8),
        call(1, 4, 3, 6, 6),
        call(0, 3, 2, 9, 4),
        call(0, 1, 16, 1, 100),
    ],
    [
        "every tile: You visit every tile and mask each of them. A causal mask hides the keys after the last query of "
        "the tile: which key does that query see last?",
        (
            "max(0, first + 1) // Bc, -(-max(0, last + 1) // Bc)",
            "0, -(-S // Bc)",
        ),
        "top left: This is right if T = S. Otherwise the last query sees the last key: add S − T to a query's index.",
        (" + S - T", ""),
        "a tile too few: The last query also sees a part of the next tile. It sees keys 0 … last, which are last + 1 "
        "keys: round their number of tiles up.",
        ("-(-max(0, last + 1) // Bc)", "max(0, last + 1) // Bc"),
        "mask-free for the last query: `full` counts the tiles that the *last* query sees whole. The first query sees "
        "fewer keys, and it needs a mask there.",
        ("max(0, first + 1)", "max(0, last + 1)"),
        "mask-free a tile too far: The first query does not see tile `full − 1` whole: round the number of its tiles "
        "down.",
        ("first + 1", "first + Bc"),
        "the own key left out: A query sees its own key too: the first query sees first + 1 keys, not first.",
        ("first + 1", "first"),
        "negative: If T > S, the first queries see no key. The number of tiles is then 0, not negative.",
        ("max(0, first + 1)", "(first + 1)"),
        ("max(0, last + 1)", "(last + 1)"),
        "past the last query: The last row tile may have fewer than Br queries. Its last query is T − 1.",
        ("min((i + 1) * Br, T)", "(i + 1) * Br"),
    ],
    "the loop skips about half of the tiles, and only tiles on the diagonal pay for a mask.",
)

EXERCISES = [NUMBERS_MOVED, TILE_RANGE]
