"""Instructions on pairs of 16-bit numbers, which LLVM makes of two operations, and reductions of floats over a warp."""

import itertools
import math
import operator

import numpy as np
import pytest
import torch

from cudascope import PtxKernel
from cudascope.ptx.module import PtxError
from cudascope.toolchain.ptxas import PtxText, resources_of

HEADER = ".version 8.6\n.target sm_100a\n.address_size 64\n"
THREADS = 256


def kernel_of(instructions: list[str]) -> PtxKernel:
    """Thread t loads a, b and c, and stores what each instruction leaves in d."""
    statements = "\n".join(
        f"    {{ mov.b32 d, 0; {instruction} }}\n    st.global.b32 [%to+{4 * i}], d;"
        for i, instruction in enumerate(instructions)
    )
    return PtxKernel(f"""{HEADER}
.visible .entry k(.param .u64 x, .param .u64 out)
{{
    .reg .pred p, q, w;
    .reg .b16 %h<4>;
    .reg .b32 a, b, c, d, e;
    .reg .b64 %from, %to, %at;
    ld.param.u64 %from, [x];
    ld.param.u64 %to, [out];
    mov.u32 e, %tid.x;
    mul.wide.u32 %at, e, 12;
    add.s64 %from, %from, %at;
    mul.wide.u32 %at, e, {4 * len(instructions)};
    add.s64 %to, %to, %at;
    ld.global.b32 a, [%from];
    ld.global.b32 b, [%from+4];
    ld.global.b32 c, [%from+8];
    setp.ne.u32 w, c, 0;
    mov.b32 {{%h1, %h2}}, a;
    mov.b32 {{%h3, %h2}}, b;
{statements}
    ret;
}}
""")


def results(instructions: list[str], operands: np.ndarray) -> np.ndarray:
    """[thread, instruction], as 32 bits. `operands` [thread, 3] are a, b, c."""
    out = np.zeros((len(operands), len(instructions)), np.uint32)
    kernel = kernel_of(instructions)
    kernel[1, len(operands)](np.ascontiguousarray(operands, np.uint32), out)
    assert resources_of(PtxText(kernel.text, "k", "sm_100a"), 100), "ptxas refuses the instructions"
    return out


HALVES = [0, 1, 2, 0x3FF, 0x3C00, 0xBC00, 0x7BFF, 0x7C00, 0xFC00, 0x7E00, 0x8000, 0x8001, 0x7FFF]
HALVES += [0xFFFF, 0x4000, 0x3F80]
PAIRS = [low | HALVES[-1 - i] << 16 for i, low in enumerate(HALVES)]
OPERANDS = np.array([(a, b, i % 3 % 2) for i, (a, b) in enumerate(itertools.product(PAIRS, PAIRS))], np.uint32)


