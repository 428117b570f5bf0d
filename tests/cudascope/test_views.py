"""Arguments that are views: a kernel may leave the view and stay in the memory that it is a view of, as on a GPU."""

import contextlib
from itertools import product

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from covering import in_turns

from cudascope import CudaKernel, Finding, PtxKernel, check, observe, reachable, schedule, triton_compiled
from cudascope.arguments.arrays import as_array
from cudascope.cpu import memory

# y[i] = x[i + first], of 4-byte elements, by one thread each
CUDA = CudaKernel(
    "__global__ void copy(const int* x, int* y, int first) { y[threadIdx.x] = x[(int)threadIdx.x + first]; }", "copy"
)
PTX = PtxKernel("""
.version 8.0
.target sm_80
.address_size 64
.visible .entry copy(.param .u64 x, .param .u64 y, .param .u32 first)
{
    .reg .b32 %r<6>;
    .reg .b64 %rd<6>;
    ld.param.u64 %rd1, [x];
    ld.param.u64 %rd2, [y];
    ld.param.u32 %r1, [first];
    mov.u32 %r2, %tid.x;
    add.s32 %r3, %r1, %r2;
    mul.wide.s32 %rd3, %r3, 4;
    add.s64 %rd3, %rd1, %rd3;
    ld.global.b32 %r4, [%rd3];
    mul.wide.u32 %rd4, %r2, 4;
    add.s64 %rd4, %rd2, %rd4;
    st.global.b32 [%rd4], %r4;
    ret;
}
""")


