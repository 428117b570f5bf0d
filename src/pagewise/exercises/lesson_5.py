"""Exercises of lesson 5, CUDA itself: a copy, a sum in a warp, a maximum in a thread block."""

from collections.abc import Callable

import torch

from pagewise.exercises.code import Gap, device_code, edited, with_gaps
from pagewise.exercises.cuda import CudaExercise, checked, counted
from pagewise.exercises.exercise import Case
from pagewise.exercises.values import small_numbers

_COALESCED_COPY = device_code("coalesced_copy.cu")
_COPY = "for (int i = thread; i < n; i += threads) out[i] = in[i];"


def _copy(n: int, grid: int, block: int, make: Callable = checked) -> Case:
    return make(f"n = {n}, [{grid}, {block}]", grid, block, small_numbers(n), torch.Size([n]), n)


COALESCED_COPY = CudaExercise(
    "coalesced_copy",
    _COALESCED_COPY,
    with_gaps(_COALESCED_COPY, Gap("for (int i", "for (int i", "which elements does this thread copy?")),
    [_copy(3, 1, 32), _copy(64, 2, 32), _copy(150, 2, 32), _copy(256, 2, 32, make=counted)],
    [
        "a chunk each: Every float arrives, in too many sectors: each thread copies a chunk of its own, so at any "
        "moment the 32 lanes of a warp read far apart. Let neighbours read neighbours: start at `thread`, step by "
        "`threads`.",
        (
            _COPY,
            "const int chunk = (n + threads - 1) / threads, end = min(n, (thread + 1) * chunk);\n"
            "    for (int i = thread * chunk; i < end; ++i) out[i] = in[i];",
        ),
        "one element each: The elements from the number of threads on were never written: a thread copies more than "
        "one when n is larger.",
        (_COPY, "if (thread < n) out[thread] = in[thread];"),
        "no bound: There are more threads than elements: those from n on have nothing to copy.",
        (_COPY, "for (int i = thread; i < n + threads; i += threads) out[i] = in[i];"),
        "every thread block all: Thread blocks copy the same elements: count threads through all of them, blockIdx.x "
        "· blockDim.x + threadIdx.x.",
        (_COPY, "for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = in[i];"),
        "only the first thread block: The second thread block's elements were never written: threadIdx.x counts "
        "within a thread block.",
        (_COPY, "if (blockIdx.x == 0 && threadIdx.x < n) out[threadIdx.x] = in[threadIdx.x];"),
    ],
    "neighbouring lanes copy neighbouring floats: 4 sectors a request.",
)

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
            "bring the 32 sums of the lanes together with __shfl_down_sync(ALL_LANES, sum, distance), in five steps, "
            "and\nlet lane 0 write the total. No shared memory, no atomics.",
        ),
    ),
    [
        _warp_sum(1, torch.ones(1, 32), "all ones"),
        _warp_sum(1, torch.arange(32.0)[None], "x = 0, 1, 2, … 31"),
        _warp_sum(2, small_numbers(2, 32), "mixed numbers"),
    ],
    [
        "a step too few: The last step is missing: distances 16, 8, 4, 2 and 1, so `distance > 0`.",
        ("distance > 0", "distance > 1"),
        "a step too many: distance 32 is no lane of this warp: each lane got its own number back, and the sum is "
        "doubled. Begin with 16.",
        ("distance = 16", "distance = 32"),
        "every lane writes: All lanes write to one place, and only lane 0 has the whole sum: `if (threadIdx.x == 0)`.",
        ("if (threadIdx.x == 0) sums[blockIdx.x] = sum;", "sums[blockIdx.x] = sum;"),
        "from one lane: __shfl_sync gives every lane the number of *one* lane, lane `distance`: __shfl_down_sync "
        "gives each the one `distance` above itself.",
        ("__shfl_down_sync", "__shfl_sync"),
        "shuffle in a branch: A shuffle needs both lanes: those above `distance` must take part to hand over, so it "
        "stands outside of the `if`.",
        (_STEP, f"if (threadIdx.x < distance) {_STEP}"),
        "no shuffle: That is lane 0's own number: nothing came from the other lanes.",
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
        (" 1.\n", " 1.\n// A barrier is missing, though the result may be right all the same. Find its place.\n"),
    ),
    [
        _block_max(1, small_numbers(1, 64), "one row of 64"),
        _block_max(1, -torch.arange(1.0, 4.0)[None], "x = -1, -2, -3"),
        _block_max(2, small_numbers(2, 150), "two rows of 150"),
        _block_max(1, torch.arange(130.0)[None], "x = 0, 1, 2, … 129"),
    ],
    [
        "missing barrier in the loop: That is what the kernel as it was given does: which step writes this number, "
        "which one reads it, and what makes the second wait for the first?",
        (_TREE + _BARRIER, _TREE),
        "missing first barrier: The loop reads what all threads wrote above it: a barrier must stand between.",
        ("    __syncthreads();\n    for (int half", "    for (int half"),
        "barrier in the branch: Only some of the threads come to this barrier: it stands outside of the `if`, for all.",
        (
            _TREE + _BARRIER,
            "        if (threadIdx.x < half) {\n"
            "            largest[threadIdx.x] = fmaxf(largest[threadIdx.x], largest[threadIdx.x + half]);\n"
            "            __syncthreads();\n        }\n",
        ),
        "begun with 0: All numbers may be negative: begin with −INFINITY, not 0.",
        ("mine = -INFINITY", "mine = 0"),
        "one number each: A row may be longer than the thread block: each thread takes every 64th number.",
        (
            "for (int i = threadIdx.x; i < n; i += 64) mine = fmaxf(mine, x[blockIdx.x * n + i]);",
            "if (threadIdx.x < n) mine = x[blockIdx.x * n + threadIdx.x];",
        ),
    ],
    "every step waits for the one before, and every thread comes to every barrier.",
)

EXERCISES = [COALESCED_COPY, WARP_SUM, BLOCK_MAX]
