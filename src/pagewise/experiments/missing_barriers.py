"""The package's paged-attention kernel without one of its barriers: what its outputs show, and what a check finds.

A launch without a barrier may read what the launch before it left in shared memory (lesson 5 in depth). The specimen is
one sequence of 90 tokens in six blocks, with one head of 32 float16 elements.
"""

import functools
import textwrap
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

import cudascope
from cudascope import CudaKernel
from cudascope.watch.report import Launch
from pagewise.paged_attention import in_cuda, paged_attention_v1
from pagewise.paged_blocks import to_vllm_layout

HEAD_SIZE, BLOCK_SIZE, LENGTH = 32, 16, 90
_BARRIER = "__syncthreads();"
BARRIERS = {  # the place of a barrier, and the lines of the source that end with it
    "after load_query": f"head * W::HEAD_SIZE);\n    {_BARRIER}",
    "in reduce_thread_block": f"scratch[threadIdx.x / WARP_SIZE] = value;\n    {_BARRIER}",
    "in add_warps, before the write": f"warp % half * W::HEAD_SIZE;\n        {_BARRIER}",
    "in add_warps, after the write": f"write_rows<W>(sums, acc, 1);\n        {_BARRIER}",
}


class Answer(NamedTuple):
    """The answer to one query of a row of queries: its number, its letter, and the wrong elements of 32."""

    number: int
    query: str
    wrong: int


@functools.cache
def kernel_without(barrier: str | None) -> CudaKernel:
    """Return v1 without a barrier of `BARRIERS`, or v1 as it is for None. The line numbers stay the same."""
    text = in_cuda.SOURCE.read_text()
    if barrier is not None:
        lines = BARRIERS[barrier]
        assert text.count(lines) == 1, f"v1 has {text.count(lines)} places that look like {barrier!r}"
        text = text.replace(lines, lines.removesuffix(_BARRIER))
    return CudaKernel(text, f"paged_attention_v1_kernel<__half, __half, {HEAD_SIZE}, {BLOCK_SIZE}>")


@functools.cache
def _inputs(query: str) -> tuple[Tensor, ...]:
    caches = torch.randn(2, 9, BLOCK_SIZE, 1, HEAD_SIZE, generator=torch.Generator().manual_seed(0)).half()
    q = torch.randn(1, 1, HEAD_SIZE, generator=torch.Generator().manual_seed(ord(query))).half()
    tables, lens = (torch.tensor(x, dtype=torch.int32) for x in ([[7, 1, 4, 0, 8, 3]], [LENGTH]))
    return q, *to_vllm_layout(*caches), tables, lens


def answer(barrier: str | None, query: str) -> Tensor:
    """Return the output [1, 1, 32] of one launch. `query` is a letter."""
    with mock.patch.object(in_cuda, "cuda_kernel", return_value=kernel_without(barrier)):
        return paged_attention_v1(*_inputs(query), max_seq_len=LENGTH)


def answers(barrier: str | None, queries: str) -> list[Answer]:
    """Answer the queries, a letter each, one after the other, and compare with the kernel that has all barriers.

    The first answer follows a launch of the right kernel with the same query, as in a test that compares the two.
    """
    right = {query: answer(None, query) for query in queries}
    answer(None, queries[0])
    rows = []
    for number, query in enumerate(queries, 1):
        rows.append(Answer(number, query, int((answer(barrier, query) != right[query]).sum())))
    return rows


def finding(barrier: str | None) -> str:
    """Return what `cudascope.check` says about a launch, in lines of at most 88 characters, or "no finding"."""
    try:
        with cudascope.check(schedule=0):
            answer(barrier, "A")
    except cudascope.Finding as found:
        return textwrap.fill(f"{found.what}: {found}", 88)
    return "no finding"


def observed(barrier: str | None) -> Launch:
    """Return an observed launch, with its trace. The order of its threads is the one of `finding`."""
    with cudascope.observe(schedule=0) as report:
        answer(barrier, "A")
    return report.launches[0]
