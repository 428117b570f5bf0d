"""`report.instructions` and `loops()`: the counts are those worked out by hand from the PTX."""

import pytest
import torch
import triton
import triton.language as tl
from test_limits import aligned

from cudascope import CudaKernel, PtxKernel, observe, triton_compiled
from cudascope.toolchain import sass
from cudascope.toolchain.flow import Loop, loops_of
from cudascope.translate.ptx import counters
from cudascope.watch.instructions import class_of

# One entry for all cases, for each entry is a build. `mode` chooses what runs after 12 instructions that always run.
CASES = """
.version 8.4
.target sm_80
.address_size 64
.func often(.param .b32 turns)
{
    .reg .pred %p<2>;
    .reg .b32 %r<3>;
    .reg .f32 %f<2>;
    ld.param.u32 %r1, [turns];
    mov.u32 %r2, 0;
AGAIN:
    fma.rn.f32 %f1, %f1, %f1, %f1;
    add.u32 %r2, %r2, 1;
    setp.lt.u32 %p1, %r2, %r1;
    @%p1 bra AGAIN;
    ret;
}
.visible .entry cases(.param .u64 x, .param .u32 mode)
{
    .reg .pred %p<6>;
    .reg .b32 %r<12>;
    .reg .f32 %f<4>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [x];
    ld.param.u32 %r1, [mode];
    mov.u32 %r3, %tid.x;
    mov.u32 %r4, %laneid;
    mov.u32 %r5, 0;
    mul.wide.u32 %rd2, %r3, 16;
    add.s64 %rd3, %rd1, %rd2;
    setp.lt.u32 %p1, %r4, 16;
    setp.lt.u32 %p2, %r3, 32;
    setp.gt.u32 %p3, %r3, 1000;
    and.b32 %r7, %r4, 1;
CHOICES: .branchtargets NOTHING, PREDICATED, SIDES, TURNS, NESTED, VECTORS, CALLS, TWO_WAYS_IN, BRACES, LONG;
    brx.idx %r1, CHOICES;
NOTHING:
    ret;
PREDICATED:
    @%p1 fma.rn.f32 %f1, %f1, %f1, %f1;
    @%p2 ex2.approx.ftz.f32 %f2, %f2;
    @!%p3 lg2.approx.f32 %f3, %f3;
    @%p3 st.global.b32 [%rd3], %r3;
    ret;
SIDES:
    @%p1 bra LOW;
    fma.rn.f32 %f1, %f1, %f1, %f1;
    fma.rn.f32 %f1, %f1, %f1, %f1;
    bra JOIN;
LOW:
    fma.rn.f32 %f1, %f1, %f1, %f1;
JOIN:
    ex2.approx.ftz.f32 %f2, %f2;
    ret;
TURNS:
    setp.ne.u32 %p4, %r5, %r4;
    @%p4 bra SKIP;
    fma.rn.f32 %f1, %f1, %f1, %f1;
SKIP:
    add.u32 %r5, %r5, 1;
    setp.lt.u32 %p5, %r5, 32;
    @%p5 bra TURNS;
    ret;
NESTED:
    add.u32 %r6, %r5, %r7;
    and.b32 %r6, %r6, 1;
INNER:
    fma.rn.f32 %f1, %f1, %f1, %f1;
    sub.u32 %r6, %r6, 1;
    setp.eq.u32 %p4, %r6, 0;
    @%p4 bra INNER;
    add.u32 %r5, %r5, 1;
    setp.lt.u32 %p5, %r5, 4;
    @%p5 bra NESTED;
    ret;
VECTORS:
    ld.global.v4.b32 {%r8, %r9, %r10, %r11}, [%rd3];
    st.global.v2.b32 [%rd3], {%r8, %r9};
    ret;
CALLS:
    { .param .b32 turns; st.param.b32 [turns], 2; @%p1 bra HERE;
    call often, (turns);
    bra THERE;
HERE:
    call often, (turns);
THERE:
    call often, (turns);
    }
    ret;
TWO_WAYS_IN:
    @%p1 bra MIDDLE;
TOP:
    fma.rn.f32 %f1, %f1, %f1, %f1;
MIDDLE:
    ex2.approx.ftz.f32 %f2, %f2;
    add.u32 %r5, %r5, 1;
    setp.lt.u32 %p5, %r5, 3;
    @%p5 bra TOP;
    ret;
BRACES:
    { .reg .pred %q; WAIT: add.u32 %r5, %r5, 1; setp.lt.u32 %q, %r5, 3; @%q bra.uni WAIT; }
    { .reg .pred %q; WAIT: add.u32 %r5, %r5, 1; setp.lt.u32 %q, %r5, 8; @%q bra.uni WAIT; }
    ret;
LONG:
    setp.ne.u32 %p4, %r4, 0;
    @%p4 ret;
FAR:
    add.u32 %r5, %r5, 1;
    setp.lt.u32 %p5, %r5, 1100000;
    @%p5 bra FAR;
    ret;
}
"""
NOTHING, PREDICATED, SIDES, TURNS, NESTED, VECTORS, CALLS, TWO_WAYS_IN, BRACES, LONG = range(10)
ALWAYS = 12
FMA, EX2 = "fma.rn.f32", "ex2.approx.ftz.f32"


