"""PTX as people write it: several instructions on a line, places in messages, and what is refused."""

import re

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from cudascope import Finding, PtxKernel, check, observe, triton_compiled
from cudascope.ptx.module import PtxError, places_of

HEADER = ".version 8.6\n.target sm_90a\n.address_size 64\n"

# Line 6 has the store of a race, line 7 has the load. Nothing follows but the end.
ON_FEW_LINES = f"""{HEADER}.visible .entry k(.param .u64 y) {{
.reg .b32 %r<9>; .reg .b64 %rd<3>; .shared .align 4 .b8 row[256]; ld.param.u64 %rd1, [y]; mov.u32 %r1, %tid.x;
shl.b32 %r2, %r1, 2; mov.u32 %r3, row; add.s32 %r4, %r3, %r2; sub.s32 %r5, 252, %r2; st.shared.b32 [%r4], %r1;
add.s32 %r5, %r5, %r3; ld.shared.b32 %r6, [%r5]; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd1, %rd1, %rd2;
st.global.b32 [%rd1], %r6; ret; }}"""


def test_a_finding_names_the_line_that_several_instructions_share():
    with check(stop=False) as report:
        PtxKernel(ON_FEW_LINES)[1, 64](np.zeros(64, np.int32))
    (race,) = report.findings
    assert (race.rule, {race.line, race.other_line}) == ("race", {6, 7})
    assert re.search(r"`(shl|add).*(st|ld)\.shared", str(race))


def test_a_finding_near_the_end_of_the_text_has_its_line():
    y = np.zeros(32, np.int32)
    with check(ignore=("race",)), pytest.raises(Finding, match=r"line 8.*y\[32\], past its end") as found:
        PtxKernel(ON_FEW_LINES)[1, 64](y)
    assert found.value.line == 8


def test_counts_belong_to_the_line_that_several_instructions_share():
    with observe() as report:
        PtxKernel(ON_FEW_LINES)[1, 64](np.zeros(64, np.int32))
    assert {line.line for line in report.launches[0].lines} == {6, 7, 8}
    assert report.count("write", "global", 8).bytes == 256
    assert report.count("read", "shared", 7).bytes == 256


@pytest.mark.slow
@pytest.mark.parametrize("instructions", [1, 3, 40])
def test_all_on_one_line(instructions):
    filler = "add.s32 %r1, %r1, 1; " * instructions
    source = (
        f"{HEADER}.visible .entry k(.param .u64 y) {{ .reg .b32 %r<3>; .reg .b64 %rd<2>; ld.param.u64 %rd1, [y]; "
        f"mov.u32 %r1, 0; {filler}st.global.b32 [%rd1], %r1; st.global.b32 [%rd1+4], %r1; ret; }}"
    )
    y = np.zeros(2, np.int32)
    with observe() as report:
        PtxKernel(source)[1, 1](y)
    assert y.tolist() == [instructions] * 2
    assert report.count("write", "global", 4).bytes == 8
    with check(), pytest.raises(Finding) as found:
        PtxKernel(source)[1, 1](y[:1].copy())
    assert found.value.line == 4


def test_a_device_function_on_one_line():
    source = (
        f"{HEADER}.func store(.param .b64 p) {{ .reg .b64 %rd<2>; ld.param.b64 %rd1, [p]; st.global.b32 [%rd1+4], 7; "
        "st.global.b32 [%rd1], 7; ret; }\n.visible .entry k(.param .u64 y) {\n.reg .b64 %rd<2>; "
        "ld.param.u64 %rd1, [y];\n{ .param .b64 passed; st.param.b64 [passed], %rd1; call.uni store, (passed); } ret; }"
    )
    with check(), pytest.raises(Finding, match=r"y\[1\]") as found:
        PtxKernel(source)[1, 1](np.zeros(1, np.int32))
    assert found.value.line == 4


