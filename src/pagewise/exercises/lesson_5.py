"""Exercises of lesson 5, CUDA itself: a sum in a warp, and a maximum in a thread block."""

import torch

from pagewise.exercises.code import Gap, device_code, edited, with_gaps
from pagewise.exercises.cuda import CudaExercise, checked
from pagewise.exercises.exercise import Case
from pagewise.exercises.values import small_numbers

_WARP_SUM = device_code("warp_sum.cu")
_STEP = "sum += __shfl_down_sync(ALL_LANES, sum, distance);"


def _warp_sum(rows: int, x: torch.Tensor, what: str) -> Case:
    return checked(f"{rows} row{'s' * (rows > 1)}, {what}", rows, 32, x, torch.Size([rows]))


WARP_SUM = CudaExercise(
    "warp_sum",
    _WARP_SUM,
    with_gaps(
        _WARP_SUM,
        Gap(
            "for (int distance",
            "if (threadIdx.x == 0)",
            "add the 32 sums of the lanes with __shfl_down_sync(ALL_LANES, sum, distance), in five steps.\n"
            "Lane 0 writes the total. Use no shared memory and no atomics.",
        ),
    ),
    [
        _warp_sum(1, torch.ones(1, 32), "all ones"),
        _warp_sum(1, torch.arange(32.0)[None], "x = 0, 1, 2, … 31"),
        _warp_sum(2, small_numbers(2, 32), "mixed numbers"),
    ],
    [
        "nothing yet: The kernel writes nothing yet. Add the sums of lanes 16 apart first: sum += "
        "__shfl_down_sync(ALL_LANES, sum, 16). Then halve the distance.",
        ("if (threadIdx.x == 0) sums[blockIdx.x] = sum;", ""),
        "a step too few: The last step is missing. The distances are 16, 8, 4, 2 and 1, so the loop runs while "
        "`distance > 0`.",
        ("distance > 0", "distance > 1"),
        "a step too many: The sum is doubled. At distance 32 each lane gets its own number back, because the warp has "
        "only 32 lanes. Begin with 16.",
        ("distance = 16", "distance = 32"),
        "every lane writes: All lanes write to one address, and only lane 0 has the whole sum. Write under `if "
        "(threadIdx.x == 0)`.",
        ("if (threadIdx.x == 0) sums[blockIdx.x] = sum;", "sums[blockIdx.x] = sum;"),
        "from one lane: __shfl_sync gives every lane the number of *one* lane, lane `distance`. __shfl_down_sync gives "
        "each lane the number of the lane `distance` above it.",
        ("__shfl_down_sync", "__shfl_sync"),
        "shuffle in a branch: A shuffle needs both lanes: the lane that gives must take part, too. Move the shuffle "
        "out of the `if`.",
        (_STEP, f"if (threadIdx.x < distance) {_STEP}"),
        "no shuffle: The result is lane 0's own number. Nothing came from the other lanes: the loop needs a shuffle.",
        (f"for (int distance = 16; distance > 0; distance /= 2) {_STEP}\n    ", ""),
    ],
    "32 numbers in five steps, without memory.",
)

_BLOCK_MAX = device_code("block_max.cu")
_TREE = (
    "        if (threadIdx.x < half) largest[threadIdx.x] = fmaxf(largest[threadIdx.x], largest[threadIdx.x + half]);\n"
)
_BARRIER = "        __syncthreads();\n"


def _block_max(rows: int, x: torch.Tensor, what: str) -> Case:
    return checked(what, rows, 64, x, torch.Size([rows]), x.shape[1])


BLOCK_MAX = CudaExercise(
    "block_max",
    _BLOCK_MAX,
    edited(
        _BLOCK_MAX,
        (_TREE + _BARRIER, _TREE),
        (" 1.\n", " 1.\n// A barrier is missing, and the result may still be right. Add the barrier.\n"),
    ),
    [
        _block_max(1, small_numbers(1, 64), "one row of 64"),
        _block_max(1, -torch.arange(1.0, 4.0)[None], "x = -1, -2, -3"),
        _block_max(2, small_numbers(2, 150), "two rows of 150"),
        _block_max(1, torch.arange(130.0)[None], "x = 0, 1, 2, … 129"),
    ],
    [
        "missing barrier in the loop: The kernel still has its race. Which round writes this number, which round reads "
        "it, and what makes the reader wait for the writer?",
        (_TREE + _BARRIER, _TREE),
        "missing first barrier: The loop reads numbers that other threads wrote above it. A barrier must separate the "
        "two.",
        ("    __syncthreads();\n    for (int half", "    for (int half"),
        "barrier in the branch: Only some of the threads reach this barrier. Move it out of the `if`, so that all "
        "threads do.",
        (
            _TREE + _BARRIER,
            "        if (threadIdx.x < half) {\n"
            "            largest[threadIdx.x] = fmaxf(largest[threadIdx.x], largest[threadIdx.x + half]);\n"
            "            __syncthreads();\n        }\n",
        ),
        "begun with 0: A row may hold only negative numbers. Begin with −INFINITY, not with 0.",
        ("mine = -INFINITY", "mine = 0"),
        "one number each: A row may be longer than the thread block. Let each thread take every 64th number.",
        (
            "for (int i = threadIdx.x; i < n; i += 64) mine = fmaxf(mine, x[blockIdx.x * n + i]);",
            "if (threadIdx.x < n) mine = x[blockIdx.x * n + threadIdx.x];",
        ),
    ],
    "every step waits for the one before, and every thread comes to every barrier.",
)

EXERCISES = [WARP_SUM, BLOCK_MAX]
