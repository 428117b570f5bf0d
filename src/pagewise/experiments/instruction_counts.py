"""Count the instructions of the course's kernels, without a GPU.

    python -m pagewise.experiments.instruction_counts
    python -m pagewise.experiments.instruction_counts --only "flash forward" --arch sm_90

Each public function runs once on the CPU, with its Triton kernels compiled for a GPU (`cudascope.triton_compiled`) or
its CUDA kernels compiled by NVRTC. Each kernel that it launches is a row with two kinds of counts:

- **PTX**: the instructions that were executed, one for each warp that issues them (`report.instructions`). The columns
  after the total are some of the classes. "memory" is all loads, stores and atomics.
- **SASS**: the machine code of the hot loops (`loops`). A loop is hot if it multiplies matrices; without such a loop,
  if it has FP32 sums and loads global memory. "per score" is what each loop costs for each score of the attention
  matrix, "per key" for each key of a sequence and KV head. The products of a loop say how many scores it computes. A
  score that two warps compute counts twice.

Counts are exact and say nothing about time: neither of waits and occupancy, nor of caches.
"""

import argparse
import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

from cudascope import CudaKernel, observe, triton_compiled
from cudascope.toolchain.sass import SassLoop
from cudascope.watch.report import Launch
from pagewise.flash_attention import flash_attention
from pagewise.paged_attention import in_cuda, paged_attention, paged_attention_v1, paged_attention_v2
from pagewise.paged_attention_varlen import paged_attention_varlen
from pagewise.paged_blocks import to_vllm_layout
from pagewise.tools.progress import progress, say
from pagewise.tools.records import table
from pagewise.tools.sizes import cdiv

ARCHS = ("sm_80", "sm_90")
NUM_KV_HEADS, GROUP, HEAD_SIZE, BLOCK_SIZE = 2, 4, 128, 16  # of the paged cases; GROUP query heads share a KV head
PADDED_ROWS = 16  # rows of a product on tensor cores, at least: a decode step fills GROUP of them
MEMORY = ("global load", "global store", "shared load", "shared store", "local", "atomic")

Run = Callable[[], object]


class Case(NamedTuple):
    """A call of a public function. `prepare` makes its tensors, and returns what is counted.

    Attributes:
        unit: what a hot loop computes: "score" or "key".
        flops: FLOPs of a hot loop for each unit. Two numbers: the first and the second half of the loops have other
            products.
        is_cuda: the kernels are CUDA C++.
    """

    prepare: Callable[[], Run]
    unit: str
    flops: Sequence[int]
    is_cuda: bool = False


# ------------------------------------------------------------------------------------------------ cases


def _dense(head_size: int, tokens: int = 512) -> list[Tensor]:
    return [torch.randn(1, 1, tokens, head_size).half() for _ in range(3)]


def _forward(head_size: int, causal: bool) -> Case:
    def prepare() -> Run:
        q, k, v = _dense(head_size)
        return functools.partial(flash_attention, q, k, v, causal=causal, backend="triton")

    return Case(prepare, "score", [4 * head_size])


def _backward(head_size: int, causal: bool) -> Case:
    def prepare() -> Run:
        q, k, v = (each.requires_grad_() for each in _dense(head_size))
        out = flash_attention(q, k, v, causal=causal, backend="triton")
        return functools.partial(out.backward, torch.randn_like(out))

    return Case(prepare, "score", [8 * head_size, 6 * head_size])  # four products give dK and dV, three give dQ