def executed(kernel, mode, threads=32, grid=1):
    with observe(trace_limit=0) as report:
        kernel[grid, threads](aligned(4 * threads), mode)
    return report.instructions


@pytest.fixture(scope="module")
def cases():
    return PtxKernel(CASES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "total", "some"),
    [
        (NOTHING, 1, {}),
        (PREDICATED, 5, {FMA: 1, EX2: 1, "st.global.b32": 1}),
        (SIDES, 7, {FMA: 3, EX2: 1, "bra": 2}),  # both sides, and together again behind them
        (TURNS, 32 * 5 + 32 + 1, {FMA: 32, "bra": 64}),  # each lane in a turn of its own
        (NESTED, 4 * (2 + 2 * 4 + 3) + 1, {FMA: 8}),  # lanes make one or two inner turns, 6 in all
        (VECTORS, 3, {"ld.global.v4.b32": 1, "st.global.v2.b32": 1}),
        (CALLS, 7 + 3 * (2 + 2 * 4 + 1), {FMA: 6, "call": 3, "st.param.b32": 1}),
        (TWO_WAYS_IN, 1 + 5 + 6 * 4 + 1, {FMA: 5, EX2: 6}),  # who came in elsewhere is never in the same turn
        (BRACES, 3 * 3 + 3 * 5 + 1, {"bra.uni": 8}),  # each of the two labels belongs to its braces
    ],
)
def test_instructions_are_those_counted_by_hand(cases, mode, total, some):
    found = executed(cases, mode)
    assert found.total == ALWAYS + total
    assert {name: found[name] for name in some} == some


def test_a_warp_issues_once_for_all_its_lanes_and_each_warp_of_each_thread_block_does(cases):
    one = executed(cases, SIDES)
    assert {name: 6 * number for name, number in one.items()} == executed(
        cases, SIDES, threads=84, grid=2
    )  # the last warp has 20 lanes


def test_predicated_off_is_what_no_lane_of_a_warp_executes(cases):
    assert executed(cases, PREDICATED).predicated_off == {"st.global.b32": 1}
    two_warps = executed(cases, PREDICATED, threads=64)  # the second warp has no thread below 32
    assert two_warps.predicated_off == {"st.global.b32": 2, EX2: 1}
    assert two_warps[EX2] == two_warps[FMA] == 2
    assert executed(cases, TURNS).predicated_off == {}  # a branch that is not taken is executed


@pytest.mark.slow
def test_a_loop_of_one_lane_that_is_too_long_to_compare_is_refused(cases):
    with pytest.raises(ValueError, match="kernel cases: one lane of a warp made a million turns"):
        executed(cases, LONG, threads=2)


