"""Exercises of lesson 8, products with few rows: where implementations cross, and the size of a ring for a GPU."""

from pagewise.exercises.python import call, python_exercise


def inflections(gemv: list[float], flat: list[float], matmul: list[float]) -> tuple[int, int]:
    """Return (M1, M2) from the seconds of three implementations for M = 1, 2, … n rows.

    gemv serves M < M1, flat serves M1 ≤ M < M2, and matmul serves M ≥ M2, with 1 ≤ M1 ≤ M2 ≤ n + 1. The times are
    noisy, so take the pair with the smallest total time over all M. Among equal totals, take the smallest pair.
    """
    n = len(gemv)
    pairs = [(M1, M2) for M1 in range(1, n + 2) for M2 in range(M1, n + 2)]
    return min(pairs, key=lambda p: sum(gemv[: p[0] - 1]) + sum(flat[p[0] - 1 : p[1] - 1]) + sum(matmul[p[1] - 1 :]))


def _crossing(earlier: list[float], later: list[float]) -> int:
    """The first M at which `later` is faster than `earlier`, or n + 1."""
    return next((M for M, (a, b) in enumerate(zip(earlier, later, strict=True), 1) if b < a), len(earlier) + 1)


def _last_crossing(earlier: list[float], later: list[float]) -> int:
    """The M after the last one at which `earlier` is faster than `later`."""
    return 1 + max((M for M, (a, b) in enumerate(zip(earlier, later, strict=True), 1) if a < b), default=0)


def _best_of_two(earlier: list[float], later: list[float]) -> int:
    """The M from which `later` serves if there are only these two."""
    return min(range(1, len(earlier) + 2), key=lambda M: sum(earlier[: M - 1]) + sum(later[M - 1 :]))


_M1, _M2 = "for M1 in range(1, n + 2)", "for M2 in range(M1, n + 2)"

INFLECTIONS = python_exercise(
    inflections,
    [
        call([1.0, 3.0], [2.0, 2.0], [4.0, 4.0]),
        call([1.0, 3.0, 5.0, 7.0], [2.0, 2.0, 4.0, 6.0], [3.0, 3.0, 3.0, 3.0]),
        call([5.0, 6.0, 7.0], [1.0, 2.0, 6.0], [3.0, 3.0, 3.0]),
        call([1.0, 1.0, 9.0, 9.0], [4.0, 4.0, 4.0, 4.0], [2.0, 2.0, 2.0, 2.0]),
        call([1.0, 3.0, 3.0], [4.0, 4.0, 1.5], [5.0, 2.0, 2.0]),
        call([1.0, 3.0, 9.0, 2.9, 9.0], [2.0, 2.0, 3.0, 3.0, 3.0], [9.0, 9.0, 9.0, 9.0, 9.0]),
        call([1.0, 3.0, 2.0, 9.0, 9.0], [2.5, 2.9, 3.0, 3.0, 3.0], [9.0, 9.0, 9.0, 9.0, 9.0]),
    ],
    [
        "the first crossing: One noisy time decides the first crossing, which may be an accident. Add up the times of "
        "each pair.",
        (_M1, "for M1 in [_crossing(gemv, flat)]"),
        (_M2, "for M2 in [M1 - 1 + _crossing(flat[M1 - 1 :], matmul[M1 - 1 :])]"),
        "the last crossing: One noisy time decides the last crossing, which may be an accident too. Add up the times "
        "of each pair.",
        (_M1, "for M1 in [_last_crossing(gemv, flat)]"),
        (_M2, "for M2 in [max(M1, _last_crossing(list(map(min, gemv, flat)), matmul))]"),
        "one after the other: M1 was chosen without matmul, and M2 afterwards. With matmul, another M1 may lose less. "
        "Try all pairs.",
        (_M1, "for M1 in [_best_of_two(gemv, flat)]"),
        "each pair of curves by itself: Two separate comparisons may give M1 > M2, if gemv and matmul are both faster "
        "than flat. Choose M1 and M2 together.",
        (_M1, "for M1 in [_best_of_two(gemv, flat)]"),
        (_M2, "for M2 in [_best_of_two(flat, matmul)]"),
        "counted from 0: The result holds list indices. The first time belongs to M = 1, so add 1.",
        (_M1, "for M1 in range(n + 1)"),
        (_M2, "for M2 in range(M1, n + 1)"),
        (" - 1", ""),
        "the last one of each: M1 is the first M that flat serves, and M2 the first M that matmul serves. Both are too "
        "large by 1.",
        (_M1, "for M1 in range(2, n + 3)"),
        (_M2, "for M2 in range(M1, n + 3)"),
        (" - 1", " - 2"),
        "two of three: gemv never serves, although gemv is the fastest for the smallest M. Try every M1.",
        (_M1, "for M1 in [1]"),
    ],
    "two numbers serve one shape of weights, and a single wrong time does not move them.",
)


