"""Bulk copies that add to what is there (cp.reduce.async.bulk), and that gather or scatter rows of a matrix."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from covering import one_in_three
from test_ptx_kernel import BULK_STORE, HEADER, without
from triton.tools.tensor_descriptor import TensorDescriptor

from cudascope import Finding, PtxKernel, check, schedule, triton_compiled
from cudascope.ptx.module import PtxError

STORE = "@%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r2], 1024;"


def reduction(kind: str) -> str:
    """64 threads store 256 words of x in shared memory, and thread 0 reduces them into y."""
    assert STORE in BULK_STORE
    return HEADER + BULK_STORE.replace(
        STORE, STORE.replace("async.bulk", "reduce.async.bulk").replace("_group", f"_group.{kind}")
    )


X, Y = np.arange(256, dtype=np.uint32) * 7 % 31, np.arange(256, dtype=np.uint32) * 5 % 29
MODELS = {
    "add.u32": np.add, "min.u32": np.minimum, "max.u32": np.maximum, "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or, "xor.b32": np.bitwise_xor,
    "inc.u32": lambda y, x: np.where(y >= x, 0, y + 1),
    "dec.u32": lambda y, x: np.where((y == 0) | (y > x), x, y - 1),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", one_in_three(list(MODELS)))
def test_a_reduction_of_integers(kind):
    y = Y.copy()
    with check():
        PtxKernel(reduction(kind))[1, 64](X, y)
    assert np.array_equal(y, MODELS[kind](Y, X))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype"),
    one_in_three([
        ("add.f32", torch.float32), ("add.f64", torch.float64), ("add.noftz.f16", torch.float16),
        ("add.noftz.bf16", torch.bfloat16), ("min.f16", torch.float16), ("max.bf16", torch.bfloat16),
        ("min.s32", torch.int32), ("max.s64", torch.int64), ("add.u64", torch.int64), ("xor.b64", torch.int64),
    ]),
)  # fmt: skip
def test_a_reduction_of_elements_of_any_size(kind, dtype):
    count = 1024 // dtype.itemsize
    x, y = (torch.randn(count, generator=torch.Generator().manual_seed(i)) * 50 for i in (0, 1))
    x, y = x.to(dtype), y.to(dtype)
    model = {"add": torch.add, "min": torch.minimum, "max": torch.maximum, "xor": torch.bitwise_xor}[kind[:3]]
    expected = model(y, x)
    with check():
        PtxKernel(reduction(kind))[1, 64](x, y)
    assert torch.equal(y, expected)


@pytest.mark.slow
def test_thread_blocks_may_reduce_into_the_same_place_and_nobody_may_read_it_meanwhile():
    source = reduction("add.u32")
    for seed in (None, 1, 2):
        y = Y.copy()
        with check(schedule=seed):
            PtxKernel(source)[4, 64](X, y)
        assert np.array_equal(y, Y + 4 * X)
    late = without(source, "cp.async.bulk.wait_group", "ld.global.b32 %r5, [%rd2]; cp.async.bulk.wait_group 0;")
    with check(stop=False) as report:
        PtxKernel(late)[1, 64](X, Y.copy())
    assert {found.rule for found in report.findings} == {"copy in flight"}


@pytest.mark.slow
def test_a_reduction_that_nobody_waits_for_is_found_and_does_nothing():
    y = Y.copy()
    with check(stop=False) as report:
        PtxKernel(without(reduction("add.u32"), "cp.async.bulk.wait_group"))[1, 64](X, y)
    assert {found.rule for found in report.findings} == {"pending copy"}
    assert np.array_equal(y, Y)


@pytest.mark.slow
def test_a_reduction_reads_an_output():
    y = Y.copy()
    with check(outputs=[y], stop=False) as report:
        PtxKernel(reduction("add.u32"))[1, 64](X, y)
    assert {found.rule for found in report.findings} == {"unwritten output"}


@pytest.mark.parametrize("kind", ["exch.b32", "add.u8", "cas.b32"])
def test_what_no_reduction_does_is_refused(kind):
    with pytest.raises(PtxError, match=r"does not know cp\.reduce"):
        PtxKernel(reduction(kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["min.f32", "and.f16", "inc.s32"])
def test_an_operation_that_a_type_lacks_stops_the_kernel(kind):
    with pytest.raises(Finding, match="a type for which PTX does not have the operation"):
        PtxKernel(reduction(kind))[1, 64](X, Y.copy())


# ------------------------------------------------------------------------------------------------ descriptors


@triton.jit
def reduce_kernel(d, x, OP: tl.constexpr, SIDE: tl.constexpr):
    i = tl.arange(0, SIDE)
    tile = tl.load(x + i[:, None] * SIDE + i[None, :])
    at = [tl.program_id(0) * 8, 8]
    if OP == "add":
        d.atomic_add(at, tile)
    elif OP == "min":
        d.atomic_min(at, tile)
    elif OP == "max":
        d.atomic_max(at, tile)
    elif OP == "xor":
        d.atomic_xor(at, tile)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "op", "dtype"),
    one_in_three([
        ("sm_90", "add", torch.float32), ("sm_90", "add", torch.float16), ("sm_90", "max", torch.float16),
        ("sm_90", "min", torch.int32), ("sm_90", "xor", torch.int32), ("sm_80", "add", torch.float32),
        ("sm_120", "add", torch.bfloat16),
    ]),
)  # fmt: skip
def test_a_descriptor_reduces_a_tile(arch, op, dtype):
    x, out = (torch.arange(16.0 * 16) % 11).view(16, 16).to(dtype), (torch.arange(20.0 * 32) % 7).view(20, 32).to(dtype)
    model = {"add": torch.add, "min": torch.minimum, "max": torch.maximum, "xor": torch.bitwise_xor}[op]
    expected = out.clone()
    for first in (0, 8):  # the tiles of two programs overlap, and the second one ends after the last row
        rows = expected[first : first + 16, 8:24]
        rows.copy_(model(rows, x[: len(rows)]))
    with triton_compiled(arch), check(), schedule(1):
        reduce_kernel[(2,)](TensorDescriptor.from_tensor(out, [16, 16]), x, OP=op, SIDE=16, num_warps=4)
    assert torch.equal(out, expected)


@triton.jit
def rows_kernel(d, rows, x, GATHERS: tl.constexpr, NUM: tl.constexpr, WIDTH: tl.constexpr):
    i, j = tl.arange(0, NUM), tl.arange(0, WIDTH)
    which = tl.load(rows + i)
    at = x + i[:, None] * WIDTH + j[None, :]
    if GATHERS:
        tl.store(at, d.gather(which, 16))
    else:
        d.scatter(tl.load(at), which, 16)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", one_in_three([torch.float16, torch.float32]))
def test_a_descriptor_gathers_and_scatters_rows(dtype):
    matrix = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = torch.tensor([3, 39, 0, 7, 7, 21, 38, 1], dtype=torch.int32)
    descriptor, x = TensorDescriptor(matrix, [40, 64], [64, 1], [1, 32]), torch.zeros(8, 32, dtype=dtype)
    with triton_compiled("sm_120"), check():
        rows_kernel[(1,)](descriptor, rows, x, GATHERS=True, NUM=8, WIDTH=32)
        assert torch.equal(x, matrix[rows.long(), 16:48])
        apart = torch.tensor([3, 39, 0, 7, 8, 21, 38, 1], dtype=torch.int32)
        expected = matrix.clone()
        expected[apart.long(), 16:48] = -x
        rows_kernel[(1,)](descriptor, apart, -x, GATHERS=False, NUM=8, WIDTH=32)
    assert torch.equal(matrix, expected)


@pytest.mark.slow
def test_rows_outside_of_the_matrix_are_zeros_and_are_not_stored():
    matrix = torch.ones(8, 64)
    rows, x = torch.tensor([-1, 8, 7, 100, 0, 1, 2, 3], dtype=torch.int32), torch.full((8, 32), 5.0)
    descriptor = TensorDescriptor(matrix, [8, 64], [64, 1], [1, 32])
    with triton_compiled("sm_120"), check():
        rows_kernel[(1,)](descriptor, rows, x, GATHERS=True, NUM=8, WIDTH=32)
        assert x[:, 0].tolist() == [0, 0, 1, 0, 1, 1, 1, 1]
        rows_kernel[(1,)](descriptor, rows, 3 * torch.ones(8, 32), GATHERS=False, NUM=8, WIDTH=32)
    assert matrix[:, 16].tolist() == [3, 3, 3, 3, 1, 1, 1, 3]


@pytest.mark.slow
def test_rows_that_two_lanes_scatter_to_race():
    matrix, rows = torch.zeros(8, 64), torch.tensor([3, 3, 0, 1, 2, 5, 6, 7], dtype=torch.int32)
    descriptor = TensorDescriptor(matrix, [8, 64], [64, 1], [1, 32])
    x = torch.arange(8.0)[:, None].expand(8, 32).contiguous()
    with triton_compiled("sm_120"), check(stop=False) as report:
        rows_kernel[(1,)](descriptor, rows, x, GATHERS=False, NUM=8, WIDTH=32)
    assert report.findings
