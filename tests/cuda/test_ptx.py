"""Inline PTX on the CPU: each instruction against its definition, and kernels that are made of it."""

import math
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest
import torch

from pagewise.cuda import CudaKernel

# ------------------------------------------------------------------------------------------------ single instructions

PATTERNS = [
    0, 1, 2, 7, 31, 32, 33, 0x7F, 0x80, 0xFF, 0x3C00, 0x8000, 0xFFFF, 0x12345678, 0x3F800000, 0x7FFFFFFF, 0x80000000,
    0x80000001, 0xC2F63210, 0xFFFFFFFF, 0x0123456789ABCDEF, 0x7FFFFFFFFFFFFFFF, 0x8000000000000000, 0xFEDCBA9876543210,
    0xFFFFFFFFFFFFFFFF,
]  # fmt: skip
INTEGERS = [
    (a, b, PATTERNS[(i + 3 * j + 5) % len(PATTERNS)]) for i, a in enumerate(PATTERNS) for j, b in enumerate(PATTERNS)
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


def bfe(bits: int, signed: bool) -> Callable[[int, int, int], int]:
    def extract(a: int, start: int, length: int) -> int:
        start, length = start & 255, length & 255
        sign = a >> min(start + length - 1, bits - 1) & 1 if signed and length else 0
        taken = [a >> start + i & 1 if i < length and start + i < bits else sign for i in range(bits)]
        return sum(bit << i for i, bit in enumerate(taken))

    return extract


def bfi(bits: int) -> Callable[[int, int, int, int], int]:
    def insert(a: int, b: int, start: int, length: int) -> int:
        start, length = start & 255, length & 255
        mask = sum(1 << start + i for i in range(length) if start + i < bits)
        return b & ~mask | a << start & mask

    return insert


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


def quotient(a: int, b: int) -> int:
    return 0 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


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
    *(
        Case(f"{name}.{kind.swapcase().lower().replace('h', sign + '16').replace('r', sign + '32').replace('l', sign + '64')}",
             (kind.upper() if sign == "s" else kind) * 3, model)
        for kind in "hrl" for sign in "us"
        for name, model in {
            "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul.lo": lambda a, b: a * b,
            "min": min, "max": max,
        }.items()
    ),
    *(Case(f"mul.hi.{s}{n}", kind * 3, lambda a, b, n=n: a * b >> n)
      for s, n, kind in [("u", 16, "h"), ("s", 16, "H"), ("u", 32, "r"), ("s", 32, "R"), ("u", 64, "l"), ("s", 64, "L")]),
    *(Case(f"mul.wide.{t}", kinds, lambda a, b: a * b) for t, kinds in
      {"u16": "rhh", "s16": "RHH", "u32": "lrr", "s32": "LRR"}.items()),
    *(Case(f"mad.wide.{t}", kinds, lambda a, b, c: a * b + c) for t, kinds in {"u32": "lrrl", "s32": "LRRL"}.items()),
    Case("mad.lo.s32", "RRRR", lambda a, b, c: a * b + c),
    Case("mad.hi.u32", "rrrr", lambda a, b, c: (a * b >> 32) + c),
    Case("mul24.lo.u32", "rrr", lambda a, b: a % 2**24 * (b % 2**24)),
    Case("mad24.hi.u32", "rrrr", lambda a, b, c: (a % 2**24 * (b % 2**24) >> 16) + c),
    Case("add.sat.s32", "RRR", lambda a, b: clamp(a + b, -2**31, 2**31 - 1)),
    Case("sub.sat.s32", "RRR", lambda a, b: clamp(a - b, -2**31, 2**31 - 1)),
    Case("sad.s32", "RRRR", lambda a, b, c: abs(a - b) + c),
    Case("sad.u64", "llll", lambda a, b, c: abs(a - b) + c),
    Case("abs.s64", "LL", abs), Case("neg.s32", "RR", lambda a: -a), Case("neg.s16", "HH", lambda a: -a),
    Case("and.b32", "rrr", lambda a, b: a & b), Case("or.b64", "lll", lambda a, b: a | b),
    Case("xor.b16", "hhh", lambda a, b: a ^ b), Case("not.b32", "rr", lambda a: ~a), Case("cnot.b32", "rr", lambda a: a == 0),
    Case("shl.b32", "rrr", lambda a, n: a << n if n < 32 else 0), Case("shl.b64", "llr", lambda a, n: a << n if n < 64 else 0),
    Case("shr.u32", "rrr", lambda a, n: a >> n), Case("shr.s32", "RRr", lambda a, n: a >> n),
    Case("shr.s64", "LLr", lambda a, n: a >> n), Case("shr.b16", "hhr", lambda a, n: a >> n),
    Case("shf.l.wrap.b32", "rrrr", lambda a, b, n: (b << 32 | a) << (n & 31) >> 32),
    Case("shf.l.clamp.b32", "rrrr", lambda a, b, n: (b << 32 | a) << min(n, 32) >> 32),
    Case("shf.r.wrap.b32", "rrrr", lambda a, b, n: (b << 32 | a) >> (n & 31)),
    Case("shf.r.clamp.b32", "rrrr", lambda a, b, n: (b << 32 | a) >> min(n, 32)),
    Case("popc.b32", "rr", lambda a: a.bit_count()), Case("popc.b64", "rl", lambda a: a.bit_count()),
    Case("clz.b32", "rr", lambda a: 32 - a.bit_length()), Case("clz.b64", "rl", lambda a: 64 - a.bit_length()),
    Case("brev.b32", "rr", lambda a: int(f"{a:032b}"[::-1], 2)), Case("brev.b64", "ll", lambda a: int(f"{a:064b}"[::-1], 2)),
    Case("bfind.u32", "rr", lambda a: a.bit_length() - 1),
    Case("bfind.s64", "rL", lambda a: (a if a >= 0 else ~a).bit_length() - 1),
    Case("bfind.shiftamt.u32", "rr", lambda a: 32 - a.bit_length() if a else -1),
    Case("bfe.u32", "rrrr", bfe(32, False)), Case("bfe.s32", "rrrr", bfe(32, True)),
    Case("bfe.u64", "llrr", bfe(64, False)), Case("bfe.s64", "llrr", bfe(64, True)),
    Case("bfi.b32", "rrrrr", bfi(32)), Case("bfi.b64", "lllrr", bfi(64)),
    *(Case(f"prmt.b32{mode}", "rrrr", lambda a, b, s, f=f: permuted(a, b, s, f)) for mode, f in MODES.items()),
    *(Case(f"dp4a.{a}32.{b}32", "rrrr", lambda x, y, z, a=a, b=b: dot(x, y, z, a, b, [(8 * i, 8, 8 * i) for i in range(4)]))
      for a in "us" for b in "us"),
    *(Case(f"dp2a.{half}.{a}32.{b}32", "rrrr", lambda x, y, z, a=a, b=b, up=up: dot(x, y, z, a, b, [(0, 16, up), (16, 16, up + 8)]))
      for half, up in (("lo", 0), ("hi", 16)) for a in "us" for b in "us"),
    Case("slct.s32.s32", "rrrR", lambda a, b, c: a if c >= 0 else b),
    Case("cvt.s32.s8", "RR", lambda a: (a + 128) % 256 - 128), Case("cvt.u32.u8", "rr", lambda a: a % 256),
    Case("cvt.u16.u32", "hr", lambda a: a), Case("cvt.s64.s32", "LR", lambda a: a), Case("cvt.u64.u32", "lr", lambda a: a),
    Case("cvt.sat.s8.s32", "RR", lambda a: clamp(a, -128, 127)), Case("cvt.sat.u8.s32", "rR", lambda a: clamp(a, 0, 255)),
    Case("cvt.sat.u16.s64", "rL", lambda a: clamp(a, 0, 65535)),
    Case("cvt.pack.sat.u8.s32.b32", "rRRr", lambda a, b, c: clamp(b, 0, 255) | clamp(a, 0, 255) << 8 | c << 16),
    Case("cvt.pack.sat.s16.s32", "rRR", lambda a, b: clamp(b, -2**15, 2**15 - 1) % 2**16 | clamp(a, -2**15, 2**15 - 1) << 16),
]  # fmt: skip


