"""PTX instructions on the CPU against their definitions: integers, exact roundings, products of matrices.

test_ptx_against_nvidia.py has the instructions that ptxas or a header of NVIDIA's computes.
"""

import math
import random
import re
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest
import torch

from cudascope import CudaKernel

pytestmark = pytest.mark.slow

# ------------------------------------------------------------------------------------------------ integers

PATTERNS = [
    0, 1, 2, 7, 31, 32, 33, 0x7F, 0x80, 0xFF, 0x3C00, 0x8000, 0xFFFF, 0x12345678, 0x3F800000, 0x7FFFFFFF, 0x80000000,
    0x80000001, 0xC2F63210, 0xFFFFFFFF, 0x0123456789ABCDEF, 0x7FFFFFFFFFFFFFFF, 0x8000000000000000, 0xFEDCBA9876543210,
    0xFFFFFFFFFFFFFFFF,
]  # fmt: skip
INTEGERS = [
    (a, PATTERNS[(i + 7 * j) % len(PATTERNS)], PATTERNS[(3 * i + j) % len(PATTERNS)])
    for i, a in enumerate(PATTERNS)
    for j in range(0, len(PATTERNS), 3)
]


class Case(NamedTuple):
    """An instruction whose operands have these bits and signs, and what it does to numbers (modulo 2^bits)."""

    instruction: str
    kinds: str  # of result and operands: h r l (bits), capital: signed
    model: Callable[..., int]


def bits_of(kind: str) -> int:
    return {"h": 16, "r": 32, "l": 64}[kind.lower()]


def number(pattern: int, kind: str) -> int:
    bits = bits_of(kind)
    pattern %= 2**bits
    return pattern - 2**bits if kind.isupper() and pattern >> (bits - 1) else pattern


def permuted(a: int, b: int, selector: int, picks: Callable[[int, int], int]) -> int:
    parts = (a | b << 32).to_bytes(8, "little")
    chosen = [(parts[pick & 7], pick >> 3) for pick in (picks(selector, i) for i in range(4))]
    return int.from_bytes(bytes((255 if byte > 127 else 0) if sign else byte for byte, sign in chosen), "little")


def clamp(x: int, low: int, high: int) -> int:
    return max(low, min(x, high))


def dot(a: int, b: int, c: int, a_kind: str, b_kind: str, pairs: list[tuple[int, int, int]]) -> int:
    """Sum of products of parts: (bit of a's part, its size, bit of b's byte)."""

    def part(x: int, at: int, bits: int, kind: str) -> int:
        value = x >> at & 2**bits - 1
        return value - 2**bits if kind == "s" and value >> bits - 1 else value

    return c + sum(part(a, at, size, a_kind) * part(b, where, 8, b_kind) for at, size, where in pairs)


MODES = {
    "": lambda s, i: s >> 4 * i & 15,
    ".f4e": lambda s, i: (s & 3) + i,
    ".b4e": lambda s, i: ((s & 3) - i) % 8,
    ".rc8": lambda s, i: s & 3,
    ".ecl": lambda s, i: max(s & 3, i),
    ".ecr": lambda s, i: min(s & 3, i),
    ".rc16": lambda s, i: 2 * (s & 1) + (i & 1),
}
CASES = [
    Case("mul.hi.u64", "lll", lambda a, b: a * b >> 64), Case("mul.hi.s64", "LLL", lambda a, b: a * b >> 64),
    Case("mad.hi.u32", "rrrr", lambda a, b, c: (a * b >> 32) + c),
    Case("mul24.lo.u32", "rrr", lambda a, b: a % 2**24 * (b % 2**24)),
    Case("mad24.hi.u32", "rrrr", lambda a, b, c: (a % 2**24 * (b % 2**24) >> 16) + c),
    Case("sub.sat.s32", "RRR", lambda a, b: clamp(a - b, -2**31, 2**31 - 1)),
    Case("sad.s32", "RRRR", lambda a, b, c: abs(a - b) + c),
    Case("sad.u64", "llll", lambda a, b, c: abs(a - b) + c),
    Case("neg.s16", "HH", lambda a: -a), Case("or.b64", "lll", lambda a, b: a | b),
    Case("xor.b16", "hhh", lambda a, b: a ^ b), Case("shr.u32", "rrr", lambda a, n: a >> n),
    *(Case(f"prmt.b32{mode}", "rrrr", lambda a, b, s, f=f: permuted(a, b, s, f)) for mode, f in MODES.items()),
    *(Case(f"dp4a.{a}32.{b}32", "rrrr",
           lambda x, y, z, a=a, b=b: dot(x, y, z, a, b, [(8 * i, 8, 8 * i) for i in range(4)]))
      for a in "us" for b in "us"),
    *(Case(f"dp2a.{half}.{a}32.{b}32", "rrrr",
           lambda x, y, z, a=a, b=b, up=up: dot(x, y, z, a, b, [(0, 16, up), (16, 16, up + 8)]))
      for half, up in (("lo", 0), ("hi", 16)) for a in "us" for b in "us"),
    Case("slct.s32.s32", "rrrR", lambda a, b, c: a if c >= 0 else b),
    Case("cvt.s32.s8", "RR", lambda a: (a + 128) % 256 - 128), Case("cvt.u16.u32", "hr", lambda a: a),
    Case("cvt.u64.u32", "lr", lambda a: a),
    Case("cvt.pack.sat.u8.s32.b32", "rRRr", lambda a, b, c: clamp(b, 0, 255) | clamp(a, 0, 255) << 8 | c << 16),
    Case("cvt.pack.sat.s16.s32", "rRR",
         lambda a, b: clamp(b, -2**15, 2**15 - 1) % 2**16 | clamp(a, -2**15, 2**15 - 1) << 16),
]  # fmt: skip