def test_classes_add_up_to_the_total(cases):
    found = executed(cases, VECTORS)
    assert found.classes == {
        "integer": 6, "move": 3, "global load": 1, "global store": 1, "parameter": 2, "control": 2,
    }  # fmt: skip
    assert sum(found.classes.values()) == found.total == len(list(found)) + 3
    assert str(found).startswith("15 PTX instructions, as issued by a warp; 0 of them predicated off")


def test_a_report_adds_its_launches_up(cases):
    with observe() as report:
        for mode in (SIDES, PREDICATED):
            cases[1, 64](aligned(256), mode)
    first, second = (launch.instructions for launch in report.launches)
    assert report.instructions.total == first.total + second.total
    assert report.instructions[FMA] == first[FMA] + second[FMA]
    assert report.instructions.predicated_off == second.predicated_off


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("add.s64", "integer"), ("setp.lt.s32", "integer"), ("selp.b32", "integer"), ("and.pred", "integer"),
        ("mad.wide.s32", "integer"), ("selp.f32", "fp32"), ("setp.gtu.f32", "fp32"), ("max.f32", "fp32"),
        ("fma.rn.bf16x2", "fp16"), ("add.f64", "fp64"), ("rcp.approx.ftz.f32", "special"), ("rsqrt.approx.f64", "fp64"),
        ("ex2.approx.ftz.bf16x2", "special"), ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "product"),
        ("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16", "product"), ("wgmma.wait_group.sync.aligned", "barrier"),
        ("cvt.rn.f16x2.f32", "convert"), ("cvt.rzi.ftz.s32.f32", "convert"), ("cvt.u64.u32", "integer"),
        ("cvt.rn.satfinite.e4m3x2.f32", "convert"), ("cvt.rn.bf16.f32", "convert"), ("mov.b64", "move"),
        ("cvta.to.global.u64", "move"),
        ("ld.global.v4.b32", "global load"), ("ld.b32", "global load"), ("ld.shared.b32", "shared load"),
        ("ld.volatile.shared::cta.b32", "shared load"), ("st.shared.v4.b32", "shared store"),
        ("ldmatrix.sync.aligned.m8n8.x4.shared.b16", "shared load"), ("ld.param.u64", "parameter"),
        ("ld.const.f32", "constant"), ("st.local.f32", "local"), ("red.global.add.f32", "atomic"),
        ("cp.async.cg.shared.global", "global load"), ("cp.async.wait_group", "barrier"),
        ("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes", "global load"),
        ("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group", "global store"),
        ("cp.async.bulk.commit_group", "barrier"), ("mbarrier.try_wait.parity.shared::cta.b64", "barrier"),
        ("wmma.load.a.sync.aligned.row.m16n16k16.shared.f16", "shared load"), ("bar.sync", "barrier"),
        ("shfl.sync.bfly.b32", "shuffle"), ("redux.sync.max.s32", "shuffle"), ("bra.uni", "control"),
        ("ret", "control"),
    ],
)  # fmt: skip
def test_class_of_an_instruction(name, known):
    assert class_of(name) == known


# ------------------------------------------------------------------------------------------------ mutants


def per_lane(monkeypatch):
    monkeypatch.setattr(counters, "_FIRST", f"{counters._FIRST} ^ simt_lane() << 20")
    monkeypatch.setattr(counters, "DECLARED", f'{counters.DECLARED}\nextern "C" unsigned simt_lane();')


def without_predicated(monkeypatch):
    def before(self, position, statement, predicate):
        code = real(self, position, statement, predicate)
        if predicate:
            self._region.issued.popitem()
        return code

    real = counters.Counters.before
    monkeypatch.setattr(counters.Counters, "before", before)


def doubled(monkeypatch):
    def before(self, position, statement, predicate):
        code = real(self, position, statement, predicate)
        self._region.issued.update(counters.Counter([counters.INSTRUCTION.fullmatch(statement.text)[3]]))
        return code

    real = counters.Counters.before
    monkeypatch.setattr(counters.Counters, "before", before)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [per_lane, without_predicated, doubled])
def test_the_counts_tell_a_wrong_counter(monkeypatch, mutant):
    mutant(monkeypatch)
    assert executed(PtxKernel(CASES), PREDICATED).total != ALWAYS + 5