def kernel_of(cases: list[Case]) -> str:
    """A kernel that does each instruction to each triple of numbers: out[case, i]."""
    types = {"h": "unsigned short", "r": "unsigned", "l": "unsigned long long"}
    lines = []
    for row, case in enumerate(cases):
        result, *operands = case.kinds.lower()
        slots = ", ".join(f"%{i}" for i in range(len(case.kinds)))
        inputs = ", ".join(f'"{kind}"(({types[kind]})x[{i % 3}])' for i, kind in enumerate(operands))
        lines.append(
            f'    {{ {types[result]} d; asm("{case.instruction} {slots};" : "={result}"(d) : {inputs}); '
            f"out[{row} * n + i] = d; }}"
        )
    return (
        "__global__ void instructions(const unsigned long long* triples, unsigned long long* out, int n) {\n"
        "    int i = blockIdx.x * blockDim.x + threadIdx.x;\n    if (i >= n) return;\n"
        "    unsigned long long x[3] = {triples[3 * i], triples[3 * i + 1], triples[3 * i + 2]};\n"
        + "\n".join(lines)
        + "\n}\n"
    )


def as_signed(patterns: list) -> torch.Tensor:
    return torch.from_numpy(np.array(patterns, dtype=np.uint64).view(np.int64))


def test_integer_instructions_do_what_they_are_defined_to_do():
    kernel = CudaKernel(kernel_of(CASES), "instructions")
    out = torch.zeros(len(CASES), len(INTEGERS), dtype=torch.int64)
    kernel[-(-len(INTEGERS) // 128), 128](as_signed(INTEGERS), out, len(INTEGERS))
    found = out.numpy().view(np.uint64)
    wrong = []
    for row, case in enumerate(CASES):
        result, *kinds = case.kinds
        for column, triple in enumerate(INTEGERS):
            operands = [number(triple[i % 3], kind) for i, kind in enumerate(kinds)]
            expected = int(case.model(*operands)) % 2 ** bits_of(result)
            if int(found[row, column]) != expected:
                wrong.append(
                    f"{case.instruction} {[hex(x) for x in operands]}: {found[row, column]:#x}, not {expected:#x}"
                )
    assert not wrong, "\n".join([*wrong[:10], f"{len(wrong)} in all"])
