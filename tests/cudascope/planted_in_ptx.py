"""Mistakes planted in the PTX of the course's kernels, one at a time: `python tests/cudascope/planted_in_ptx.py`.

Triton or NVRTC compiles each kernel to PTX. planting.py removes every barrier, wait, fence, commit and arrival in turn,
and makes operands wrong. Each mistake runs under `check` with two schedules. The table says for each mistake whether
`check` found it, whether the result was wrong, or why the kernel does not need the instruction. second_arguments.py
and replay.py compute the reasons, from the text and from the trace of a run.
"""

import argparse
import functools
import importlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
from planting import MARK, Mistake, Outcome, meetings, mistake, outcome, planted, removals, wrong_operands
from replay import unordered
from second_arguments import FAMILIES, Paths
from triton_helpers import product

from cudascope import PtxKernel, check, observe, triton_compiled
from cudascope.toolchain.nvrtc import compile_ptx
from pagewise.flash_attention import flash_attention, tuning
from pagewise.flash_decoding import flash_decoding
from pagewise.online_softmax import online_softmax

SEEDS = (None, 1)
flat_gemm = importlib.import_module("pagewise.flash_decoding_plus_plus.flat_gemm")  # a function has this name, too


class Case(NamedTuple):
    """A kernel, and launches of it whose results are compared bit by bit."""

    kernel: str
    arch: str
    run: Callable[[], Sequence[torch.Tensor]]


def halves(*shape: int) -> torch.Tensor:
    return torch.randn(shape).half()


def forward() -> list[torch.Tensor]:
    """Four tiles of keys without a mask and three with a mask, then five and two, in a ring of two stages."""
    results = []
    for T, S in ((128, 428), (80, 400)):
        q, k, v = halves(1, 1, T, 16), halves(1, 1, S, 16), halves(1, 1, S, 16)
        results += flash_attention(q, k, v, causal=True, backend="triton", return_lse=True)
    return results


def backward() -> list[torch.Tensor]:
    """A program of dK and dV visits two query heads."""
    results = []
    for T, S in ((256, 256), (80, 300)):
        q, k, v = (halves(1, heads, n, 16).requires_grad_() for heads, n in ((2, T), (1, S), (1, S)))
        with mock.patch.object(tuning, "num_splits", return_value=1):
            out = flash_attention(q, k, v, causal=True, backend="triton")
            results += torch.autograd.grad(out, (q, k, v), halves(*out.shape))
    return results


def decode() -> list[torch.Tensor]:
    """A program computes several sequences."""
    q, k, v = halves(6, 1, 1, 16), halves(6, 1, 512, 16), halves(6, 1, 512, 16)
    seq_lens = torch.tensor([70, 512, 30, 130, 64, 200], dtype=torch.int32)
    return [*flash_decoding(q, k, v, seq_lens=seq_lens, backend="triton", return_lse=True)]


def softmax() -> list[torch.Tensor]:
    return [online_softmax(torch.randn(3, 700), 256, backend="triton")]


def flat() -> list[torch.Tensor]:
    """A warp multiplies one, three or five tiles of its ring: the last tile is at different places."""
    return [flat_gemm.on_tensor_cores(halves(13, K), halves(64, K)) for K in (200, 520, 1160)]


CASES = {
    "forward, sm_80": Case("flash_attention_kernel", "sm_80", forward),
    "forward, sm_90": Case("flash_attention_kernel", "sm_90", forward),
    "product by descriptors, sm_90": Case("product_kernel", "sm_90", lambda: product(False)[:1]),
    "product with roles for warps, sm_90": Case("product_kernel", "sm_90", lambda: product(True)[:1]),
    "online softmax, sm_80": Case("online_softmax_kernel", "sm_80", softmax),
    "decode, sm_80": Case("decode_attention_kernel", "sm_80", decode),
    "backward, sm_80": Case("flash_attention_backward_kernel", "sm_80", backward),
    "flat GEMM by NVRTC, sm_80": Case("flat_gemm_kernel", "sm_80", flat),
}


class Tried(NamedTuple):
    """A kernel's PTX, its mistakes, and the outcomes of each in several schedules."""

    ptx: str
    mistakes: list[Mistake]
    outcomes: list[list[Outcome]]
    trace: object  # the Report of a run with marks


def tried(case: Case) -> Tried:
    """Run every mistake of a kernel."""
    texts, mistakes = [], []

    def edit(ptx: str) -> str:
        if case.kernel not in ptx:
            return ptx
        if ptx not in texts:
            texts.append(ptx)
            mistakes[:] = removals(ptx) + wrong_operands(ptx)
        return planted(ptx, mistakes)

    @functools.cache
    def by_nvrtc(*options: object) -> PtxKernel:
        kernel = real(*options)
        return PtxKernel(edit(compile_ptx(kernel.source, kernel.name, case.arch).text))

    def run() -> list[np.ndarray]:
        torch.manual_seed(0)
        return [each.detach().contiguous().view(torch.uint8).numpy() for each in case.run()]

    real = flat_gemm.cuda_kernel
    with triton_compiled(case.arch, edit=edit), mock.patch.object(flat_gemm, "cuda_kernel", by_nvrtc):
        expected = None
        for seed in SEEDS:
            with mistake(0), check(stop=False, ignore=("same value",), schedule=seed) as report:
                results = run()
            expected = expected or results
            if report.findings or not all(map(np.array_equal, results, expected)):
                raise AssertionError(f"without a mistake: {report}")
        if len(texts) != 1:
            raise AssertionError(f"{len(texts)} texts of {case.kernel}")
        with mistake(MARK), observe(trace_limit=10**8) as trace:
            run()
        numbers = range(1, len(mistakes) + 1)
        outcomes = [[outcome(number, run, expected, seed) for seed in SEEDS] for number in numbers]
    return Tried(texts[0], mistakes, outcomes, trace)