# ------------------------------------------------------------------------------------------------ kernels of each kind

SCALE = "__global__ void scale(float* x) { if (threadIdx.x < 40) x[threadIdx.x] = x[threadIdx.x] * 2.0f + 1.0f; }"


@pytest.mark.slow
def test_a_cuda_kernel_counts_through_ptx():
    with observe() as report:
        CudaKernel(SCALE, "scale", through="ptx")[1, 64](torch.zeros(64))
    found = report.instructions
    assert (found[FMA], found.classes["global load"], found.classes["global store"]) == (2, 2, 2)


def test_a_cuda_kernel_as_cpp_has_no_instructions_and_says_so():
    with observe() as report:
        CudaKernel(SCALE, "scale")[1, 64](torch.zeros(64))
    for has_none in (report, report.launches[0]):
        with pytest.raises(ValueError, match=r'kernel scale was executed as C\+\+.*through="ptx"'):
            _ = has_none.instructions
    with pytest.raises(ValueError, match="ask the CudaKernel itself"):
        report.launches[0].loops()


def test_a_report_without_a_launch_has_no_instructions():
    with observe() as report:
        pass
    with pytest.raises(ValueError, match="need a report of observed launches"):
        _ = report.instructions


@triton.jit
def product_kernel(a, b, out, steps, ROWS: tl.constexpr):
    row, col, k = tl.arange(0, ROWS)[:, None], tl.arange(0, 16)[None, :], tl.arange(0, 16)
    acc = tl.zeros([ROWS, 16], tl.float32)
    for step in range(steps):
        x = tl.load(a + row * 16 * steps + step * 16 + k[None, :])
        y = tl.load(b + (step * 16 + k[:, None]) * 16 + col)
        acc = tl.dot(x, y, acc)
    tl.store(out + row * 16 + col, acc)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "rows", "warps", "product", "per_step"),
    [("sm_80", 16, 1, "HMMA.16816.F32", 2), ("sm_90", 64, 4, "HGMMA.64x16x16.F32", 1)],  # 16 or 64 × 16 × 16 a step
)
def test_a_triton_kernel_has_its_products_in_its_instructions_and_in_its_loop(arch, rows, warps, product, per_step):
    steps = 5
    a, b = torch.randn(rows, 16 * steps).half(), torch.randn(16 * steps, 16).half()
    out = torch.empty(rows, 16)
    with observe(trace_limit=0) as report, triton_compiled(arch):
        product_kernel[(1,)](a, b, out, steps, ROWS=rows, num_warps=warps, num_stages=2)
    launch = report.launches[0]
    assert launch.instructions.classes["product"] == per_step * steps * warps
    (loop,) = (each for each in launch.loops() if "product" in each.classes)
    assert loop.is_innermost
    assert loop.opcodes[product] == loop.classes["product"] == per_step
    assert sum(loop.classes.values()) == sum(loop.opcodes.values()) == loop.total
    assert launch.loops() == launch.loops(arch)


# ------------------------------------------------------------------------------------------------ loops


@pytest.mark.parametrize(
    ("successors", "loops"),
    [
        ([[1], []], []),
        ([[0]], [({0}, {0})]),
        ([[1], [2], [3, 1], [1, 4], []], [({1, 2, 3}, {1})]),  # two ways back to one header
        ([[1], [2], [2, 3], [1, 4], []], [({1, 2, 3}, {1}), ({2}, {2})]),  # one inside the other
        ([[1, 2], [2], [1, 3], []], [({1, 2}, {1, 2})]),  # entered at two places
        ([[1], [], [2]], []),  # never reached
    ],
)
def test_loops_of_a_graph(successors, loops):
    assert loops_of(successors) == [Loop(frozenset(nodes), frozenset(headers)) for nodes, headers in loops]