def halves(words: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """The lower and the upper numbers of 32-bit words."""
    parts = np.ascontiguousarray(words).view(np.uint16).reshape(len(words), 2)
    if kind == "bf16":
        parts = (parts.astype(np.uint32) << 16).view(np.float32)
    elif kind == "f16":
        parts = parts.view(np.float16)
    elif kind == "s16":
        parts = parts.view(np.int16)
    return parts[:, 0], parts[:, 1]


def packed(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low.astype(np.uint16).astype(np.uint32) | high.astype(np.uint16).astype(np.uint32) << 16


ORDERED = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}


def holds(comparison: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    unordered = np.isnan(a.astype(np.float32)) | np.isnan(b.astype(np.float32))
    if comparison in ("num", "nan"):
        return unordered == (comparison == "nan")
    if comparison.endswith("u"):
        return ORDERED[comparison[:-1]](a, b) | unordered
    return ORDERED[comparison](a, b) & ~unordered


COMPARISONS = [*ORDERED, *(f"{each}u" for each in ORDERED), "num", "nan"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_a_comparison_of_pairs_gives_two_predicates(kind):
    both = "selp.b32 d, 1, 0, p; selp.b32 e, 2, 0, q; or.b32 d, d, e;"
    instructions = [f"setp.{each}.{kind}x2 p|q, a, b; {both}" for each in COMPARISONS]
    found = results(instructions, OPERANDS)
    a, b = halves(OPERANDS[:, 0], kind), halves(OPERANDS[:, 1], kind)
    for i, each in enumerate(COMPARISONS):
        expected = holds(each, a[0], b[0]) + 2 * holds(each, a[1], b[1])
        assert np.array_equal(found[:, i], expected), each


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_a_comparison_of_pairs_is_combined_with_a_predicate(kind):
    both = "selp.b32 d, 1, 0, p; selp.b32 e, 2, 0, q; or.b32 d, d, e;"
    combinations = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
    instructions = [f"setp.lt.{each}.{kind}x2 p|q, a, b, w; {both}" for each in combinations]
    instructions += [f"setp.lt.and.{kind}x2 _|q, a, b, !w; selp.b32 d, 1, 0, q;"]
    instructions += [f"set.lt.{each}.u32.{kind}x2 d, a, b, !w;" for each in combinations]
    instructions += [f"set.lt.{each}.{kind}x2.{kind}x2 d, a, b, w;" for each in combinations]
    found = results(instructions, OPERANDS).T
    (a, a_high), (b, b_high) = halves(OPERANDS[:, 0], kind), halves(OPERANDS[:, 1], kind)
    low, high, other = holds("lt", a, b), holds("lt", a_high, b_high), OPERANDS[:, 2] != 0
    one = 0x3C00 if kind == "f16" else 0x3F80
    for i, combine in enumerate(combinations.values()):
        assert np.array_equal(found[i], combine(low, other) + 2 * combine(high, other))
        of_negated = packed(0xFFFF * combine(low, ~other), 0xFFFF * combine(high, ~other))
        assert np.array_equal(found[4 + i], of_negated)
        assert np.array_equal(found[7 + i], packed(one * combine(low, other), one * combine(high, other)))
    assert np.array_equal(found[3], high & ~other)


@pytest.mark.slow
def test_flush_to_zero_holds_for_both_numbers_of_a_pair():
    instructions = [
        "setp.gt.ftz.f16x2 p|q, a, b; selp.b32 d, 1, 0, p; selp.b32 e, 2, 0, q; or.b32 d, d, e;",
        "set.gt.ftz.u32.f16x2 d, a, b;",
        "set.gt.ftz.f16x2.f16x2 d, a, b;",
    ]
    subnormal, normal = 0x03FF, 0x0400
    given = [(subnormal | normal << 16, 0, 0), (normal | subnormal << 16, 0, 0), (subnormal * 0x10001, 0x80018001, 0)]
    found = results(instructions, np.array(given, np.uint32))
    assert found.tolist() == [[2, 0xFFFF0000, 0x3C000000], [1, 0x0000FFFF, 0x00003C00], [0, 0, 0]]


def test_a_comparison_of_one_half_fills_16_or_32_bits():
    instructions = [
        "set.gt.u16.f16 %h1, %h1, %h3; cvt.u32.u16 d, %h1;",
        "set.le.u32.bf16 d, %h1, %h3;",
        "mov.b32 {%h1, %h2}, a; set.gt.bf16.s32 %h1, a, b; cvt.u32.u16 d, %h1;",
    ]
    found = results(instructions, OPERANDS)
    a, b = (OPERANDS[:, i] for i in (0, 1))
    # the instructions run in order, and the first one overwrites %h1
    first = holds("gt", halves(a, "f16")[0], halves(b, "f16")[0])
    assert np.array_equal(found[:, 0], 0xFFFF * first)
    assert np.array_equal(found[:, 2], 0x3F80 * (a.view(np.int32) > b.view(np.int32)))
    after = (first * np.uint32(0xFFFF0000)).view(np.float32)
    assert np.array_equal(found[:, 1], 0xFFFFFFFF * holds("le", after, halves(b, "bf16")[0]).astype(np.uint32))


INTEGERS = [0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF, 0x1234, 0xEDCB, 0x5555, 0xAAAA]
INTEGER_PAIRS = [low | INTEGERS[3 - i] << 16 for i, low in enumerate(INTEGERS)]
INTEGER_OPERANDS = np.array([(a, b, 0) for a, b in itertools.product(INTEGER_PAIRS, INTEGER_PAIRS)], np.uint32)


@pytest.mark.parametrize("sign", ["s", "u"])
def test_pairs_of_integers_are_added_and_compared_each_for_itself(sign):
    kind = f"{sign}16"
    models = {"add": np.add, "min": np.minimum, "max": np.maximum}
    if sign == "s":
        models |= {f"{name}.relu": lambda a, b, f=models[name]: np.maximum(f(a, b), 0) for name in ("min", "max")}
    instructions = [f"{name}.{kind}x2 d, a, b;" for name in models]
    found = results(instructions, INTEGER_OPERANDS)
    a, b = halves(INTEGER_OPERANDS[:, 0], kind), halves(INTEGER_OPERANDS[:, 1], kind)
    for i, (name, model) in enumerate(models.items()):
        assert np.array_equal(found[:, i], packed(model(a[0], b[0]), model(a[1], b[1]))), name


def test_relu_may_follow_the_type():
    found = results(["min.s16x2.relu d, a, b;", "max.relu.s16x2 d, a, b;"], np.array([(0xFFFF0005, 0x00070003, 0)]))
    assert found.tolist() == [[0x00000003, 0x00070005]]


@pytest.mark.parametrize(
    "instruction",
    [
        "sub.s16x2 d, a, b", "neg.s16x2 d, a", "abs.s16x2 d, a", "mul.lo.s16x2 d, a, b", "add.sat.s16x2 d, a, b",
        "add.rn.relu.f16x2 d, a, b", "setp.gt.s16x2 p|q, a, b", "set.gt.u16.f16x2 %h1, a, b",
        "redux.sync.add.f32 d, a, -1", "redux.sync.add.b32 d, a, -1", "redux.sync.max.NaN.u32 d, a, -1",
    ],
)  # fmt: skip
def test_what_ptxas_refuses_is_refused(instruction):
    kernel = kernel_of(["add.s32 d, a, b;"]).text.replace("add.s32 d, a, b;", f"{instruction};")
    with pytest.raises(PtxError, match=instruction.split()[0]):
        PtxKernel(kernel)
    assert resources_of(PtxText(kernel, "k", "sm_100a"), 100) is None


# ------------------------------------------------------------------------------------------------ floats of a warp

NAN, INFINITE = math.nan, math.inf
WARPS = [
    [float(lane) for lane in range(32)],
    [-float(lane) - 0.5 for lane in range(32)],
    [NAN] * 31 + [-2.0],
    [NAN] * 32,
    [0.0, -0.0] * 16,
    [INFINITE, -INFINITE, 3.0, -4.0] * 8,
    [-9.0] + [1.0] * 30 + [NAN],
]


def reduced(values: list[float], name: str) -> float:
    if "abs" in name:
        values = list(map(abs, values))
    if "NaN" in name and any(map(math.isnan, values)):
        return NAN
    values = [each for each in values if not math.isnan(each)]
    best = max if "max" in name else min
    return best(values, key=lambda x: (x, math.copysign(1, x))) if values else NAN


@pytest.mark.parametrize("mask", [0xFFFFFFFF, 0x0000FFFF])
def test_floats_of_a_warp_are_reduced(mask):
    names = [f"{op}{of}{nan}" for op in ("min", "max") for of in ("", ".abs") for nan in ("", ".NaN")]
    lanes = [lane for lane in range(32) if mask >> lane & 1]
    guard = "" if mask == 0xFFFFFFFF else "mov.u32 e, %laneid; setp.lt.u32 p, e, 16; @p "
    instructions = [f"{guard}redux.sync.{name}.f32 d, a, {mask:#x};" for name in names]
    given = np.zeros((32 * len(WARPS), 3), np.uint32)
    given[:, 0] = np.array(WARPS, np.float32).view(np.uint32).ravel()
    found = results(instructions, given).reshape(len(WARPS), 32, -1)
    for values, of_warp in zip(WARPS, found, strict=True):
        for i, name in enumerate(names):
            expected = np.float32(reduced([values[lane] for lane in lanes], name))
            bits = 0x7FFFFFFF if np.isnan(expected) else int(expected.view(np.uint32))
            assert (of_warp[lanes, i] == bits).all(), (name, values)
            assert not np.delete(of_warp[:, i], lanes).any()


def test_the_operands_are_those_of_torch():
    """The references above read bits as torch does."""
    low, _ = halves(np.array(PAIRS, np.uint32), "bf16")
    bits = torch.tensor([each & 0xFFFF for each in PAIRS], dtype=torch.int32).to(torch.int16)
    assert np.array_equal(low, bits.view(torch.bfloat16).float().numpy(), equal_nan=True)