def _paged(seq_lens: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the cache [N, P, Hkv, D] of keys and of values, the block tables and the lengths. Blocks are shuffled."""
    blocks = [cdiv(length, BLOCK_SIZE) for length in seq_lens]
    tables, order = torch.zeros(len(blocks), max(blocks), dtype=torch.int32), torch.randperm(sum(blocks)).int()
    for row, used in zip(tables, order.split(blocks), strict=True):
        row[: len(used)] = used
    k, v = (torch.randn(sum(blocks), BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE).half() for _ in range(2))
    return k, v, tables, torch.tensor(seq_lens, dtype=torch.int32)


def _queries(number: int) -> Tensor:
    return torch.randn(number, NUM_KV_HEADS * GROUP, HEAD_SIZE).half()


def _decode(num_seqs: int, seq_len: int, num_splits: int) -> Case:
    def prepare() -> Run:
        inputs = _queries(num_seqs), *_paged([seq_len] * num_seqs)
        return functools.partial(paged_attention, *inputs, num_splits=num_splits, backend="triton")

    return Case(prepare, "key", [4 * PADDED_ROWS * HEAD_SIZE])


def _steps(new_tokens: Sequence[int], seq_lens: Sequence[int]) -> Case:
    def prepare() -> Run:
        ends = torch.tensor([0, *new_tokens]).cumsum(0).int()
        inputs = _queries(sum(new_tokens)), *_paged(seq_lens), ends
        return functools.partial(paged_attention_varlen, *inputs, backend="triton")

    return Case(prepare, "score", [4 * HEAD_SIZE])


def _in_cuda(function: Callable[..., Tensor], num_seqs: int, seq_len: int) -> Case:
    def prepare() -> Run:
        k, v, *others = _paged([seq_len] * num_seqs)
        return functools.partial(function, _queries(num_seqs), *to_vllm_layout(k, v), *others)

    return Case(prepare, "key", [], is_cuda=True)


CASES = {
    "flash forward D128": _forward(128, causal=False),
    "flash forward D128 causal": _forward(128, causal=True),
    "flash forward D64": _forward(64, causal=False),
    "flash forward D64 causal": _forward(64, causal=True),
    "flash backward D128": _backward(128, causal=False),
    "flash backward D128 causal": _backward(128, causal=True),
    "flash backward D64": _backward(64, causal=False),
    "paged decode, 8 splits": _decode(8, 1024, num_splits=8),
    "paged decode, 1 split": _decode(8, 1024, num_splits=1),
    "chunk of 256": _steps([256], [512]),
    "mixed step": _steps([256] + [1] * 15, [512] + [1024] * 15),
    "CUDA v1": _in_cuda(paged_attention_v1, 2, 1024),
    "CUDA v2": _in_cuda(paged_attention_v2, 2, 1024),
}

# ------------------------------------------------------------------------------------------------ counting


@contextlib.contextmanager
def cuda_through_ptx(arch: str) -> Iterator[None]:
    """Inside, the CUDA kernels of paged attention are NVRTC's PTX for `arch`."""
    kernels = functools.cache(in_cuda.cuda_kernel.__wrapped__)
    with (
        mock.patch.object(in_cuda, "cuda_kernel", kernels),
        mock.patch.object(in_cuda, "CudaKernel", functools.partial(CudaKernel, through="ptx", arch=arch)),
    ):
        yield


def counted(case: Case, arch: str) -> list[Launch]:
    """Return the observed launches of a case, compiled for `arch`."""
    torch.manual_seed(0)
    with cuda_through_ptx(arch) if case.is_cuda else triton_compiled(arch):
        run = case.prepare()
        with observe(trace_limit=0) as report:
            run()
    return report.launches


def hot_loops(launch: Launch) -> list[SassLoop]:
    """Return the innermost loops that multiply matrices, or else those that sum up what they load."""
    loops = [loop for loop in launch.loops() if loop.is_innermost]
    multiply = [loop for loop in loops if "product" in loop.classes]
    return multiply or [loop for loop in loops if {"fp32", "global load"} <= loop.classes.keys()]


def products(loop: SassLoop) -> int:
    """Return the FLOPs that one warp computes in one turn of a loop, on tensor cores."""
    total = 0
    for name, number in loop.opcodes.items():
        if match := re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", name):  # four warps share the product
            m, n, k = map(int, match.groups())
            total += number * 2 * m * n * k // 4
        elif match := re.match(r"HMMA\.(16)(8)(8|16)\b", name):
            m, n, k = map(int, match.groups())
            total += number * 2 * m * n * k
    return total


def per_unit(case: Case, loops: Sequence[SassLoop]) -> list[float]:
    """Return the instructions of each loop for each score or key, or nothing if that cannot be said."""
    if not case.flops or len(loops) % len(case.flops) or not all(map(products, loops)):
        return []
    flops = (case.flops[i * len(case.flops) // len(loops)] for i in range(len(loops)))
    return [loop.total * each / products(loop) for loop, each in zip(loops, flops, strict=True)]


def row(name: str, arch: str, launch: Launch) -> tuple[str, ...]:
    """Return a row of the table."""
    case, classes, loops = CASES[name], launch.instructions.classes, hot_loops(launch)
    programs, threads = (x * y * z for x, y, z in (launch.grid, launch.block))
    numbers = [classes.get(each, 0) for each in ("integer", "fp32", "special", "product")]
    numbers += [sum(classes.get(each, 0) for each in MEMORY), classes.get("barrier", 0)]
    off = sum(launch.instructions.predicated_off.values())
    costs = " / ".join(f"{each:.3g}" for each in per_unit(case, loops))
    return (
        name,
        arch,
        launch.kernel.partition("<")[0].removesuffix("_kernel"),
        f"{programs} × {cdiv(threads, 32)}",
        *(f"{number:,}" for number in (launch.instructions.total, off, *numbers)),
        " / ".join(str(loop.total) for loop in loops) or "–",
        f"{costs} per {case.unit}" if costs else "–",
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Count the instructions of the course's kernels, without a GPU.")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help=f"cases with one of these: {[*CASES]}")
    parser.add_argument("--arch", nargs="+", default=ARCHS, metavar="ARCH", help=f"GPUs ({' '.join(ARCHS)})")
    asked = parser.parse_args()
    names = [name for name in CASES if any(text in name for text in asked.only)]
    if not names:
        parser.error(f"--only must be a part of one of {', '.join(CASES)}, got {' '.join(asked.only)}")
    torch.set_num_threads(1)
    pairs = [(name, arch) for name in names for arch in asked.arch]
    rows = [row(*pair, launch) for pair in progress(pairs, "cases") for launch in counted(CASES[pair[0]], pair[1])]
    header = ("case", "GPU", "kernel", "programs × warps", "PTX", "off", "integer", "fp32", "special", "product")
    say(table((*header, "memory", "barrier", "SASS of hot loops", "cost of hot loops"), rows))


if __name__ == "__main__":
    main()