# ------------------------------------------------------------------------------------------------ rounding

FORMATS = {"f": (24, -126), "d": (53, -1022), "e": (11, -14), "b": (8, -126)}  # bits of the fraction, least exponent


def rounded(x: Fraction, form: str, mode: str = "rn") -> Fraction:
    """x in a format: to nearest (ties to even), towards zero, down, up."""
    precision, least = FORMATS[form]
    if x == 0:
        return x
    exponent = abs(x.numerator).bit_length() - x.denominator.bit_length()
    exponent -= abs(x) < Fraction(2) ** exponent
    unit = Fraction(2) ** (max(exponent, least) - precision + 1)
    scaled = x / unit
    down = math.floor(scaled)
    nearest = round(scaled)  # Python's ties go to even
    return unit * {"rn": nearest, "rz": math.trunc(scaled), "rm": down, "rp": -math.floor(-scaled)}[mode]


def encode(x: float, form: str) -> int:
    if form == "b":
        return int.from_bytes(struct.pack("<f", x), "little") >> 16
    return int.from_bytes(struct.pack(f"<{form}", x), "little")


def decode(pattern: int, form: str) -> float:
    if form == "b":
        pattern, form = pattern << 16, "f"
    return struct.unpack(f"<{form}", pattern.to_bytes({"e": 2, "f": 4, "d": 8}[form], "little"))[0]


GENERATOR = random.Random(0)
REALS = [GENERATOR.uniform(1, 2) * 2.0 ** GENERATOR.randint(-5, 5) * GENERATOR.choice((-1, 1)) for _ in range(120)]


class Real(NamedTuple):
    """An instruction on real numbers: result and operands in FORMATS; rounded is what `model` says exactly."""

    instruction: str
    forms: str
    model: Callable[..., Fraction]
    mode: str = "rn"


SUM, PRODUCT = (lambda a, b: a + b), (lambda a, b: a * b)
ROUNDED = [
    *(Real(f"{name}.{mode}.f32", forms, model, mode) for mode in ("rn", "rz", "rm", "rp") for name, forms, model in (
        ("add", "fff", SUM), ("mul", "fff", PRODUCT), ("fma", "ffff", lambda a, b, c: a * b + c),
        ("div", "fff", lambda a, b: a / b))),
    *(Real(f"rcp.{mode}.f32", "ff", lambda a: 1 / a, mode) for mode in ("rn", "rp")),
    *(Real(f"add.{mode}.f64", "ddd", SUM, mode) for mode in ("rn", "rm")),
    Real("fma.rn.f64", "dddd", lambda a, b, c: a * b + c),
    *(Real(f"cvt.{mode}.f32.f64", "fd", lambda a: a, mode) for mode in ("rz", "rm", "rp")),
    Real("sub.f32", "fff", lambda a, b: a - b), Real("fma.rn.f16", "eeee", lambda a, b, c: a * b + c),
    Real("fma.rn.bf16", "bbbb", lambda a, b, c: a * b + c), Real("abs.bf16", "bb", abs),
]  # fmt: skip

