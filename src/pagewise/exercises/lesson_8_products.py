"""Exercises of lesson 8, products with few rows: where implementations cross, and a double buffer that lacks a wait."""

import torch

from pagewise.exercises.code import device_code, edited
from pagewise.exercises.cuda import CudaExercise, checked
from pagewise.exercises.exercise import Case
from pagewise.exercises.python import call, python_exercise
from pagewise.exercises.values import small_numbers


def inflections(gemv: list[float], flat: list[float], matmul: list[float]) -> tuple[int, int]:
    """(M1, M2) from the seconds of three implementations for M = 1, 2, … n rows.

    gemv serves M < M1, flat serves M1 ≤ M < M2, matmul the rest; 1 ≤ M1 ≤ M2 ≤ n + 1. Times are noisy: take the pair
    whose total over all M is least (among equals the first, in the order of pairs).
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
        "the first crossing: One noisy time decides that: the first crossing may be an accident. Add up the times of "
        "each choice.",
        (_M1, "for M1 in [_crossing(gemv, flat)]"),
        (_M2, "for M2 in [M1 - 1 + _crossing(flat[M1 - 1 :], matmul[M1 - 1 :])]"),
        "the last crossing: One noisy time decides that: where a product wins for the last time may be an accident, "
        "too. Add up.",
        (_M1, "for M1 in [_last_crossing(gemv, flat)]"),
        (_M2, "for M2 in [max(M1, _last_crossing(list(map(min, gemv, flat)), matmul))]"),
        "one after the other: M1 was chosen as if there were no matmul, then M2: with matmul, another M1 may lose "
        "less. Try pairs.",
        (_M1, "for M1 in [_best_of_two(gemv, flat)]"),
        "each pair of curves by itself: gemv against flat and flat against matmul, each by itself, may give M1 > M2: "
        "where gemv and matmul are both faster than flat, nothing is left for it. Choose both together.",
        (_M1, "for M1 in [_best_of_two(gemv, flat)]"),
        (_M2, "for M2 in [_best_of_two(flat, matmul)]"),
        "counted from 0: Those are places in the lists: the first time is of M = 1.",
        (_M1, "for M1 in range(n + 1)"),
        (_M2, "for M2 in range(M1, n + 1)"),
        (" - 1", ""),
        "the last one of each: M1 is the first M that flat serves, M2 the first that matmul serves: one less each.",
        (_M1, "for M1 in range(2, n + 3)"),
        (_M2, "for M2 in range(M1, n + 3)"),
        (" - 1", " - 2"),
        "two of three: gemv was never chosen: for the smallest M it is the fastest.",
        (_M1, "for M1 in [1]"),
    ],
    "two numbers per shape of weights, and one accident in the times does not move them.",
)

_DOUBLE_BUFFER = device_code("double_buffer.cu")
_WAIT = "        __pipeline_wait_prior(1);\n"
_BARRIER = "        __syncthreads();\n"


def _sums(rows: int) -> Case:
    return checked(f"rows = {rows}", 1, 16, small_numbers(rows, 16), torch.Size([16]), rows)


DOUBLE_BUFFER = CudaExercise(
    "double_buffer",
    _DOUBLE_BUFFER,
    edited(
        _DOUBLE_BUFFER,
        (_WAIT, ""),
        (" 4.\n", " 4.\n// A line is missing, though the result may be right all the same. Find its place.\n"),
    ),
    [_sums(4), _sums(8), _sums(12)],
    [
        "missing wait: A copy is on its way until somebody waits for it: __pipeline_wait_prior(n) returns when all "
        "but the newest n batches of this thread have arrived. It stands before the barrier: each thread waits for "
        "its own copies, and the barrier tells the others.",
        (_WAIT, ""),
        "missing barrier after the wait: The wait is for the thread's *own* copies. What others have copied is there "
        "once they have waited, too: a barrier must follow.",
        (_WAIT + _BARRIER, _WAIT),
        "missing barrier at the end: The next copy goes into the buffer that is being read here: nobody may start it "
        "before all have read.",
        ("column[16 * row];\n" + _BARRIER, "column[16 * row];\n"),
        "commit only with a copy: In the last turn there is no copy and so no batch: then the newest batch is the "
        "tile that is wanted, and it is the one not waited for. Commit in every turn.",
        ("if (next < rows / 4) __pipeline", "if (next < rows / 4) {\n            __pipeline"),
        (
            "        __pipeline_commit();  // also an empty batch: the wait counts batches\n",
            "            __pipeline_commit();\n        }\n",
        ),
        "one buffer: The next tile goes into the buffer of this one: there are two, and one fills while the other is "
        "read.",
        ("tiles[next % 2]", "tiles[tile % 2]"),
    ],
    "each tile has arrived, for all, before anybody reads it, and all have read it before the next takes its place.",
)

EXERCISES = [INFLECTIONS, DOUBLE_BUFFER]