def test_a_stuck_mbarrier_has_its_name_and_line():
    source = f"""{HEADER}.visible .entry k() {{
.reg .b32 %r<2>; .reg .pred %p<2>; .shared .align 8 .b8 bar[8]; mov.u32 %r1, bar;
mbarrier.init.shared::cta.b64 [%r1], 2; mbarrier.arrive.shared::cta.b64 _, [%r1];
W: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], 0; @!%p1 bra W; ret; }}"""
    with pytest.raises(Finding, match="in line 7 in an mbarrier") as found:
        PtxKernel(source)[1, 1]()
    assert found.value.what == "deadlock"


# ------------------------------------------------------------------------------------------------ places in a source


def test_an_instruction_after_a_label_or_a_directive_has_a_place():
    rows = [
        '.file 1 "k.py"', "{", ".loc 1 7 3", ".reg .b32 t; add.s32 t, t, 1;", "$L_1: add.s32 t, t, 1;", "$L_2:",
        ".reg .b32 u;", "} add.s32 t, t, 1;", "// add", "{ add.s32 t, t, 1; // more", ".pragma \"nounroll\";", "ret;",
    ]  # fmt: skip
    assert set(places_of("\n".join(rows[:7] + rows[8:]))) == {4, 5, 9, 11}


@triton.jit
def shared_line_kernel(x, y, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    value = tl.load(x + i)
    address = (x + i).to(tl.int64)
    value += tl.inline_asm_elementwise(
        ".reg .pred p; .reg .b32 t; setp.ne.s64 p, $1, 0; @p ld.global.b32 t, [$1+128]; mov.b32 $0, t;",
        "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.store(y + i, value)


@pytest.mark.slow
def test_inline_assembly_on_one_line_is_found_at_its_line_of_python():
    x, y = torch.arange(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    with triton_compiled("sm_80"), check(stop=False) as report:
        shared_line_kernel[(1,)](x, y, SIZE=32, num_warps=1)
    (found,) = report.findings
    call = shared_line_kernel.fn.__code__.co_firstlineno + 5
    assert found.rule == "out of bounds"
    assert call <= found.line <= call + 2  # Triton takes a line of the call
    assert found.file == __file__


# ------------------------------------------------------------------------------------------------ refusals


@triton.jit
def unknown_kernel(y, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    value = tl.inline_asm_elementwise("szext.wrap.s32 $0, $1, 8;", "=r,r", [i], dtype=tl.int32, is_pure=True, pack=1)
    tl.store(y + i, value)


@pytest.mark.slow
def test_a_refused_kernel_is_named_with_the_line_of_python():
    line = unknown_kernel.fn.__code__.co_firstlineno + 3
    sentence = rf"kernel unknown_kernel, {re.escape(__file__)}, line {line} .*: the CPU runner does not know szext"
    with triton_compiled("sm_80"), pytest.raises(PtxError, match=sentence):
        unknown_kernel[(1,)](torch.zeros(32, dtype=torch.int32), SIZE=32, num_warps=1)


ENTRY = """.visible .entry k(.param .u64 y){attributes}
{{
    .reg .b16 %h<4>; .reg .b32 %r<4>; .reg .b64 %rd<4>; .reg .b128 %q<4>;
    ld.param.u64 %rd1, [y];
    {instruction}
    ret;
}}
"""


@pytest.mark.parametrize(
    "instruction",
    [
        "atom.global.cas.b128 %q1, [%rd1], %q2, %q3;", "atom.global.exch.b128 %q1, [%rd1], %q2;",
        "ld.relaxed.gpu.global.b128 %q1, [%rd1];", "st.release.gpu.global.b128 [%rd1], %q1;",
        "atom.global.add.b32 %r1, [%rd1], %r2;", "atom.global.cas.u32 %r1, [%rd1], %r2, %r3;",
        "atom.global.inc.u64 %rd2, [%rd1], %rd3;", "atom.global.xor.f32 %r1, [%rd1], %r2;",
        "red.global.max.f32 [%rd1], %r2;",
    ],
)  # fmt: skip
def test_an_atomic_that_no_type_has_is_refused_when_the_kernel_is_made(instruction):
    name = instruction.split()[0].replace(".", r"\.")
    with pytest.raises(PtxError, match=rf"kernel k, line 8: the CPU runner does not know {name}"):
        PtxKernel(HEADER + ENTRY.format(attributes="", instruction=instruction))


ATOMICS = [
    *(f"add.{each}" for each in ("u32", "s32", "u64", "f32", "f64", "noftz.f16", "noftz.f16x2", "noftz.bf16")),
    *(f"{name}.{each}" for name in ("min", "max") for each in ("u32", "s32", "u64", "s64")),
    "inc.u32", "dec.u32", "add.noftz.bf16x2",
    *(f"{name}.{each}" for name in ("and", "or", "xor", "exch") for each in ("b32", "b64")),
]  # fmt: skip


@pytest.mark.slow
def test_every_atomic_that_is_accepted_compiles():
    register = {"16": "%h", "32": "%r", "64": "%rd"}

    def of(kind: str) -> str:
        return register["32" if "x2" in kind else re.search(r"\d+$", kind)[0]]

    lines = [f"atom.global.{each} {of(each)}2, [%rd1], {of(each)}3;" for each in ATOMICS]
    lines += [f"atom.global.cas.b{bits} {r}2, [%rd1], {r}3, {r}3;" for bits, r in register.items()]
    lines += ["ld.relaxed.gpu.global.v2.b64 {%rd2, %rd3}, [%rd1];"]
    kernel = PtxKernel(HEADER + ENTRY.format(attributes="", instruction="\n".join(lines)))
    kernel[1, 1](np.zeros(16, np.int64))


@pytest.mark.slow
def test_atomics_on_pairs_of_halves_order_each_number_for_itself():
    instruction = """mov.b32 %r2, 0x3C004200; mov.b32 %r3, 0x7E004000;
    atom.global.max.noftz.v2.f16x2 {%r1, %r0}, [%rd1], {%r2, %r3};
    atom.global.min.noftz.v2.f16x2 {%r1, %r0}, [%rd1+8], {%r2, %r3};"""
    y = np.array([0x40004000, 0x40003C00, 0x40004000, 0x40003C00], np.uint32)
    PtxKernel(HEADER + ENTRY.format(attributes="", instruction=instruction))[1, 1](y)
    assert [hex(each) for each in y] == ["0x40004200", "0x40004000", "0x3c004000", "0x40003c00"]


@pytest.mark.parametrize(
    ("attributes", "is_refused"),
    [
        ("\n.reqnctapercluster 2", True), ("\n.reqnctapercluster 1, 2, 1", True), ("\n.explicitcluster", True),
        ("\n.reqnctapercluster 1, 1, 1", False), ("\n.maxclusterrank 8", False), ("\n.reqntid 32, 1, 1", False),
        ("\n.blocksareclusters\n.reqntid 32\n.reqnctapercluster 4", True),
    ],
)  # fmt: skip
def test_a_kernel_that_requires_a_cluster_is_refused(attributes, is_refused):
    source = HEADER + ENTRY.format(attributes=attributes, instruction="mov.u32 %r1, %cluster_ctarank;")
    if is_refused:
        with pytest.raises(PtxError, match=r"kernel k, line 4: .* clusters of several thread blocks"):
            PtxKernel(source)
    else:
        PtxKernel(source)


def test_another_entry_of_a_module_may_require_a_cluster():
    source = HEADER + ENTRY.format(attributes="\n.reqnctapercluster 2", instruction="")
    source += ENTRY.format(attributes="", instruction="").replace("entry k", "entry other")
    PtxKernel(source, "other")[1, 1](np.zeros(1))
    with pytest.raises(PtxError, match="clusters"):
        PtxKernel(source, "k")