LOOPS = """
.version 8.4
.target sm_80
.address_size 64
.visible .entry loops(.param .u64 x, .param .u32 n)
{
    .reg .pred %p<3>;
    .reg .b32 %r<4>;
    .reg .f32 %f<4>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [x];
    ld.param.u32 %r1, [n];
    mov.u32 %r2, 0;
OUTER:
    ld.global.f32 %f1, [%rd1];
    mov.u32 %r3, 0;
INNER:
    ex2.approx.ftz.f32 %f1, %f1;
    st.volatile.global.f32 [%rd1], %f1;
    add.u32 %r3, %r3, 1;
    setp.lt.u32 %p1, %r3, %r1;
    @%p1 bra INNER;
    add.u32 %r2, %r2, 1;
    setp.lt.u32 %p2, %r2, %r1;
    @%p2 bra OUTER;
    ret;
}
"""


@pytest.fixture(scope="module")
def looping():
    return PtxKernel(LOOPS)


def test_an_outer_loop_has_the_instructions_of_its_inner_loop(looping):
    outer, inner = looping.loops()
    assert (outer.is_innermost, inner.is_innermost) == (False, True)
    assert outer.classes["global load"] == 1
    assert "global load" not in inner.classes
    assert outer.classes["special"] >= inner.classes["special"] == inner.classes["global store"] >= 1
    assert outer.total > inner.total


@pytest.mark.slow
def test_loops_are_those_of_the_gpu_that_is_asked_for(looping):
    assert len(looping.loops("sm_90")) == len(looping.loops("sm_80")) == 2
    with pytest.raises(ValueError, match="its PTX is for sm_80, so arch cannot be 'sm_75'"):
        looping.loops("sm_75")
    with pytest.raises(ValueError, match='arch must be a string such as "sm_90"'):
        looping.loops("A100")
    special = PtxKernel(LOOPS.replace("sm_80", "sm_90a"))
    assert special.loops() == special.loops("sm_90")
    with pytest.raises(ValueError, match="its PTX is for sm_90a, so arch cannot be 'sm_100'"):
        special.loops("sm_100")


@pytest.mark.slow
def test_a_cuda_kernel_has_loops():
    source = "__global__ void k(float* x, int n) { for (int i = 0; i < n; i++) x[i] = __expf(x[i]); }"
    (loop,) = (each for each in CudaKernel(source, "k").loops("sm_90") if each.classes["special"] == 1)
    assert loop.classes["global load"] == loop.classes["global store"] == 1


def test_without_nvdisasm_the_remedy_is_named(looping, monkeypatch):
    monkeypatch.setattr(sass, "tool_of_triton", lambda name: None)
    monkeypatch.setattr(sass.shutil, "which", lambda name: None)
    sass.loops_of_ptx.cache_clear()
    sass.loops_of_cubin.cache_clear()
    with pytest.raises(RuntimeError, match="needs nvdisasm, which is not here: pip install triton"):
        looping.loops()


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("IMAD.WIDE.U32", "integer"), ("IMAD.MOV.U32", "move"), ("MOV", "move"), ("MUFU.EX2", "special"),
        ("FFMA", "fp32"), ("FSETP.GEU.AND", "fp32"), ("HMMA.16816.F32", "product"), ("HADD2.F32", "fp16"),
        ("F2FP.F16.F32.PACK_AB", "convert"), ("LDGSTS.E.BYPASS.128", "global load"), ("LDG.E.128", "global load"),
        ("UTMALDG.2D", "global load"), ("LDSM.16.MT88.4", "shared load"), ("STS.128", "shared store"), ("LDL", "local"),
        ("LDGDEPBAR", "barrier"), ("SYNCS.PHASECHK.TRANS64.TRYWAIT", "barrier"), ("BAR.SYNC.DEFER_BLOCKING", "barrier"),
        ("LDC.64", "constant"), ("SHFL.BFLY", "shuffle"), ("BRA.U", "control"), ("DADD", "fp64"), ("LOP3", "integer"),
        ("REDG.E.ADD.F32.FTZ.RN.STRONG.GPU", "atomic"), ("REDUX.SUM", "shuffle"), ("ISETP.GE.AND", "integer"),
    ],
)  # fmt: skip
def test_class_of_machine_code(name, known):
    assert sass.class_of(name) == known
