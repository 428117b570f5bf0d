"""Entries of PTX files on the CPU: what they compute, what a check finds in them, and what is refused."""

import contextlib
import ctypes

import numpy as np
import pytest
import torch

import cudascope
from cudascope import PtxKernel
from cudascope.ptx.module import read_module
from cudascope.toolchain.ptxas import PtxText, resources_of
from cudascope.translate.ptx.entry import loads_for_stores

HEADER = ".version 8.4\n.target sm_90a\n.address_size 64\n"
FENCE = "fence.proxy.async;"
SCHEDULES = (None, 0, 1, 2, 3)
MODES = {"plain": contextlib.nullcontext, "check": cudascope.check}

ADD = """
.visible .entry add(.param .u64 x, .param .u64 y, .param .u32 n, .param .f32 scale)
{
    .reg .pred %p<2>;
    .reg .b32 %r<6>;
    .reg .f32 %f<4>;
    .reg .b64 %rd<6>;
    ld.param.u64 %rd1, [x];
    ld.param.u64 %rd2, [y];
    ld.param.u32 %r1, [n];
    ld.param.f32 %f1, [scale];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.s32 %p1, %r5, %r1;
    @%p1 bra $DONE;
    mul.wide.s32 %rd3, %r5, 4;
    add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
    ld.global.f32 %f2, [%rd4];
    fma.rn.f32 %f3, %f2, %f1, 0f3F800000;
    st.global.f32 [%rd5], %f3;
$DONE:
    ret;
}
"""

# Thread t stores x[t], and gives back what thread 127 - t has stored.
REVERSE = """
.visible .entry reverse(.param .u64 x, .param .u64 y)
.reqntid 128
{
    .reg .b32 %r<8>;
    .reg .b64 %rd<6>;
    .shared .align 4 .b8 row[512];
    .loc 1 7 3 // reverse.py:7:3
    ld.param.u64 %rd1, [x];
    ld.param.u64 %rd2, [y];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, row;
    shl.b32 %r3, %r1, 2;
    add.s32 %r4, %r2, %r3;
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd1, %rd3;
    ld.global.b32 %r5, [%rd4];
    st.shared.b32 [%r4], %r5;
    bar.sync 0;
    .loc 1 9 3 // reverse.py:9:3
    sub.s32 %r6, 508, %r3;
    add.s32 %r6, %r6, %r2;
    ld.shared.b32 %r7, [%r6];
    add.s64 %rd5, %rd2, %rd3;
    st.global.b32 [%rd5], %r7;
    ret;
}
.file 1 "reverse.py"
"""

# 256 floats go to shared memory in bulk, and each of 64 threads stores four of them.
BULK = """
.visible .entry bulk(.param .u64 x, .param .u64 y)
{
    .reg .pred %p<3>;
    .reg .b32 %r<8>;
    .reg .b64 %rd<6>;
    .shared .align 128 .b8 tile[1024];
    .shared .align 8 .b8 barrier[8];
    ld.param.u64 %rd1, [x];
    ld.param.u64 %rd2, [y];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, tile;
    mov.u32 %r3, barrier;
    setp.eq.u32 %p1, %r1, 0;
    @%p1 mbarrier.init.shared::cta.b64 [%r3], 1;
    bar.sync 0;
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 1024;
    @%p1 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 1024, [%r3];
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0;
    @!%p2 bra WAIT;
    shl.b32 %r4, %r1, 4;
    add.s32 %r5, %r2, %r4;
    mul.wide.u32 %rd3, %r1, 16;
    add.s64 %rd4, %rd2, %rd3;
    .reg .b32 %v<4>;
    ld.shared.v4.b32 {%v0, %v1, %v2, %v3}, [%r5];
    st.global.v4.b32 [%rd4], {%v0, %v1, %v2, %v3};
    ret;
}
"""

# 64 threads store 256 floats in shared memory, and thread 0 copies them to y in bulk.
BULK_STORE = """
.visible .entry bulk_store(.param .u64 x, .param .u64 y)
{
    .reg .pred %p<2>;
    .reg .b32 %r<6>;
    .reg .b64 %rd<5>;
    .reg .b32 %v<4>;
    .shared .align 128 .b8 tile[1024];
    ld.param.u64 %rd1, [x];
    ld.param.u64 %rd2, [y];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, tile;
    shl.b32 %r3, %r1, 4;
    add.s32 %r4, %r2, %r3;
    mul.wide.u32 %rd3, %r1, 16;
    add.s64 %rd4, %rd1, %rd3;
    ld.global.v4.b32 {%v0, %v1, %v2, %v3}, [%rd4];
    st.shared.v4.b32 [%r4], {%v0, %v1, %v2, %v3};
    bar.sync 1, 64;
    setp.eq.u32 %p1, %r1, 0;
    fence.proxy.async;
    @%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r2], 1024;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    ret;
}
"""