def reason(wrong: Mistake, tried: Tried, paths: Paths, orders: Callable[[int | None], int]) -> str | None:
    """Why the kernel does not need what `wrong` changes, by an argument of second_arguments.py or replay.py."""
    line, family = wrong.line(tried.ptx), wrong.instruction.partition("commit_group")[0].partition("wait_group")[0]
    family = re.sub(r"^@\S+ ", "", family)
    if "_group" in wrong.instruction:
        if family in FAMILIES and paths.has_nothing_to_wait_for(line, family):
            return "on no path, a copy of its kind is open there"
        if "commit" in wrong.instruction and paths.joins_the_next_group(line, family):
            return "its copies join the next group, and every wait completes that group too"
    if "fence.proxy.async" in wrong.instruction and paths.precedes_another_fence(line):
        return "on every path, another fence precedes the next use of the async proxy"
    numbers = [number for number, each in enumerate(meetings(tried.ptx)) if each.start == wrong.start]
    if numbers and "bar" in wrong.instruction and wrong.name == "removed" and "mbarrier" not in wrong.instruction:
        if paths.is_beside_a_barrier(line):
            return "no access lies between it and another barrier, or it and the end"
        if orders(numbers[0]) == orders(None):
            return "in a replay of these launches without it, no two accesses lose their order"
        if "bar.warp" in wrong.instruction and paths.precedes_stores_of_the_whole_warp(line):
            return (
                "the warp executes wmma.load, wmma.mma with the loaded values, and wmma.store together, in this order"
            )
    if "mbarrier.init" in wrong.instruction and wrong.instruction.partition("mbarrier")[2] in again(wrong, tried):
        return "another instruction makes the same mbarrier, with the same count"
    if wrong.name.startswith("wrong leading offset"):
        return reason_for_the_leading_offset(wrong)
    return None


def again(init: Mistake, tried: Tried) -> list[str]:
    """The other mbarrier.init, without their predicates."""
    found = [each for each in tried.mistakes if each.instruction.find("mbarrier.init") > 0 and each.start != init.start]
    return [each.instruction.partition("mbarrier")[2] for each in found]


def reason_for_the_leading_offset(wrong: Mistake) -> str | None:
    """PTX ISA, 9.7.15.5.1: swizzled, only a matrix that is turned and longer than its swizzle has a leading offset."""
    *_, turned_a, turned_b = re.findall(r"[01]$|[01](?=,)", wrong.instruction)
    columns = int(re.search(r"m64n(\d+)k16", wrong.instruction)[1])
    if not int(turned_a if wrong.name.endswith("A") else turned_b):
        return "the field is not used: the matrix is K-major and swizzled (PTX ISA, matrix descriptor)"
    if wrong.name.endswith("B") and 2 * columns in (32, 64, 128):
        return "the field is not used: a row of the matrix is one swizzled row"
    return None


def rows(tried: Tried) -> Iterator[tuple[str, str]]:
    """The verdict about each mistake, and a line of the table."""
    paths, marked = Paths(tried.ptx), [each.instruction for each in meetings(tried.ptx)]
    orders = functools.cache(lambda without: unordered(tried.trace, marked, without))
    for wrong, outcomes in zip(tried.mistakes, tried.outcomes, strict=True):
        seen = {each.seen for each in outcomes}
        first = outcomes[0]
        if "survived" not in seen:
            verdict = "found" if seen == {"found"} else "wrong result"
            rules = sorted({each.findings[0].rule for each in outcomes if each.findings})
            said = ", ".join(rules) + (", right result" if first.is_right else ", wrong result" if rules else "")
        elif why := reason(wrong, tried, paths, orders):
            verdict, said = "not needed", why
        else:
            verdict, said = "SURVIVED", str([each.seen for each in outcomes])
        yield verdict, f"{wrong.line(tried.ptx):5}  {wrong.name:27} {wrong.instruction[:42]:42}  {verdict:12} {said}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kernels", nargs="*", help=f"parts of these names: {', '.join(CASES)}")
    names = parser.parse_args().kernels or [""]
    total = Counter()
    for title, case in CASES.items():
        if not any(name in title for name in names):
            continue
        result = tried(case)
        verdicts, lines = zip(*rows(result), strict=True)
        print(f"\n{title}: {case.kernel}, {len(verdicts)} mistakes: {describe(Counter(verdicts))}")
        print(*lines, sep="\n", flush=True)
        total += Counter(verdicts)
    print(f"\nall: {sum(total.values())} mistakes: {describe(total)}")
    sys.exit(total["SURVIVED"] > 0)


def describe(verdicts: Counter) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())


if __name__ == "__main__":
    main()