@triton.jit
def copy_kernel(x, y, first, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(y + i, tl.load(x + i + first))


def by_cuda(x, y, first, threads=32):
    CUDA[1, threads](x, y, first)


def by_ptx(x, y, first, threads=32):
    PTX[1, threads](x, y, first)


def by_triton(x, y, first, threads=32):
    with triton_compiled("sm_80"):
        copy_kernel[(1,)](x, y, first, SIZE=threads, num_warps=1)


COPIES = [by_cuda, by_ptx, by_triton]
WAYS = pytest.mark.parametrize("copy", COPIES)
MODES = [contextlib.nullcontext, observe, check]


@pytest.mark.parametrize(("case", "mode"), in_turns(list(product(COPIES, [-40, 0, 40, 64])), MODES))
def test_a_kernel_reads_the_storage_outside_of_a_view(case, mode):
    copy, first = case
    storage, y = torch.arange(160, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    with mode():
        copy(storage[64:96], y, first)
    assert torch.equal(y, storage[64 + first :][:32])
    assert torch.equal(storage, torch.arange(160, dtype=torch.int32))


@WAYS
def test_a_kernel_writes_the_storage_outside_of_a_view(copy):
    x, storage = torch.arange(64, dtype=torch.int32), torch.zeros(96, dtype=torch.int32)
    with check():
        copy(x, storage.view(3, 32)[1, 16:], 8)
    assert storage.tolist() == [0] * 48 + [*range(8, 40)] + [0] * 16


@WAYS
def test_two_views_of_one_storage_are_one_memory(copy):
    storage = torch.arange(64, dtype=torch.int32)
    with schedule(3):  # what one view writes, the other one reads
        copy(storage[:32], storage[32:], 0)
        copy(storage[48:], storage[:16], -16)
    assert storage.tolist() == [*range(32), *range(32)]
    with check(stop=False) as report:  # thread i reads what thread i - 1 writes
        copy(storage[1:], storage[:4], 0, 32)
    assert {found.rule for found in report.findings} == {"race"}


@WAYS
@pytest.mark.parametrize(("first", "side"), [(-65, "before"), (65, "past the end of")])
def test_past_the_ends_of_the_storage_is_out_of_bounds(copy, first, side):
    storage, y = torch.arange(160, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    with check(stop=False) as report:
        copy(storage[64:96], y, first)
    (found,) = report.findings
    assert (found.rule, found.tensor, found.count) == ("out of bounds", "x", 1)
    element = -65 if first < 0 else 96
    assert f"x[{element}], {side} the storage of 160 elements that x is a view of" in str(found)


def test_a_copy_of_a_view_has_its_own_ends():
    storage, y = torch.arange(160, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    with check(), pytest.raises(Finding, match=r"x\[32\], past its end \(32 elements\)"):
        by_cuda(storage[64:96].clone(), y, 1)


@pytest.mark.parametrize("mode", MODES)
def test_a_view_of_numpys_is_one_of_torchs(mode):
    base = np.arange(160, dtype=np.int32)
    for x in (base[64:96], base.reshape(5, 32)[2], base[100:30:-1][::-1][33:], torch.from_numpy(base)[64:96].numpy()):
        y = np.zeros(32, np.int32)
        with mode():
            by_cuda(x, y, 40)
        assert np.array_equal(y, np.arange(104, 136)), x.shape
    y = np.zeros(32, np.int32)
    with check(), pytest.raises(Finding, match="past the end of the storage"):
        by_cuda(base[64:96], y, 65)


def test_an_object_with_dlpack_ends_with_its_own_elements():
    class Given:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    with check(), pytest.raises(Finding, match="past its end"):
        by_cuda(Given(np.arange(160, dtype=np.int32)[64:96]), np.zeros(32, np.int32), 1)


def test_only_the_outputs_themselves_must_be_written_before_they_are_read():
    storage = torch.arange(96, dtype=torch.int32)
    x, y = storage[:32], storage[64:]
    with check(outputs=[y]) as report:
        by_cuda(x, y, 0)
        by_cuda(y, x, 0)
    assert len(report.unwritten(y)) == 0
    with check(outputs=[y], stop=False) as report:
        by_cuda(x, y, 0, 20)  # y[20:] stays unwritten
        by_cuda(y, x, 0)
    (found,) = report.findings
    assert (found.rule, found.count) == ("unwritten output", 12)
    assert len(report.unwritten(y)) == 12
    assert len(report.unwritten(storage[32:64])) == 32  # that is no output: nothing is said of its reads


def test_interleaved_views_are_told_apart():
    storage = torch.arange(64, dtype=torch.int32)
    odd = storage[1::2]
    with check(outputs=[odd], stop=False) as report:
        by_cuda(storage, torch.zeros(32, dtype=torch.int32), 0)  # reads the odd elements of the first half
    (found,) = report.findings
    assert (found.rule, found.count) == ("unwritten output", 16)


def test_a_check_around_a_check_knows_what_was_written():
    storage = torch.zeros(64, dtype=torch.int32)
    x, y = storage[:32], storage[32:]
    with check(outputs=[y]) as outer:
        with check(outputs=[x]) as inner:
            by_cuda(torch.arange(32, dtype=torch.int32), y, 0)
            by_cuda(y, x, 0)
        by_cuda(y, x, 0)
    assert [len(report.unwritten(each)) for report in (outer, inner) for each in (x, y)] == [0] * 4


def test_accesses_outside_of_a_view_are_counted_and_traced():
    storage, y = torch.arange(160, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    with observe() as report:
        by_cuda(storage[64:96], y, 40)
    assert report.count("read", "global").bytes == 128
    assert sorted(report.launches[0].accesses("x")["element"]) == list(range(40, 72))


def test_a_view_that_starts_between_elements_of_its_storage():
    memory_of_bytes = np.zeros(131, np.uint8)
    shift = -memory_of_bytes.ctypes.data % 4
    memory_of_bytes = memory_of_bytes[1:]  # a base of its own does not matter
    x = memory_of_bytes[shift - 1 + 4 * (shift == 0) :][: 4 * 24].view(np.int32)
    y = np.ones(32, np.int32)
    with check():
        by_cuda(x, y, 0, 24)
    assert y.tolist() == [0] * 24 + [1] * 8


def test_a_large_storage_is_not_copied(monkeypatch):
    monkeypatch.setattr(memory, "_MOST_COPIED", 1 << 10)
    storage, y = torch.arange(1 << 12, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    kernel = CudaKernel(
        "__global__ void k(int* y, int* x, unsigned at) { *y = (unsigned)(size_t)x == at; x[-1] = 7; }", "k"
    )
    for view, stays in ((storage[64:96], 1), (storage[64:], 0)):
        for mode in (contextlib.nullcontext, check):
            with mode():
                kernel[1, 1](y, view, view.data_ptr() % 2**32)
            assert y[0] == stays
    assert storage[63] == 7
    with check(), pytest.raises(Finding, match="past the end of the storage"):
        by_cuda(storage[64:96], y, (1 << 12) - 95)


def test_memory_named_by_reachable_is_a_storage_too():
    kernel = CudaKernel("struct P { int* a; }; __global__ void k(P p) { p.a[threadIdx.x] = 5; }", "k")
    storage = torch.zeros(96, dtype=torch.int32)
    part = storage[32:64]
    with reachable(part=part), check():
        kernel[1, 64](part.data_ptr().to_bytes(8, "little"))
    assert storage.tolist() == [0] * 32 + [5] * 64
    with reachable(part=part), check(), pytest.raises(Finding, match="past the end of the storage"):
        kernel[1, 65](part.data_ptr().to_bytes(8, "little"))


def test_the_storage_of_an_array_holds_whole_elements():
    raw = bytearray(80)
    first = (1 - np.frombuffer(raw, np.uint8).ctypes.data) % 4
    base = np.frombuffer(raw, np.uint8, offset=first)  # one byte after a multiple of four
    array = as_array(base[7:27].view(np.int32))
    start, end = array.memory
    assert (array.address - start, end - start) == (4, (base.size - 3) // 4 * 4)


# ------------------------------------------------------------------------------------------------ alignment

ADDRESS = "__global__ void k(const float* x, unsigned* rest) { rest[0] = (unsigned)((unsigned long long)x % 32); }"


@pytest.mark.parametrize("checked", [False, True])
def test_memory_begins_at_an_aligned_address_whatever_numpy_gives(checked):
    kernel = CudaKernel(ADDRESS, "k")
    for size in (8, 24, 136):
        several = [np.ones(size, np.float32) for _ in range(64)]  # every other one begins at 16 beyond a multiple of 32
        for x in {each.ctypes.data % 32: each for each in several}.values():
            rest = np.ones(1, np.uint32)
            with check() if checked else contextlib.nullcontext():
                kernel[1, 1](x, rest)
            assert rest[0] == 0


@pytest.mark.parametrize("extra", [0, 2, 4, 8])
@pytest.mark.parametrize("checked", [False, True])
def test_a_view_is_as_aligned_as_its_offset(checked, extra):
    kernel, storage = CudaKernel(ADDRESS, "k"), torch.ones(256 + extra)
    for offset in (64, 66, 68, 72):
        rest = torch.ones(1, dtype=torch.int32)
        with check() if checked else contextlib.nullcontext():
            kernel[1, 1](storage[offset : offset + 128], rest)
        assert rest.item() == offset * 4 % 32
