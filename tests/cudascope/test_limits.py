"""`report.limits()`: the work of each unit is the number counted by hand, and its time is a lower bound."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from test_ptx_kernel import BULK, BULK_STORE, HEADER
from triton_helpers import product

from cudascope import CudaKernel, PtxKernel, check, observe, triton_compiled
from cudascope.cpu.abi import Mode
from cudascope.gpus import GPUS, thread_blocks_per_sm
from cudascope.ptx.module import read_module
from cudascope.toolchain.ptxas import PtxText, registers_of, resources_of
from cudascope.translate.ptx.costs import cost
from cudascope.translate.ptx.entry import entry_source
from cudascope.watch.least_time import times

# One entry for all cases, for each entry is a build. `mode` chooses what runs, `n` how often.
UNITS = """
.version 8.4
.target sm_80
.address_size 64
.visible .entry units(.param .u64 x, .param .u64 y, .param .u32 mode, .param .u32 n)
{
    .reg .pred %p<8>;
    .reg .b32 %r<24>;
    .reg .f32 %f<12>;
    .reg .b64 %rd<8>;
    .shared .align 16 .b8 tile[16384];
    ld.param.u64 %rd1, [x];
    ld.param.u64 %rd2, [y];
    ld.param.u32 %r1, [mode];
    ld.param.u32 %r2, [n];
    mov.u32 %r3, %tid.x;
    mov.u32 %r4, %laneid;
    mov.u32 %r5, 0;
    mul.wide.u32 %rd3, %r3, 4;
    add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
    mov.u32 %r6, tile;
    setp.lt.u32 %p2, %r4, 16;
    setp.eq.u32 %p3, %r4, 3;
CHOICES: .branchtargets TENSOR, FUSED, SPECIAL, SUMS, SHARED, BROADCAST, TWICE, BACK, SIDES,
        ONE_LANE, TRIANGLE, MEETING;
    brx.idx %r1, CHOICES;
TENSOR:
    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 
        {%f1, %f2, %f3, %f4}, {%r7, %r8, %r9, %r10}, {%r11, %r12}, {%f1, %f2, %f3, %f4};
    add.u32 %r5, %r5, 1;
    setp.lt.u32 %p1, %r5, %r2;
    @%p1 bra TENSOR;
    ret;
FUSED:
    fma.rn.f32 %f1, %f1, %f2, %f3;
    mul.rn.f32 %f2, %f1, %f3;
    add.u32 %r5, %r5, 1;
    setp.lt.u32 %p1, %r5, %r2;
    @%p1 bra FUSED;
    fma.rn.f32 %f1, %f1, %f2, %f3;
    ret;
SPECIAL:
    ex2.approx.ftz.f32 %f1, %f1;
    rcp.approx.f32 %f2, %f3;
    div.full.f32 %f2, %f1, %f3;
    add.u32 %r5, %r5, 1;
    setp.lt.u32 %p1, %r5, %r2;
    @%p1 bra SPECIAL;
    ret;
SUMS:
    mul.f32 %f4, %f1, %f2;
    mul.f32 %f5, %f1, %f3;
    mul.f32 %f6, %f4, %f5;
    add.f32 %f7, %f6, %f1;
    ret;
SHARED:
    mul.lo.u32 %r7, %r3, %r2;
    shl.b32 %r7, %r7, 2;
    add.u32 %r7, %r7, %r6;
    st.shared.b32 [%r7], %r3;
    ret;
BROADCAST:
    ld.shared.v4.b32 {%r8, %r9, %r10, %r11}, [%r6];
    shl.b32 %r7, %r3, 4;
    add.u32 %r7, %r7, %r6;
    ld.shared.v4.b32 {%r12, %r13, %r14, %r15}, [%r7];
    ret;
TWICE:
    ld.global.b32 %r7, [%rd4];
    ld.global.b32 %r8, [%rd4];
    add.u32 %r7, %r7, %r8;
    st.global.b32 [%rd5], %r7;
    ret;
BACK:
    st.global.b32 [%rd5], %r3;
    ld.global.b32 %r7, [%rd5];
    ld.global.cg.b32 %r8, [%rd5];
    ld.global.cg.b32 %r9, [%rd5];
    ret;
SIDES:
    @%p2 bra LOW;
    fma.rn.f32 %f1, %f1, %f2, %f3;
    fma.rn.f32 %f1, %f1, %f2, %f3;
    bra JOIN;
LOW:
    fma.rn.f32 %f1, %f1, %f2, %f3;
JOIN:
    ret;
ONE_LANE:
    @%p3 fma.rn.f32 %f1, %f1, %f2, %f3;
    @!%p3 ex2.approx.f32 %f1, %f1;
    mov.pred %p4, 0;
    @%p4 fma.rn.f32 %f1, %f1, %f2, %f3;
    ret;
TRIANGLE:
    fma.rn.f32 %f1, %f1, %f2, %f3;
ROUND:
    fma.rn.f32 %f1, %f1, %f2, %f3;
    add.u32 %r5, %r5, 1;
    setp.lt.u32 %p1, %r5, %r4;
    @%p1 bra ROUND;
    ret;
MEETING:
    bar.sync 0;
    shfl.sync.bfly.b32 %r7, %r3, 1, 31, -1;
    add.u32 %r5, %r5, 1;
    setp.lt.u32 %p1, %r5, %r2;
    @%p1 bra MEETING;
    ret;
}
"""
TENSOR, FUSED, SPECIAL, SUMS, SHARED, BROADCAST, TWICE, BACK, SIDES, ONE_LANE, TRIANGLE, MEETING = range(12)


def aligned(elements: int) -> np.ndarray:
    """Return zeros that start at a multiple of 64 bytes, so that sectors can be counted by hand."""
    memory = np.zeros(elements + 16, np.float32)
    start = -memory.ctypes.data % 64 // 4
    return memory[start : start + elements]


@pytest.fixture(scope="module")
def units():
    return PtxKernel(UNITS)


@pytest.fixture
def observed(units):
    """A function that launches one mode and returns its observed launch."""

    def launch(mode, n=1, grid=1, block=32):
        x, y = aligned(128), aligned(128)
        with observe() as report:
            units[grid, block](x, y, mode, n)
        return report.launches[0]

    return launch


NOTHING = {"tensor_flops": {}, "fp32": 0, "special": 0, "issues": 0, "moves": 0, "wavefronts": 0, "l2_bytes": 0}
NOTHING |= {"dram_read_bytes": 0, "dram_written_bytes": 0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "n", "block", "work"),
    [
        (TENSOR, 5, 64, {"tensor_flops": {("f16", "f32"): 2 * 5 * 2 * 16 * 8 * 16}, "issues": 10}),  # 2 warps, 5 times
        (FUSED, 7, 32, {"fp32": 32 * (2 * 7 + 1), "issues": 15}),
        (FUSED, 1, 40, {"fp32": 2 * 32 * 3, "issues": 2 * 3}),  # a partial warp executes what a whole warp does
        (
            SPECIAL,
            3,
            96,
            {"special": 3 * 32 * 3 * 2, "issues": 3 * (3 * 2) + 9 // 2},
        ),  # the division may use the reciprocal
        (SUMS, 1, 32, {"fp32": 32 * 3, "issues": 3}),  # of three products one may be fused with the sum
        (SHARED, 1, 32, {"issues": 1, "moves": 1, "wavefronts": 1}),
        (
            SHARED,
            2,
            64,
            {"issues": 2, "moves": 2, "wavefronts": 4},
        ),  # a stride of 2 words: 2 conflicting words in each bank
        (SHARED, 32, 32, {"issues": 1, "moves": 1, "wavefronts": 32}),
        (BROADCAST, 1, 32, {"issues": 2, "moves": 2, "wavefronts": 2 + 4}),  # one vector for all lanes; 512 bytes
        # 512 bytes are read twice, and L1 may have them the second time
        (
            TWICE,
            1,
            128,
            {"issues": 12, "moves": 12, "l2_bytes": 1024, "dram_read_bytes": 512, "dram_written_bytes": 512},
        ),
        # what was just written is not read from DRAM; ld.cg reads L2 each time
        (BACK, 1, 32, {"issues": 4, "moves": 4, "l2_bytes": 3 * 128, "dram_written_bytes": 128}),
        (SIDES, 1, 32, {"fp32": 32 * 3, "issues": 3}),  # the warp takes both sides, one after the other
        (
            ONE_LANE,
            1,
            64,
            {"fp32": 2 * 32, "special": 2 * 32, "issues": 4},
        ),  # any lane makes the warp execute; none: nothing
        (TRIANGLE, 1, 32, {"fp32": 32 * (1 + 31), "issues": 32}),  # lane 31 goes round 31 times
        (MEETING, 3, 64, {"issues": 2 * 3 * 2}),  # a barrier and a shuffle; integers and branches count nothing
    ],
)
def test_work_is_the_number_counted_by_hand(observed, mode, n, block, work):
    assert observed(mode, n, block=block).work._asdict() == NOTHING | {"thread_blocks": 1} | work


VECTORS = """
template <typename T> __global__ void load(const int* index, T* out) {
    __shared__ T row[64];
    const int i = index[threadIdx.x];
    if (i >= 0) out[threadIdx.x] = row[i];
}
template <typename T> __global__ void store(const int* index, T* out) {
    __shared__ T row[64];
    row[index[threadIdx.x]] = out[threadIdx.x];
}"""


@pytest.mark.parametrize(
    ("name", "index", "turns", "conflicts"),
    [  # of an H200, by ncu's memory_l1_wavefronts_shared
        pytest.param("load<float2>", lambda lane: 0, 1, 0, id="all lanes agree: one turn (softmax<__half, 64>)"),
        pytest.param("load<float2>", lambda lane: lane % 2, 1, 0, id="lanes agree with the next but one (paged v1)"),
        pytest.param("load<float2>", lambda lane: lane // 2, 1, 0, id="lanes agree with the next (not measured)"),
        pytest.param("load<float2>", lambda lane: lane % 4, 2, 0, id="four vectors (flash_attention_backward_kernel)"),
        pytest.param("load<float2>", lambda lane: 2 * lane, 4, 2, id="each second vector (shared_stride)"),
        pytest.param("load<float4>", lambda lane: 0, 2, 0, id="halves of a warp never join (softmax<float>)"),
        pytest.param(
            "load<float4>", lambda lane: 0 if lane < 12 else -1, 1, 0, id="12 lanes take part (inclusive_scan)"
        ),
        pytest.param("store<float2>", lambda lane: lane // 4, 2, 0, id="stores never join (flash_attention_kernel)"),
        pytest.param("load<float4>", lambda lane: 2 * lane, 8, 4, id="conflicts (shared_stride)"),
    ],
)
def test_vectors_are_served_as_an_h200_serves_them(name, index, turns, conflicts):
    indices = torch.tensor([index(lane) for lane in range(32)], dtype=torch.int32)
    with observe() as report:
        CudaKernel(VECTORS, name)[1, 32](indices, torch.empty(32 * int(name[-2])))
    launch = report.launches[0]
    assert (launch.work.wavefronts, launch.bank_conflicts) == (turns, conflicts)


@pytest.mark.parametrize(
    ("mode", "n", "unit", "seconds"),
    [
        (TENSOR, 4, "tensor cores", 4 * 4096 / 4096 / 1.98e9),
        (FUSED, 9, "FP32 lanes", 19 * 32 / 128 / 1.98e9),
        (SPECIAL, 2, "special functions", 4 * 32 / 16 / 1.98e9),
        (MEETING, 8, "issue slots", 8 * 2 / 4 / 1.98e9),
        (SHARED, 16, "shared memory", 16 / 1.98e9),
        (TWICE, 1, "load/store", 3 / 1.98e9),
    ],
)
def test_each_unit_alone_sets_the_limit(observed, mode, n, unit, seconds):
    limits = observed(mode, n).limits("H100", registers=32)
    assert limits.largest == unit
    assert limits.least == limits.seconds[unit] == pytest.approx(seconds)


@pytest.mark.slow
def test_dram_sets_the_limit_of_a_grid_that_fills_the_gpu():
    copy = UNITS.replace("mov.u32 %r3, %tid.x;", "mov.u32 %r3, %ctaid.x;\n    shl.b32 %r3, %r3, 10;")
    # a lane reads one word of each fourth kilobyte, 4000 thread blocks of one lane
    x, y = aligned(4000 << 10), aligned(4000 << 10)
    with observe() as report:
        PtxKernel(copy)[4000, 1](x, y, TWICE, 1)
    limits = report.limits("H100", registers=32)
    assert limits.seconds["DRAM"] == pytest.approx(4000 * 32 / 3.352e12)  # the stores stay in L2
    assert limits.seconds["load/store"] == pytest.approx(3 * 4000 / 132 / 1.98e9)


def test_sms_without_a_thread_block_do_not_help(observed):
    one, three = (observed(FUSED, 5, grid=grid).limits("H100", registers=32) for grid in (1, 3))
    assert one.seconds["FP32 lanes"] == pytest.approx(three.seconds["FP32 lanes"])


def test_l2_has_a_time_where_nvidia_publishes_its_bandwidth(observed):
    launch = observed(TWICE)
    assert launch.limits("A100", registers=32).seconds["L2"] == pytest.approx(256 / 5120 / 1.41e9)
    assert "does not publish" in launch.limits("H100", registers=32).not_counted["L2"]


def test_written_bytes_count_only_beyond_the_l2(observed):
    work = observed(BACK).work._replace(dram_written_bytes=(50 << 20) + 3352)
    assert times(work, GPUS["H100"])[0]["DRAM"] == pytest.approx(1e-9)


@pytest.mark.parametrize(
    ("text", "needs"),
    [
        ("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1}, %rd1, %rd2, p, 1, 1, 0, 0",
         {("tensor", "bf16", "f32"): 2 * 64 * 128 * 16 // 4}),  # the four warps share one product
        ("wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32 {%f1}, {%r1}, {%r2}, {%f1}",
         {("tensor", "f16", "f32"): 8192}),
        ("wmma.mma.sync.aligned.row.col.m16n16k16.f32.bf16.bf16.f32 {%f1}, {%r1}, {%r2}, {%f1}",
         {("tensor", "bf16", "f32"): 8192}),
        ("mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.u8.s32 {%r1}, {%r2}, {%r3}, {%r4}",
         {("tensor", "s8", "s32"): 8192}),
        ("add.f64 %fd1, %fd2, %fd3", {}),
        ("add.rn.ftz.f32 %f1, %f2, %f3", {"fma": 1}),
        ("sub.f32 %f1, %f2, %f3", {"sum": 1}),
        ("rcp.approx.f32 %f1, 0f40000000", {}),
        ("rsqrt.approx.f64 %fd1, %fd2", {}),
        ("tanh.approx.f16x2 a, b", {"special": 1}),
        ("div.rn.f32 %f1, %f3, %f2", {}),
        ("ld.param.u64 %rd1, [x]", {}),
        ("ld.local.b32 %r1, [%rd1]", {}),
        ("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [%r5]", {"moves": 1}),
        ("@%p1 red.global.add.f32 [%rd1], %f1", {"moves": 1}),
        ("cp.async.cg.shared.global [%r1], [%rd1], 16", {"moves": 1}),
        ("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 1024, [%r3]", {}),
        ("cp.async.wait_group 0", {}),
        ("fma.rn.f32x2 %rd1, %rd2, %rd3, %rd4", {"fma": 2}),
        ("add.f32x2 %rd1, %rd2, %rd3", {"sum": 2}),
        ("$L1:", {}),
    ],
)  # fmt: skip
def test_cost_of_one_instruction(text, needs):
    assert cost(text) == needs


@pytest.mark.slow
def test_only_the_observed_build_counts(units, observed):
    observed(FUSED)
    module = read_module(UNITS)
    assert "simt_executed" not in entry_source(module, module.entries["units"], "units.ptx", {})
    assert units.executable.source.text == entry_source(module, module.entries["units"], units.filename, {})
    with check():
        units[1, 32](aligned(128), aligned(128), FUSED, 1)
    (kernel,) = units._kernels.values()
    assert kernel.executable.build(Mode.PLAIN) is units.executable.library(False)
    assert kernel.executable.build(Mode.CHECK) is units.executable.library(True)
    assert kernel.executable.build(Mode.OBSERVE) is units.executable.ptx.counted()[0]


def test_a_bulk_copy_needs_the_time_of_its_bytes():
    x, y = aligned(256), aligned(256)
    with observe() as report:
        PtxKernel(HEADER + BULK)[1, 64](x, y)
    work = report.launches[0].work
    assert work.wavefronts == 1024 // 128 + 2 * 4  # the copy, and two warps that load 16 bytes per lane
    assert (work.moves, work.l2_bytes, work.dram_read_bytes) == (4, 2048, 1024)


def test_a_bulk_copy_is_one_request_of_one_lane_that_moves_its_sectors_once():
    x, y = aligned(256), aligned(256)
    with observe() as report:
        PtxKernel(HEADER + BULK)[1, 64](x, y)
    read, written = report.count("read", "global"), report.count("write", "shared")
    assert (read.requests, read.lanes, read.bytes, read.sectors) == (1, 1, 1024, 32)
    assert (written.requests, written.lanes, written.bank_conflicts) == (2, 2, 0)  # one of them begins the mbarrier
    assert written.bytes == 1024 + 8
    with observe() as report:
        PtxKernel(HEADER + BULK_STORE)[1, 64](x, y)
    read, written = report.count("read", "shared"), report.count("write", "global")
    assert (written.requests, written.lanes, written.bytes, written.sectors) == (1, 1, 1024, 32)
    assert (read.requests, read.lanes, read.bytes, read.bank_conflicts) == (1, 1, 1024, 0)


@pytest.mark.slow
def test_the_tiles_of_tensor_descriptors_move_their_sectors_once():
    with observe() as report, triton_compiled("sm_90"):
        product(in_warps=False, M=64)
    written = max((c for c in report.launches[0].lines if c.access == "write"), key=lambda c: c.sectors)
    tiles, words = 7 + 7, 14  # of A [64, 208] and of B [208, 64], the last tiles half outside; of a tensor map
    assert report.count("read", "global").sectors == (64 * 208 + 208 * 64) * 2 // 32 + (tiles + 1) * words
    assert (written.requests, written.bytes, written.sectors) == (1, 2 * 64 * 64, 2 * 64 * 64 // 32)


def test_the_lines_of_the_counts_are_those_of_the_ptx(observed):
    (line,) = {each.line for each in observed(SHARED, 1).lines}
    assert UNITS.split("\n")[line - 1].strip().startswith("st.shared")


@triton.jit
def product_kernel(a, b, out, STEPS: tl.constexpr):
    row, col = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    acc = tl.zeros([16, 16], tl.float32)
    for step in range(STEPS):
        x = tl.load(a + row * 16 * STEPS + step * 16 + col)
        y = tl.load(b + (step * 16 + row) * 16 + col)
        acc = tl.dot(x, y, acc)
    tl.store(out + row * 16 + col, tl.exp2(acc))


@pytest.mark.slow
def test_a_triton_kernel_has_the_limits_of_its_arithmetic_and_its_tensors():
    a, b = torch.randn(16, 48, dtype=torch.float16), torch.randn(48, 16, dtype=torch.float16)
    out = torch.empty(16, 16)
    with observe() as report, triton_compiled("sm_80"):
        product_kernel[(1,)](a, b, out, STEPS=3, num_warps=1)
    work, limits = report.launches[0].work, report.limits("A100")
    assert work.tensor_flops == {("f16", "f32"): 2 * 16 * 16 * 48}
    assert work.special == 256
    assert (work.dram_read_bytes, work.dram_written_bytes) == (2 * 2 * 16 * 48, 4 * 256)
    assert limits.occupancy.registers > 16
    assert limits.occupancy.warps == limits.occupancy.thread_blocks
    assert not limits.not_counted


def test_a_cuda_kernel_has_limits_of_memory_alone():
    kernel = CudaKernel(
        "__global__ void swap(float* x) { __shared__ float s[64]; s[threadIdx.x] = x[threadIdx.x];"
        " __syncthreads(); x[threadIdx.x] = s[63 - threadIdx.x]; }",
        "swap",
    )
    with observe() as report:
        kernel[1, 64](aligned(64))
    limits = report.limits("H200", registers=20)
    assert report.launches[0].work[1:] == (None, None, None, None, 8, 4, 512, 256, 256)
    assert list(limits.seconds) == ["load/store", "shared memory", "DRAM"]
    assert list(limits.not_counted) == ["tensor cores", "FP32 lanes", "special functions", "issue slots", "L2"]
    assert "registers=" in str(report.limits("H200"))
    assert "special functions not counted: the kernel was executed as C++" in str(limits)


@pytest.mark.parametrize(
    ("gpu", "options", "message"),
    [
        ("GTX 1080", {}, "gpu must be one of T4, A100 40 GB, A100, .*, RTX 5090, got 'GTX 1080'"),
        ("H100", {"registers": 0}, "registers must be a positive int, got 0"),
    ],
)
def test_bad_arguments_are_refused(observed, gpu, options, message):
    with pytest.raises(ValueError, match=message):
        observed(FUSED).limits(gpu, **options)


def test_a_type_that_the_tensor_cores_lack_is_refused(observed):
    with pytest.raises(ValueError, match="gpu T4 has no tensor cores for bf16"):
        times(observed(TENSOR).work._replace(tensor_flops={("bf16", "f32"): 4096}), GPUS["T4"])


def test_a_report_of_several_launches_has_no_limits_of_its_own(units):
    with observe() as report:
        for _ in range(2):
            units[1, 32](aligned(128), aligned(128), FUSED, 1)
    with pytest.raises(ValueError, match="got 2: use report"):
        report.limits()


def test_the_table_names_the_largest_unit_and_says_that_it_is_a_lower_bound(observed):
    shown = str(observed(SPECIAL, 100).limits("A100", registers=168))
    assert "units takes at least 284 ns on one A100. This lower bound is set by: special functions." in shown
    assert "special functions 6,400 results" in shown
    assert "9 of 64 warps per SM, 9 thread blocks with 168 registers per thread and 16,384 bytes" in shown


@pytest.mark.parametrize(
    ("gpu", "threads", "registers", "shared", "blocks", "limited_by"),
    [
        ("H100", 128, 32, 0, 16, "threads"),
        ("H100", 128, 168, 0, 3, "registers"),  # 21 504 registers each, of 65 536
        ("H100", 128, 33, 0, 12, "registers"),  # 33 registers of 32 lanes take 1 280, not 1 056
        ("H100", 128, 32, 232448 - 1024, 1, "shared memory"),
        ("H100", 32, 16, 0, 32, "thread blocks"),
        ("A100", 256, 64, 16 << 10, 4, "registers"),
        ("H100", 64, 192, 0, 4, "registers"),  # each quarter of an SM has registers for 2 warps, not for 2.7
        ("T4", 1024, 32, 0, 1, "threads"),
        ("T4", 64, 32, 64 << 10, 1, "shared memory"),  # no kilobyte is reserved before Ampere
        ("T4", 64, 32, 65 << 10, 0, "shared memory"),
    ],
)
def test_thread_blocks_on_an_sm(gpu, threads, registers, shared, blocks, limited_by):
    fits = thread_blocks_per_sm(GPUS[gpu], threads, registers, shared)
    assert min(fits.values()) == fits[limited_by] == blocks


def test_the_rates_of_the_table_give_the_peaks_of_the_data_sheets():
    clocks = {  # that the data sheets have in mind
        "T4": 1.59e9, "A100 40 GB": 1.41e9, "A100": 1.41e9, "RTX A6000": 1.8e9, "RTX A5000": 1.695e9,
        "RTX 3090": 1.695e9, "RTX 4090": 2.52e9, "L20": 2.537e9, "L4": 2.04e9, "H100": 1.83e9, "H20": 1.853e9,
        "H200": 1.83e9, "GB200": 2.062e9, "B200": 1.856e9, "RTX 5090": 2.407e9,
    }  # fmt: skip
    assert clocks.keys() == GPUS.keys()
    for name, gpu in GPUS.items():
        peak = gpu.num_sms * gpu.tensor_rate("f16", "f16") * clocks[name]
        assert peak == pytest.approx(gpu.stated_flops, rel=0.003), name
        assert gpu.clock >= clocks[name]
        assert gpu.dram_bandwidth == pytest.approx(gpu.stated_bandwidth, rel=0.03)
        assert gpu.dram_bandwidth >= gpu.stated_bandwidth
    assert 2 * GPUS["H100"].fp32_lanes * 132 * GPUS["H100"].clock == pytest.approx(66.9e12, rel=0.001)
    assert GPUS["RTX 4090"].tensor_rate("f16", "f32") == 512
    assert GPUS["RTX 4090"].tensor_rate("e5m2", "f32") == 1024


def test_ptxas_tells_the_registers_and_none_if_it_does_not_compile(units):
    ptx = PtxText(UNITS, "units", "sm_80")
    assert 8 < registers_of(ptx, 80) < 64
    assert resources_of(ptx, 80).spilled_bytes == 0
    assert registers_of(ptx, 75) == registers_of(ptx, 80)  # compiled for sm_80, which sm_75 cannot run
    assert registers_of(ptx._replace(text=UNITS.replace("ret;", "nonsense;")), 80) is None


@pytest.mark.slow
def test_a_cuda_kernel_through_ptx_counts_instructions_in_the_functions_that_it_calls():
    source = """
    __device__ __noinline__ float often(float x, int n) {
        for (int i = 0; i < n; i++) x = fmaf(x, x, 1.0f);
        return x;
    }
    __global__ void k(float* x, int n) {
        float y = fmaf(x[threadIdx.x], 2.0f, 3.0f);
        x[threadIdx.x] = fmaf(often(y, n), 4.0f, 5.0f);
    }
    """
    for n in (10, 30):
        with observe() as report:
            CudaKernel(source, "k", through="ptx")[1, 64](torch.zeros(64), n)
        assert report.limits("A100").seconds["FP32 lanes"] == pytest.approx((2 + n) * 64 / 64 / 1.41e9)  # on one SM