NAN, ONE = 0x7FC00000, 0x3F800000
SINGLE = [  # instruction, constraints, bits of the operands, bits of the result
    ("min.NaN.f32", "fff", (NAN, ONE), NAN),
    ("min.xorsign.abs.f32", "fff", (0xC0400000, 0x40000000), 0xC0000000),  # of -3 and 2: -2
    ("max.xorsign.abs.f32", "fff", (0xC0400000, 0x40000000), 0xC0400000),
    ("add.f32", "fff", (1, 1), 2),
    ("add.ftz.f32", "fff", (1, 1), 0),
    ("mul.ftz.f32", "fff", (0x8D800000, 0x2B800000), 0x80000000),  # -2^-100 * 2^-40
    ("ex2.approx.ftz.f32", "ff", (0x40400000,), 0x41000000),
    ("lg2.approx.ftz.f32", "ff", (0x41000000,), 0x40400000),
    ("rsqrt.approx.ftz.f32", "ff", (0x40800000,), 0x3F000000),
    ("sqrt.approx.f32", "ff", (0x40800000,), 0x40000000),
    ("sqrt.rz.f32", "ff", (0x40000000,), 0x3FB504F3),  # sqrt(2) = 1.5 04F333F9…
    ("sqrt.rp.f32", "ff", (0x40000000,), 0x3FB504F4),
    ("tanh.approx.f32", "ff", (0x42000000,), ONE),
    ("tanh.approx.f16x2", "rr", (0x4F8000CF,), 0x3C0000CF),  # tanh(30), and of 1.2e-5 itself
    ("ex2.approx.f16x2", "rr", (0x4200C000,), 0x48003400),  # 2^3, 2^-2
    ("add.f16x2", "rrr", (0x3C004000, 0x40003C00), 0x42004200),
    ("sub.f16x2", "rrr", (0x3C004000, 0x40003C00), 0xBC003C00),
    ("mul.ftz.f16x2", "rrr", (0x00013C00, 0x3C003C00), 0x00003C00),  # the least subnormal
    ("fma.rn.relu.f16x2", "rrrr", (0xBC003C00, 0x3C003C00, 0x00003C00), 0x00004000),
    ("fma.rn.bf16x2", "rrrr", (0x3F804000, 0x40003F80, 0x3F803F80), 0x40404040),
    ("fma.rn.bf16", "hhhh", (0x3FC0, 0x3F81, 0x8D80), 0x3FC1),  # 1.5 (1 + 2^-7), between two numbers, less 2^-100
    ("fma.rn.bf16", "hhhh", (0x3FC0, 0x3F81, 0x0D80), 0x3FC2),
    ("fma.rn.bf16x2", "rrrr", (0x3FC03FC0, 0x3F813F81, 0x8D800D80), 0x3FC13FC2),
    ("cvt.rn.satfinite.f16.f32", "hf", (0x7F800000,), 0x7BFF),
    ("cvt.rn.satfinite.bf16x2.f32", "rff", (0xFF800000, 0x7F7FFFFF), 0xFF7F7F7F),
    ("cvt.rz.bf16.f64", "hd", (0x7E37E43C8800759C,), 0x7F7F),  # 1e300
    ("cvt.rp.f16.s32", "hr", (2049,), 0x6801),
    ("cvt.rz.f16.f64", "hd", (0x3FF003FFFFFFFFFF,), 0x3C00),
    ("cvt.rz.tf32.f32", "rf", (0x3F801FFF,), 0x3F800000),
    ("cvt.rn.tf32.f32", "rf", (0x3F801000,), 0x3F800000),
    ("cvt.rn.relu.tf32.f32", "rf", (0xBF801000,), 0),
    ("cvt.rmi.s32.f32", "rf", (0xC0200000,), -3 % 2**32),
    ("cvt.rpi.s32.f32", "rf", (0x40200000,), 3),
    ("cvt.rni.sat.s8.f32", "rf", (0x43480000,), 127),  # 200
    ("cvt.rni.sat.s8.f32", "rf", (0xC3480000,), -128 % 2**32),
    ("cvt.rp.f32.s32", "fr", (0x01000001,), 0x4B800001),
    ("cvt.rn.f32.u64", "fl", (2**64 - 1,), 0x5F800000),
    ("cvt.rn.f16.s32", "hr", (3,), 0x4200),
    ("cvt.rn.relu.f16x2.f32", "rff", (0xBF800000, 0x40000000), 0x00004000),
    ("cvt.rn.bf16x2.f32", "rff", (ONE, 0x40000000), 0x3F804000),
    ("set.le.u32.f32", "rff", (ONE, ONE), 0xFFFFFFFF),
    ("set.gt.f32.f32", "fff", (ONE, ONE), 0),
    ("set.gt.u32.f16x2", "rrr", (0x40003C00, 0x3C003C00), 0xFFFF0000),
    ("set.le.f16x2.f16x2", "rrr", (0x40003C00, 0x3C003C00), 0x00003C00),
    ("set.lt.s32.s32", "rrr", (1, 0xFFFFFFFF), 0),
    ("copysign.f32", "fff", (0xBF800000, 0x40400000), 0xC0400000),
]  # fmt: skip
TWO, THREE = 0x40000000, 0x40400000
NEWER = [  # sm_100 and later
    ("max.f32", "ffff", (ONE, NAN, 0x40000000), 0x40000000),
    ("max.NaN.f32", "ffff", (ONE, NAN, 0x40000000), NAN),
    ("min.ftz.f32", "ffff", (ONE, 0x40000000, 0x80000001), 0x80000000),
    ("add.f32x2", "lll", (ONE << 32 | TWO, TWO << 32 | ONE), THREE << 32 | THREE),
    ("sub.rn.f32x2", "lll", (TWO << 32 | THREE, ONE << 32 | TWO), ONE << 32 | ONE),
    ("mul.rn.ftz.f32x2", "lll", (ONE << 32 | 1, THREE << 32 | ONE), THREE << 32),  # the least subnormal
    ("fma.rn.f32x2", "llll", (ONE << 32 | TWO, ONE << 32 | ONE, ONE << 32 | ONE), TWO << 32 | THREE),
    ("fma.rz.f32x2", "llll", (0x3F800001 << 32 | ONE, 0x3F800001 << 32 | ONE, 0), 0x3F800002 << 32 | ONE),
    ("fma.rp.f32x2", "llll", (0x3F800001 << 32 | ONE, 0x3F800001 << 32 | ONE, 0), 0x3F800003 << 32 | ONE),
]  # fmt: skip