def without(text: str, instruction: str, instead: str = "") -> str:
    """`text` without the only line that starts with `instruction`."""
    lines = text.split("\n")
    (at,) = [i for i, line in enumerate(lines) if line.strip().startswith(instruction)]
    return "\n".join([*lines[:at], instead, *lines[at + 1 :]])


def test_a_file_and_one_of_its_entries(tmp_path):
    (tmp_path / "two.ptx").write_text(HEADER + ADD + REVERSE)
    x, y = np.arange(128, dtype=np.float32), np.zeros(128, np.float32)
    PtxKernel(tmp_path / "two.ptx", "reverse")[1, 128](x, y)
    assert np.array_equal(y, x[::-1])


def test_counts_are_those_of_the_lines_that_loc_names():
    memory = np.zeros(512, np.float32)
    memory = memory[-memory.ctypes.data % 64 // 4 :]  # sectors have 32 bytes
    x, y = memory[:128], memory[128:256]
    with cudascope.observe() as report:
        PtxKernel(HEADER + REVERSE)[1, 128](x, y)
    read, write = report.count("read", "global"), report.count("write", "global")
    assert (read.line, read.requests, read.sectors) == (0, 4, 16)
    assert [(c.line, c.access, c.space) for c in report.launches[0].lines] == [
        (7, "barrier", ""), (7, "read", "global"), (7, "write", "shared"),
        (9, "read", "shared"), (9, "write", "global"),
    ]  # fmt: skip
    assert write.sectors == 16


def test_a_missing_barrier_is_a_race_at_the_line_of_the_source():
    x, y = np.arange(128, dtype=np.float32), np.zeros(128, np.float32)
    kernel = PtxKernel(HEADER + without(REVERSE, "bar.sync"))
    with cudascope.check(), pytest.raises(cudascope.Finding) as found:
        kernel[1, 128](x, y)
    assert (found.value.rule, found.value.file) == ("race", "reverse.py")
    assert {found.value.line, found.value.other_line} == {7, 9}
    assert "`st.shared.b32 [%r4], %r5`" in str(found.value)


@pytest.mark.slow
def test_an_entry_computes_on_numpy_arrays_and_an_index_past_the_end_is_found():
    x, y = np.arange(300, dtype=np.float32), np.zeros(200, np.float32)
    with cudascope.check(stop=False) as report:
        PtxKernel(HEADER + ADD)[3, 128](x, y, 300, 0.5)
    assert np.array_equal(y, x[:200] * np.float32(0.5) + 1)
    assert [(each.rule, each.tensor, each.count) for each in report.findings] == [("out of bounds", "y", 100)]


def test_a_bulk_copy_lands_at_the_wait_for_its_mbarrier():
    x, y = np.arange(256, dtype=np.float32), np.zeros(256, np.float32)
    PtxKernel(HEADER + BULK)[1, 64](x, y)
    assert np.array_equal(x, y)


@pytest.mark.slow
def test_without_the_wait_a_bulk_copy_gives_nans_and_is_found():
    # not the values of other tests: a thread that is early reads what another launch has left in shared memory
    x, y = np.arange(1000, 1256, dtype=np.float32), np.zeros(256, np.float32)
    kernel = PtxKernel(HEADER + without(BULK, "mbarrier.try_wait", "mov.pred %p2, 1;"))
    kernel[1, 64](x, y)
    assert np.isnan(y).any()
    assert not (x == y)[1:].any()
    with cudascope.check(stop=False) as report:
        kernel[1, 64](x, y)
    assert {"copy in flight", "pending copy"} <= {each.rule for each in report.findings}


STORED = BULK.replace("bar.sync", "@%p1 st.shared.v4.b32 [%r2], {%r1, %r1, %r1, %r1}; bar.sync")
BY_TWO_WARPS = BULK_STORE.replace("%p1, %r1, 0", "%p1, %r3, 0").replace("setp", "and.b32 %r3, %r1, 31; setp")
OTHER_VALUES = BY_TWO_WARPS.replace("[%r2], 1024", "[%r5], 512").replace("setp", "mad.lo.s32 %r5, %r1, 8, %r2; setp")


def both_begin(source: str) -> str:
    """Both warps begin their copies before one of them waits."""
    return source.replace("cp.async.bulk.wait_group", "bar.sync 1, 64; cp.async.bulk.wait_group")


@pytest.mark.parametrize(
    ("source", "rules"),
    [
        pytest.param(BULK, set(), id="one copy"),
        pytest.param(STORED, {"no proxy fence"}, id="over a store"),
        pytest.param(STORED.replace("bar.sync", f"{FENCE} bar.sync"), set(), id="over a store and a fence"),
        pytest.param(BULK_STORE.replace(FENCE, f"@%p1 {FENCE}"), set(), id="the fence of one thread covers all"),
        pytest.param(BULK_STORE.replace(FENCE, ""), {"no proxy fence"}, id="from stores without a fence"),
        pytest.param(BY_TWO_WARPS, {"same value"}, id="twice"),
        pytest.param(both_begin(BY_TWO_WARPS), {"same value"}, id="twice at once"),
        pytest.param(OTHER_VALUES, {"race"}, id="other values"),
        pytest.param(both_begin(OTHER_VALUES), {"race", "copy in flight"}, id="other values at once"),
    ],
)
def test_a_check_of_bulk_copies_knows_their_fences_and_values(source, rules):
    x, y = np.arange(256, dtype=np.float32), np.zeros(256, np.float32)
    with cudascope.check(stop=False) as report:
        PtxKernel(HEADER + source)[1, 64](x, y)
    assert {each.rule for each in report.findings} == rules
    assert "race" in rules or np.array_equal(x, y)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_too_few_bytes_for_a_phase_are_a_deadlock_at_once(mode):
    x, y = np.arange(256, dtype=np.float32), np.zeros(256, np.float32)
    kernel = PtxKernel(HEADER + BULK.replace("[%r3], 1024;", "[%r3], 2048;"))
    for seed in SCHEDULES:
        with MODES[mode](), cudascope.schedule(seed), pytest.raises(cudascope.Finding) as found:
            kernel[2, 64](x, y)
        assert "try_wait" in str(found.value)


# Thread 0 polls the second barrier, and arrives at the first between two polls. Thread 32 waits for the first one.
POLLS = """
.visible .entry polls(.param .u64 y)
{
    .reg .pred %p<6>;
    .reg .b32 %r<6>;
    .reg .b64 %rd<2>;
    .shared .align 8 .b8 barriers[16];
    ld.param.u64 %rd1, [y];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, barriers;
    mov.u32 %r3, 0;
    setp.eq.u32 %p1, %r1, 0;
    setp.eq.u32 %p2, %r1, 32;
    @%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
    @%p1 mbarrier.init.shared::cta.b64 [%r2+8], 1;
    bar.sync 0;
    @%p2 bra SECOND;
    @!%p1 ret;
POLL:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r2+8], 0;
    @%p3 bra DONE;
    setp.eq.u32 %p4, %r3, 0;
    @%p4 mbarrier.arrive.shared::cta.b64 _, [%r2];
    add.u32 %r3, %r3, 1;
    bra POLL;
DONE:
    st.global.b32 [%rd1], 1;
    ret;
SECOND:
    mbarrier.try_wait.parity.shared::cta.b64 %p5, [%r2], 0;
    @!%p5 bra SECOND;
    mbarrier.arrive.shared::cta.b64 _, [%r2+8];
    ret;
}
"""


@pytest.mark.parametrize("mode", MODES)
def test_a_thread_may_do_other_work_between_two_polls_of_a_phase(mode):
    kernel = PtxKernel(HEADER + POLLS)
    for seed in SCHEDULES:
        y = np.zeros(1, np.int32)
        with MODES[mode](), cudascope.schedule(seed):
            kernel[1, 64](y)
        assert y[0] == 1


def test_a_phase_that_is_polled_once_only_may_not_have_ended():
    """The result of try_wait is ignored: a schedule shows what a GPU may do."""
    x, y, found = np.arange(256, dtype=np.float32), np.zeros(256, np.float32), set()
    for seed in SCHEDULES:
        with cudascope.check(schedule=seed, stop=False) as report:
            PtxKernel(HEADER + BULK.replace("@!%p2 bra WAIT;", ""))[1, 64](x, y)
        found |= {each.rule for each in report.findings}
    assert found
    assert found <= {"race", "copy in flight"}


# ------------------------------------------------------------------------------------------------ products of matrices

# D [64, n] = A [64, k] · B [k, n] by four warps. The host has laid out A and B as the descriptors say.
PRODUCT = """
.visible .entry product(.param .u64 a, .param .u64 b, .param .u64 d, .param .u64 da, .param .u64 db)
.reqntid 128
{{
    .reg .pred %p<2>;
    .reg .b32 %r<10>;
    .reg .b64 %rd<12>;
    .reg .b32 %d<{registers}>;
    .shared .align 1024 .b8 left[8192];
    .shared .align 1024 .b8 right[16384];
    ld.param.u64 %rd1, [a];
    ld.param.u64 %rd2, [b];
    ld.param.u64 %rd3, [d];
    ld.param.u64 %rd4, [da];
    ld.param.u64 %rd5, [db];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, left;
    mov.u32 %r3, right;
    mov.u32 %r4, %r1;
COPY:
    mul.wide.u32 %rd6, %r4, 4;
    add.s64 %rd7, %rd1, %rd6;
    add.s64 %rd8, %rd2, %rd6;
    shl.b32 %r5, %r4, 2;
    add.s32 %r6, %r5, %r3;
    ld.global.b32 %r8, [%rd8];
    st.shared.b32 [%r6], %r8;
    setp.lt.u32 %p1, %r4, 2048;
    add.s32 %r6, %r5, %r2;
    @%p1 ld.global.b32 %r7, [%rd7];
    @%p1 st.shared.b32 [%r6], %r7;
    add.s32 %r4, %r4, 128;
    setp.lt.u32 %p1, %r4, 4096;
    @%p1 bra COPY;
    fence.proxy.async;
    bar.sync 0;
    shr.u32 %r2, %r2, 4;
    shr.u32 %r3, %r3, 4;
    cvt.u64.u32 %rd6, %r2;
    cvt.u64.u32 %rd7, %r3;
    add.s64 %rd4, %rd4, %rd6;
    add.s64 %rd5, %rd5, %rd7;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n{n}k{k}.{types} {{{out}}}, %rd4, %rd5, 0{flags};
    wgmma.commit_group.sync.aligned;
    {wait}
    mul.wide.u32 %rd9, %r1, {bytes};
    add.s64 %rd10, %rd3, %rd9;
    {stores}
    ret;
}}
"""
WAIT = "wgmma.wait_group.sync.aligned 0;"


def product(types: str, n: int, k: int, *, turned: tuple[int, int] = (0, 0), wait: str = WAIT) -> str:
    flags = "" if types.startswith("s32") else ", 1, 1"
    flags += f", {turned[0]}, {turned[1]}" if k == 16 else ""
    registers = n // 4 if types.startswith("f16") else n // 2  # two halves share a register
    out = [f"%d{i}" for i in range(registers)]
    stores = "\n    ".join(f"st.global.b32 [%rd10+{4 * i}], {each};" for i, each in enumerate(out))
    return HEADER + PRODUCT.format(
        registers=registers, n=n, k=k, types=types, out=", ".join(out), flags=flags, wait=wait,
        bytes=4 * registers, stores=stores,
    )  # fmt: skip


def laid_out(matrix: np.ndarray, swizzle: int, turned: int, size: int) -> tuple[np.ndarray, int]:
    """Shared memory that holds `matrix` [rows, k], and its descriptor without the address: PTX ISA, 9.7.15.5.

    The layouts are those of CUTLASS (cute/arch/mma_sm90_desc.hpp), in units of 16 bytes, where S is the length of a
    swizzled row: K-major ((8, m), 2) : ((S, SBO), 1), and MN-major ((S, m), (8, 2)) : ((1, LBO), (S, SBO)).
    """
    width, item = {0: 16, 1: 128, 2: 64, 3: 32}[swizzle], matrix.itemsize
    lead, stride = (16 * width * turned, 8 * width) if swizzle else (128, 256)
    of_eight, of_width = (lead, stride) if turned and not swizzle else (stride, lead)
    memory = np.zeros(size, np.uint8)
    for row, column in np.ndindex(matrix.shape):
        line, byte = (column, row * item) if turned else (row, column * item)
        at = line // 8 * of_eight + byte // width * of_width + line % 8 * width + byte % width
        at ^= (at >> 7 & (width // 16 - 1)) << 4
        memory[at : at + item] = np.frombuffer(matrix[row, column].tobytes(), np.uint8)
    return memory, lead >> 4 << 16 | stride >> 4 << 32 | swizzle << 62


def multiplied(kernel: PtxKernel, a: np.ndarray, b: np.ndarray, *, swizzle=0, turned=(0, 0), dtype=np.float32):
    """D [64, n], from the fragments that the lanes hold: PTX ISA, figure of the accumulator of wgmma."""
    left, da = laid_out(a, swizzle, turned[0], 8192)
    right, db = laid_out(b, swizzle, turned[1], 16384)
    held, d = np.zeros((128, len(b) // 2), dtype), np.empty((64, len(b)), dtype)
    kernel[1, 128](left, right, held, da, db)
    thread, i = np.indices(held.shape)
    d[thread // 32 * 16 + thread % 32 // 4 + 8 * (i // 2 % 2), i // 4 * 8 + thread % 4 * 2 + i % 2] = held
    return d


@pytest.mark.parametrize("turned", [(0, 0), (1, 1), (0, 1)])
def test_products_of_halves_from_every_layout(turned):
    random = np.random.default_rng(0)
    a, b = random.standard_normal((64, 16)).astype(np.float16), random.standard_normal((64, 16)).astype(np.float16)
    expected = a.astype(np.float64) @ b.astype(np.float64).T
    kernel = PtxKernel(product("f32.f16.f16", 64, 16, turned=turned))
    for swizzle in (0, 1, 2, 3):
        d = multiplied(kernel, a, b, swizzle=swizzle, turned=turned)
        assert np.allclose(d, expected, atol=1e-5), swizzle


@pytest.mark.slow
def test_products_of_other_types():
    random = np.random.default_rng(0)
    a, b = random.integers(-100, 100, (64, 32)).astype(np.int8), random.integers(-100, 100, (8, 32)).astype(np.int8)
    d = multiplied(PtxKernel(product("s32.s8.s8", 8, 32)), a, b, dtype=np.int32)
    assert np.array_equal(d, a.astype(np.int32) @ b.astype(np.int32).T)
    a, b = random.standard_normal((64, 8)).astype(np.float32), random.standard_normal((8, 8)).astype(np.float32)
    short = [(x.view(np.uint32) & ~np.uint32(0x1FFF)).view(np.float32).astype(np.float64) for x in (a, b)]
    d = multiplied(PtxKernel(product("f32.tf32.tf32", 8, 8)), a, b)
    assert np.allclose(d, short[0] @ short[1].T, atol=1e-5)


@pytest.mark.parametrize(("kind", "n"), [("f16", 8), ("f16", 24), ("f16", 256), ("e4m3", 64), ("e5m2", 8)])
def test_sums_of_a_product_may_be_halves(kind, n):
    random = np.random.default_rng(0)
    k = 16 if kind == "f16" else 32
    numbers = random.integers(-4, 5, (64 + n, k)) / 8
    if kind == "f16":
        operands = numbers.astype(np.float16)
    else:
        dtype = torch.float8_e4m3fn if kind == "e4m3" else torch.float8_e5m2
        operands = torch.from_numpy(numbers).to(dtype).view(torch.int8).numpy()
    kernel = PtxKernel(product(f"f16.{kind}.{kind}", n, k))
    d = multiplied(kernel, operands[:64], operands[64:], dtype=np.float16)
    assert np.array_equal(d, (numbers[:64] @ numbers[64:].T).astype(np.float16))
    assert resources_of(PtxText(kernel.text, kernel.name, "sm_90a"), 90)


@pytest.mark.parametrize("types", ["f16.f16.f16", "f32.f16.f16"])
def test_products_of_every_width_are_known(types):
    for n in range(8, 257, 8):
        PtxKernel(product(types, n, 16))
    with pytest.raises(ValueError, match="wgmma"):
        PtxKernel(product(types, 12, 16))


def test_a_product_without_its_wait_gives_nans():
    a = b = np.ones((64, 16), np.float16)
    assert np.isnan(multiplied(PtxKernel(product("f32.f16.f16", 64, 16, wait="")), a, b)).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("left_out", "rules"), [("", set()), ("fence.proxy", {"no proxy fence"}), ("wgmma.fence", {"argument"})]
)
def test_a_product_without_its_fences_is_found(left_out, rules):
    a = b = np.ones((64, 16), np.float16)
    source = product("f32.f16.f16", 64, 16)
    with cudascope.check(stop=False) as report:
        multiplied(PtxKernel(without(source, left_out) if left_out else source), a, b)
    assert {each.rule for each in report.findings} == rules


# ------------------------------------------------------------------------------------------------ refusals


def test_what_is_refused():
    kernel = PtxKernel(HEADER + ADD)
    x = np.zeros(4, np.float32)
    refused = [
        (lambda: PtxKernel("no text\nat all"), ValueError, "no text"),
        (lambda: PtxKernel(HEADER + ADD + REVERSE), ValueError, "name must be an entry of the module .add, reverse"),
        (lambda: PtxKernel(HEADER + ADD, "sub"), ValueError, "got 'sub'"),
        (lambda: PtxKernel("/nowhere.ptx"), FileNotFoundError, "nowhere"),
        (lambda: PtxKernel(HEADER + ADD.replace("fma.rn.f32", "fma.rn.f128")), ValueError, r"line 25.*fma\.rn\.f128"),
        (lambda: PtxKernel(HEADER + ADD.replace("%f2, [%rd4]", "%g2, [%rd4]")), ValueError, "line 24.*%g2"),
        (lambda: kernel[1, 32](x, x, 4), TypeError, "takes 4 arguments"),
        (lambda: kernel[1, 32](x, x, 2**32, 1.0), ValueError, "n must fit in `.u32`"),
        (lambda: kernel[1, 32](x, x, 1.5, 1.0), TypeError, "n must be an int"),
        (lambda: kernel[1, 32](x, x, 4, x), TypeError, "scale must be a number"),
        (lambda: kernel[1, 32]("x", x, 4, 1.0), TypeError, "x must be a tensor of any dtype, None or an int"),
        (lambda: PtxKernel(HEADER + REVERSE)[1, 64], ValueError, "block must be .128, 1, 1."),
    ]
    for call, error, message in refused:
        with pytest.raises(error, match=message):
            call()


def test_a_struct_is_passed_by_its_bytes():
    source = (
        HEADER
        + """
.visible .entry field(.param .align 8 .b8 s[16], .param .u64 y)
{
    .reg .b32 %r<2>;
    .reg .b64 %rd<2>;
    ld.param.b32 %r1, [s+8];
    ld.param.u64 %rd1, [y];
    st.global.b32 [%rd1], %r1;
    ret;
}
"""
    )

    class Pair(ctypes.Structure):
        _fields_ = (("first", ctypes.c_int64), ("second", ctypes.c_int32))

    y = np.zeros(1, np.int32)
    PtxKernel(source)[1, 1](Pair(1, -7), y)
    assert y[0] == -7
    with pytest.raises(ValueError, match="s must be 16 bytes"):
        PtxKernel(source)[1, 1](b"1234", y)


@pytest.mark.parametrize(
    ("middle", "loads", "stores"),
    [
        ("", {0: 1}, {1: 1}),
        ("mul.f32 %f2, %f1, %f1; mov.f32 %f1, %f2;", {0: 1}, {3: 1}),
        ("setp.lt.f32 %p2, %f1, %f3; selp.f32 %f1, %f1, %f3, %p2;", {0: 1}, {3: 1}),
        ("ld.global.f32 %f2, [%rd1]; add.f32 %f1, %f1, %f2;", {0: 1, 1: 2}, {3: 3}),
        ("st.global.f32 [%rd3], %f1;", {0: 1}, {1: 1, 2: 1}),
        ("setp.lt.f32 %p2, %f1, %f3; @%p2 bra $DONE;", {}, {}),
        ("setp.lt.f32 %p1, %f1, %f3;", {}, {}),
        ("shfl.sync.bfly.b32 %f1, %f1, 1, 31, -1;", {}, {}),
        ("mov.b32 %r1, %f1; st.shared.b32 [%r2], %r1;", {}, {}),
        ("cvt.u64.u32 %rd4, %f1; add.s64 %rd2, %rd2, %rd4;", {}, {}),
        ("@%p3 mov.f32 %f4, %f1; red.global.add.f32 [%rd3], %f4;", {}, {}),
    ],
)
def test_the_loads_whose_values_only_stores_use_are_known(middle, loads, stores):
    code = f"ld.global.nc.f32 %f1, [%rd1]; {middle} @%p1 st.global.f32 [%rd2 + 4], %f1; $DONE: ret;"
    (entry,) = read_module(f"{HEADER}.visible .entry k() {{ {code} }}").entries.values()
    assert loads_for_stores(entry.body) == (loads, stores)