def tile_and_ring(N: int, num_sms: int, in_flight: int) -> tuple[int, int]:
    """Return (B_N, stages) of a flat product with weights [N, K] on a GPU with this number of SMs.

    B_N is the widest of 16, 32, 64 and 128 columns that still gives every SM a thread block, or 16 if no width does.
    A thread block owns B_N columns, and one stage of its ring holds 512 · B_N bytes. Every SM has at least
    ⌊thread blocks / SMs⌋ thread blocks, or 1, and needs `in_flight` bytes on the way at all times. One stage of each
    ring is being multiplied, and the other stages, at least one, are on the way.
    """
    width = next((b for b in (128, 64, 32, 16) if -(-N // b) >= num_sms), 16)
    thread_blocks = max(1, -(-N // width) // num_sms)
    return width, 1 + max(1, -(-in_flight // (thread_blocks * 512 * width)))


TILE_AND_RING = python_exercise(
    tile_and_ring,
    [
        call(128, 1, 65536),
        call(128, 2, 65536),
        call(128, 2, 65537),
        call(128, 2, 10000),
        call(256, 1, 131072),
        call(100, 2, 65536),
        call(64, 40, 16384),
        call(4096, 108, 11327),
        call(4096, 132, 25455),
        call(12288, 132, 25455),
    ],
    [
        "the narrowest tile: A narrow tile reads x more often than necessary. Take the widest tile that gives every "
        "SM a thread block.",
        ("(128, 64, 32, 16)", "(16, 32, 64, 128)"),
        "always the widest: Some SMs have no thread block with this width. Compare the number of thread blocks with "
        "the number of SMs.",
        ("if -(-N // b) >= num_sms", "if True"),
        "the same for every GPU: The width and the ring must follow from N, the SMs and the bytes in flight. Choose "
        "the width first: try the widest tile, and count its thread blocks.",
        ("next((b for b in (128, 64, 32, 16) if -(-N // b) >= num_sms), 16)", "32"),
        ("1 + max(1, -(-in_flight // (thread_blocks * 512 * width)))", "2"),
        "columns left over: The last columns need a thread block too, even if they do not fill it. Round N / B_N up.",
        ("-(-N // b) >= num_sms", "N // b >= num_sms"),
        "no stage to multiply: One stage is being multiplied, so it is not on the way. Add one stage.",
        ("1 + max(1, ", "max(2, "),
        "rounded down: A part of a stage is still needed to reach in_flight. Round the number of stages up.",
        ("-(-in_flight // (thread_blocks * 512 * width))", "in_flight // (thread_blocks * 512 * width)"),
        "one thread block per SM: Several thread blocks of an SM share the need, each with its own ring. Divide "
        "in_flight by the bytes of all of them.",
        ("thread_blocks * 512", "512"),
        "a single buffer: A ring needs a stage on the way while another is multiplied, so it has at least two stages. "
        "Look at small values of in_flight.",
        (
            "1 + max(1, -(-in_flight // (thread_blocks * 512 * width)))",
            "max(1, -(-in_flight // (thread_blocks * 512 * width)))",
        ),
        "no thread block: An SM with a ring has at least one thread block, even if most SMs have none. Look at the "
        "number of thread blocks of an SM.",
        ("max(1, -(-N // width) // num_sms)", "-(-N // width) // num_sms"),
    ],
    "a wide GPU with a fast memory needs narrow tiles and a long ring.",
)

EXERCISES = [INFLECTIONS, TILE_AND_RING]