# ------------------------------------------------------------------------------------------------ all in one kernel


class Row(NamedTuple):
    instruction: str
    constraints: str  # of result and operands
    operands: list[tuple[int, ...]]
    agrees: Callable[[tuple[int, ...], int], bool]


def rows() -> list[Row]:
    found = []
    for case in CASES:
        _, *kinds = case.kinds
        patterns = [tuple(triple[i % 3] for i in range(len(kinds))) for triple in INTEGERS]

        def equals_model(operands: tuple[int, ...], result: int, case: Case = case) -> bool:
            numbers = map(number, operands, case.kinds[1:])
            return result == int(case.model(*numbers)) % 2 ** bits_of(case.kinds[0])

        found.append(Row(case.instruction, case.kinds.lower(), patterns, equals_model))
    for real in ROUNDED:
        forms = real.forms[1:]
        numbers = zip(*(REALS[7 * i :] for i in range(len(forms))), strict=False)
        patterns = [
            tuple(encode(float(rounded(Fraction(x), form)), form) for x, form in zip(each, forms, strict=True))
            for each in numbers
        ]

        def is_rounded(operands: tuple[int, ...], found: int, real: Real = real) -> bool:
            exact = real.model(*(Fraction(decode(x, form)) for x, form in zip(operands, real.forms[1:], strict=True)))
            return Fraction(decode(found, real.forms[0])) == rounded(exact, real.forms[0], real.mode)

        constraints = real.forms.replace("e", "h").replace("b", "h")
        found.append(Row(real.instruction, constraints, patterns, is_rounded))
    return found + single_rows(SINGLE)


def single_rows(table: list[tuple]) -> list[Row]:
    return [Row(name, kinds, [x], lambda _, y, expected=expected: y == expected) for name, kinds, x, expected in table]


TYPES = {"h": "unsigned short", "r": "unsigned", "l": "unsigned long long", "f": "float", "d": "double"}
READ = {"f": "__uint_as_float((unsigned){})", "d": "__longlong_as_double({})"}
WRITTEN = {"f": "__float_as_uint(d)", "d": "__double_as_longlong(d)"}


def source_of(rows: list[Row]) -> str:
    """Kernel `instructions`: out[row, i] = what the row's instruction makes of operands x[row, i, :]."""
    lines = []
    for row in rows:
        result, *kinds = row.constraints
        slots = ", ".join(f"%{i}" for i in range(len(row.constraints)))
        reads = [READ.get(kind, f"({TYPES[kind]}){{}}").format(f"x[{i}]") for i, kind in enumerate(kinds)]
        inputs = ", ".join(f'"{kind}"({read})' for kind, read in zip(kinds, reads, strict=True))
        statement = f'asm("{row.instruction} {slots};" : "={result}"(d) : {inputs});'
        lines.append(
            f"    {{ {TYPES[result]} d; {statement} *out = {WRITTEN.get(result, 'd')}; x += 4 * n, out += n; }}"
        )
    body = "\n".join(lines)
    return f"""__global__ void instructions(const unsigned long long* x, unsigned long long* out, int n) {{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    x += 4 * i, out += i;
{body}
}}
"""


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_every_instruction_does_what_it_is_defined_to_do(arch):
    table = rows() if arch == "sm_90" else single_rows(NEWER)
    most = max(len(row.operands) for row in table)
    x = np.zeros((len(table), most, 4), np.uint64)
    for row, into in zip(table, x, strict=True):
        for operands, at in zip(row.operands, into, strict=False):
            at[: len(operands)] = operands
    out = torch.zeros(len(table), most, dtype=torch.int64)
    kernel = CudaKernel(source_of(table), "instructions")
    kernel[-(-most // 128), 128](torch.from_numpy(x.view(np.int64)), out, most)
    bits = {"h": 16, "r": 32, "l": 64, "f": 32, "d": 64}
    wrong = [
        f"{row.instruction} {[hex(x) for x in operands]}: {result:#x}"
        for row, results in zip(table, out.numpy().view(np.uint64).tolist(), strict=True)
        for operands, result in zip(row.operands, results, strict=False)
        if not row.agrees(tuple(x % 2 ** bits[k] for x, k in zip(operands, row.constraints[1:], strict=True)), result)
    ]
    assert not wrong, "\n".join([*wrong[:20], f"{len(wrong)} in all"])
    kernel.resources(arch)


# ------------------------------------------------------------------------------------------------ shapes of products

# Where element i of A, and of B, lies that lane 4 g + t holds, as the PTX ISA has it: row and column of A; row of B
# (its column is g). Sums: row g and, from the third on, g + 8; columns 2 t and 2 t + 1.
F16 = (lambda i, g, t: (g + 8 * (i // 2 % 2), 2 * t + i % 2 + 8 * (i // 4)), lambda i, t: 2 * t + i % 2 + 8 * (i // 2))
F16_K8 = (lambda i, g, t: (g + 8 * (i // 2), 2 * t + i % 2), lambda i, t: 2 * t + i)
TF32 = (lambda i, g, t: (g + 8 * (i in (1, 3)), t + 4 * (i >= 2)), lambda i, t: t + 4 * i)
S8 = (
    lambda i, g, t: (g + 8 * (4 <= i < 8 or i >= 12), 4 * t + i % 4 + 16 * (i >= 8)),
    lambda i, t: 4 * t + i % 4 + 16 * (i >= 4),
)
S8_M8 = (lambda i, g, t: (g, 4 * t + i), lambda i, t: 4 * t + i)
S4 = (
    lambda i, g, t: (g + 8 * (8 <= i < 16 or i >= 24), 8 * t + i % 8 + 32 * (i >= 16)),
    lambda i, t: 8 * t + i % 8 + 32 * (i >= 8),
)
F64 = (lambda i, g, t: (g, t), lambda i, t: t)
SHAPES = [
    ("m16n8k16", "f32.f16.f16.f32", F16), ("m16n8k16", "f16.f16.f16.f16", F16), ("m16n8k16", "f32.bf16.bf16.f32", F16),
    ("m16n8k8", "f32.f16.f16.f32", F16_K8), ("m16n8k8", "f32.tf32.tf32.f32", TF32), ("m16n8k32", "s32.s8.s8.s32", S8),
    ("m16n8k32", "s32.u8.s8.s32", S8), ("m16n8k16", "s32.s8.s8.s32", S8), ("m8n8k16", "s32.s8.s8.s32", S8_M8),
    ("m16n8k64", "s32.s4.u4.s32", S4), ("m8n8k4", "f64.f64.f64.f64", F64), ("m16n8k32", "f32.e4m3.e5m2.f32", S8),
]  # fmt: skip
WIDTHS = {"f16": 16, "bf16": 16, "tf32": 32, "f32": 32, "s8": 8, "u8": 8, "s4": 4, "u4": 4, "s32": 32, "f64": 64}
WIDTHS |= {"e4m3": 8, "e5m2": 8}
DTYPES = {
    "f16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32, "f32": torch.float32, "s8": torch.int8,
    "u8": torch.uint8, "s32": torch.int32, "f64": torch.float64, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2,
}  # fmt: skip


def registers(kind: str, elements: list[list[float]]) -> torch.Tensor:
    """[lane][element] -> [lane, register], as int32 or, of doubles, int64."""
    if kind in ("s4", "u4"):
        low_first = [
            [int(a) % 16 | int(b) % 16 << 4 for a, b in zip(lane[::2], lane[1::2], strict=True)] for lane in elements
        ]
        return torch.tensor(low_first, dtype=torch.uint8).view(torch.int32)
    return torch.tensor(elements).to(DTYPES[kind]).view(torch.int64 if kind == "f64" else torch.int32)


def mma_source(number: int, shape: str, kinds: str, counts: list[int]) -> str:
    """Kernel mma_<number>: each lane reads its registers of A, B and C, and writes those of D."""
    wide = "f64" in kinds
    letter, type_ = ("d", "double") if wide else ("r", "unsigned")
    slots = iter(f"%{i}" for i in range(sum(counts) + counts[-1]))
    groups = [f"{{{', '.join(next(slots) for _ in range(n))}}}" for n in (counts[2], *counts)]
    reads = [f'"{letter}"({x}[{n} * threadIdx.x + {i}])' for x, n in zip("abc", counts, strict=True) for i in range(n)]
    writes = [f'"={letter}"(d[{counts[2]} * threadIdx.x + {i}])' for i in range(counts[2])]
    return f"""__global__ void mma_{number}(const {type_}* a, const {type_}* b, const {type_}* c, {type_}* d) {{
    asm volatile("mma.sync.aligned.{shape}.row.col.{kinds} {", ".join(groups)};"
                 : {", ".join(writes)} : {", ".join(reads)});
}}
"""


def products() -> list[tuple]:
    """(number, shape, kinds, A, B, C as registers, the sums that lanes must hold)."""
    generator, found = torch.Generator().manual_seed(0), []
    for number, (shape, kinds, (place_a, row_b)) in enumerate(SHAPES):
        m, n, k = (int(size) for size in re.findall(r"\d+", shape))
        result, kind_a, kind_b, start = kinds.split(".")
        least = 0 if "u" in kind_a + kind_b else -4
        a, b, c = (torch.randint(least, 4, size, generator=generator).double() for size in ((m, k), (k, n), (m, n)))
        lanes = [(lane // 4, lane % 4) for lane in range(32)]
        sums = [[(g + 8 * (i // 2), 2 * t + i % 2) for i in range(m * n // 32)] for g, t in lanes]
        held = [
            registers(kind_a, [[a[place_a(i, g, t)].item() for i in range(m * k // 32)] for g, t in lanes]),
            registers(kind_b, [[b[row_b(i, t), g].item() for i in range(k * n // 32)] for g, t in lanes]),
            registers(start, [[c[at].item() for at in lane] for lane in sums]),
            registers(result, [[(a @ b + c)[at].item() for at in lane] for lane in sums]),
        ]
        found.append((number, shape, kinds, *held))
    return found


def test_products_have_the_layouts_of_the_instruction_set(tmp_path):
    table = products()
    file = tmp_path / "mma.cu"
    file.write_text("".join(mma_source(*row[:3], [x.shape[1] for x in row[3:6]]) for row in table))
    for number, shape, kinds, a, b, c, expected in table:
        out = torch.zeros_like(expected)
        view = (lambda x: x.view(torch.float64)) if "f64" in kinds else (lambda x: x)
        CudaKernel(file, f"mma_{number}")[1, 32](*map(view, (a, b, c, out)))
        assert torch.equal(out, expected), (shape, kinds)
    CudaKernel(file, "mma_0").resources("sm_90")
