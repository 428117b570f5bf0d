"""PTX instructions that compute: arithmetic, logic, comparisons, conversions.

    add.rn.ftz.f32 d, a, b;    →    simt::ptx::out(d, simt::ptx::add<f32, RN | FTZ>(a, b));

A table lists the instructions of this form. Each of the others has a function.
"""

import re
from typing import NamedTuple

from cudascope.translate.ptx.calls import (
    BITS,
    HALVES,
    INTEGERS,
    SCALARS,
    Instruction,
    assign,
    call,
    elements,
    expect,
    flags,
    names,
    vector,
)
from cudascope.translate.ptx.scope import P, Scope, Unknown


class _Form(NamedTuple):
    """`name.words.types d, sources`: which words and types there may be, how many sources."""

    words: frozenset[str]
    types: tuple[frozenset[str], ...]
    sources: int


def _forms(table: str) -> dict[str, _Form]:
    forms = {}
    for line in table.strip().splitlines():
        instructions, words, *types, sources = (part.strip() for part in line.split("|"))
        form = _Form(names(words), tuple(map(names, types)), int(sources))
        forms |= dict.fromkeys(instructions.split(), form)
    return forms


_FORMS = _forms(f"""
add sub | rn rz rm rp ftz sat | {INTEGERS} f32 f64 {HALVES} f32x2 | 2
mul | hi lo wide rn rz rm rp ftz sat | {INTEGERS} f32 f64 {HALVES} f32x2 | 2
mad | hi lo wide rn rz rm rp ftz sat | {INTEGERS} f32 f64 | 3
fma | rn rz rm rp ftz sat relu | f32 f64 {HALVES} f32x2 | 3
div | rn rz rm rp ftz approx full | {INTEGERS} f32 f64 | 2
rem | | {INTEGERS} | 2
abs neg | ftz | s16 s32 s64 f32 f64 {HALVES} | 1
min max | ftz NaN xorsign abs relu | {INTEGERS} f32 f64 {HALVES} | 2
min3 max3 | ftz NaN | f32 | 3
addx2 | | s16x2 u16x2 | 2
minx2 maxx2 | relu | s16x2 u16x2 | 2
and or xor | | pred {BITS} | 2
not | | pred {BITS} | 1
cnot | | {BITS} | 1
shl | | {BITS} | 2
shr | | {BITS} {INTEGERS} | 2
sad | | {INTEGERS} | 3
popc clz brev | | b32 b64 | 1
bfind | shiftamt | u32 u64 s32 s64 | 1
fns | | b32 | 3
bfe | | u32 u64 s32 s64 | 3
bfi | | b32 b64 | 4
mul24 | hi lo | u32 s32 | 2
mad24 | hi lo | u32 s32 | 3
shf.l shf.r | clamp wrap | b32 | 3
lop3 | | b32 | 4
dp4a | | u32 s32 | u32 s32 | 3
dp2a | hi lo | u32 s32 | u32 s32 | 3
sqrt rcp rsqrt | approx rn rz rm rp ftz | f32 f64 | 1
sin cos lg2 | approx ftz | f32 | 1
ex2 tanh | approx ftz | f32 {HALVES} | 1
copysign | | f32 f64 | 2
selp | | {SCALARS} | 3
slct | ftz | {SCALARS} | s32 f32 | 3
""")

_SMALL = names("f16 bf16")
_NUMBERS = names(f"u8 s8 {INTEGERS} f32 f64") | _SMALL
_PAIRS = names("f16x2 bf16x2 e4m3x2 e5m2x2")
_COMPARED = names(f"{SCALARS} {HALVES}")
_PACKED = ("f16x2", "bf16x2")
_COMBINATIONS = {"and": "&", "or": "|", "xor": "^"}
_COMPARISONS = names("eq ne lt le gt ge lo ls hi hs equ neu ltu leu gtu geu num nan")


def compute(name: str, words: list[str], operands: list[str], scope: Scope) -> str:
    """An instruction of the table."""
    if "cc" in words:
        return with_carry(name, words, operands, scope)
    first = name.partition(".")[0]
    if first == "shf" and words:
        first, words = f"shf.{words[0]}", words[1:]
    if first in ("min", "max") and len(operands) == 4:  # from sm_100 on
        first += "3"
    if words[-1:] == ["relu"]:  # min.s16x2.relu is min.relu.s16x2
        words = [*words[:-2], "relu", words[-2]]
    if words[-1:] in (["s16x2"], ["u16x2"]):
        first += "x2"
    form = _FORMS.get(first)
    if not form:
        raise Unknown(name)
    small = None
    if first in ("add", "sub", "fma") and words[-2:-1] == ["f32"] and words[-1] in _SMALL:  # from sm_100 on
        *words, small = words
    words, types = words[: -len(form.types)], words[-len(form.types) :]
    allowed = len(types) == len(form.types) and all(map(frozenset.__contains__, form.types, types))
    expect(name, operands, 1 + form.sources, allowed and form.words.issuperset(words))
    values = list(map(scope.value, operands[1:]))
    if small:
        values[:-1] = [call("cvt", [f"{P}f32", P + small, flags([])], [value]) for value in values[:-1]]
    value = call(first, [*map(P.__add__, types), flags(words)], values)
    return assign(operands[0], value, scope)


def with_carry(name: str, words: list[str], operands: list[str], scope: Scope) -> str:
    """`add.cc.u32 d, a, b;` keeps the carry, `addc.cc.u32` adds the one that was kept: sums of many words."""
    first, kind = name.partition(".")[0], words[-1]
    base, takes = first[:3], len(first) == 4
    parts = [word for word in words[:-1] if word in ("hi", "lo")]
    keeps = "cc" in words
    known = base in ("add", "sub", "mad") and len(parts) == (base == "mad") and kind in ("u32", "s32", "u64", "s64")
    expect(name, operands, 4 if base == "mad" else 3, known and len(words) == 1 + keeps + len(parts))
    arguments = [P + kind, flags([*parts, *["cc"] * keeps]), "true" if takes else "false"]
    return assign(operands[0], call(f"{base}_with_carry", arguments, map(scope.value, operands[1:])), scope)


def move(name: str, words: list[str], operands: list[str], scope: Scope) -> str:
    """`mov.b64 {low, high}, x`: the bits, whatever the type."""
    expect(name, operands, 2, len(words) == 1 and words[0] in names(f"pred b128 {SCALARS} f16x2 bf16x2"))
    bits = int(re.search(r"\d+$", words[0].replace("x2", ""))[0]) if words[0] != "pred" else 0
    target, source = operands
    if words[0] == "pred":
        return assign(target, f"(bool){scope.value(source)}", scope)
    if source.startswith("{"):
        value = vector(f"b{bits // len(elements(source))}", source, scope)
        return assign(target, f"{P}cast_bits<{P}b{bits}>({value})", scope)
    value = f"{P}b{bits}({scope.value(source)})"
    if target.startswith("{"):
        count = len(elements(target))
        value = f"{P}cast_bits<{P}Vector<{P}b{bits // count}, {count}>>({value})"
    return assign(target, value, scope)


def _compared(
    name: str, operands: list[str], comparison: str, rest: list[str], known: bool
) -> tuple[list[str], str | None]:
    """The modifiers of a comparison, and how its answer is combined with a predicate."""
    combined = next((word for word in rest if word in _COMBINATIONS), None)
    rest = [word for word in rest if word != combined]
    expect(name, operands, 4 if combined else 3, known and comparison in _COMPARISONS and {"ftz"}.issuperset(rest))
    return rest, combined


def set_predicate(name: str, words: list[str], operands: list[str], scope: Scope) -> str:
    """`setp.lt.and.s32 p|q, a, b, c`: p = (a < b) and c, q = (not a < b) and c. Of a pair: its two answers."""
    comparison, *rest, kind = words if len(words) > 1 else ("", "")
    rest, combined = _compared(name, operands, comparison, rest, kind in _COMPARED)
    targets = [part.strip() for part in operands[0].split("|")]
    arguments = [f"{P}Compare::{comparison}", P + kind, flags(rest)]
    holds = f"auto holds = {call('compare', arguments, map(scope.value, operands[1:3]))};"
    sign = _COMBINATIONS[combined] if combined else ""
    other = f"bool other = {scope.value(operands[3])};" if combined else ""
    truths = ("holds.x", "holds.y") if kind in _PACKED else ("holds", "!holds")
    results = [f"{truth} {sign} other" if combined else truth for truth in truths]
    outs = [f"{scope.variable(t)} = {r};" for t, r in zip(targets, results, strict=False) if t != "_"]
    return f"{{ {holds} {other} {' '.join(outs)} }}"


def set_value(name: str, words: list[str], operands: list[str], scope: Scope) -> str:
    """`set.le.u32.f32 d, a, b`: all ones, or 1.0, where it holds. `set.le.and.u32.f32 d, a, b, c`: and c holds."""
    comparison, *rest, result, kind = words if len(words) > 2 else ("", "", "")
    if kind in _PACKED:
        known = result in (kind, "u32", "s32")
    else:
        known = result in names("u16 s16 u32 s32 f32 f16 bf16") and kind in _COMPARED
    rest, combined = _compared(name, operands, comparison, rest, known)
    arguments = [f"{P}Compare::{comparison}", P + result, P + kind, flags(rest)]
    other = f"(bool){scope.value(operands[3])}" if combined else ""
    combine = f"[&](bool holds) {{ return holds {_COMBINATIONS[combined]} {other}; }}" if combined else f"{P}Itself{{}}"
    return assign(operands[0], call("set", arguments, [*map(scope.value, operands[1:3]), combine]), scope)


def convert(name: str, words: list[str], operands: list[str], scope: Scope) -> str:
    """`cvt.rn.f16x2.f32 d, high, low`; `cvt.pack.sat.s8.s32.b32 d, high, low, above`."""
    if words[:2] == ["pack", "sat"]:
        known = words[2] in ("s8", "u8", "s16", "u16") and words[3] == "s32"
        expect(name, operands, 3 + (len(words) == 5), known)
        values = map(scope.value, operands[1:3] + (operands[3:] or ["0"]))
        return assign(operands[0], call("cvt_pack", [P + words[2], P + words[3], "0"], values), scope)
    *rest, to, source = words if len(words) > 1 else ("", "")
    pairs = [("f16x2", "e4m3x2"), ("f16x2", "e5m2x2"), ("e4m3x2", "f16x2"), ("e5m2x2", "f16x2")]
    joins = to in _PAIRS and source == "f32"
    known = joins or (to, source) in [*pairs, ("tf32", "f32")] or {to, source} <= _NUMBERS
    expect(name, operands, 3 if joins else 2, known)
    value = call("cvt", [P + to, P + source, flags(rest)], map(scope.value, operands[1:]))
    return assign(operands[0], value, scope)


def permute(name: str, words: list[str], operands: list[str], scope: Scope) -> str:
    """`prmt.b32.f4e d, a, b, selector`"""
    modes = ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
    mode = words[1].upper() if len(words) == 2 and words[1] in modes else "ANY"
    expect(name, operands, 4, words[:1] == ["b32"] and (len(words) == 1 or mode != "ANY"))
    return assign(operands[0], call("prmt", [f"{P}{mode}"], map(scope.value, operands[1:])), scope)


def test(name: str, words: list[str], operands: list[str], scope: Scope) -> str:
    """`testp.infinite.f32 p, a`"""
    properties = ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    expect(name, operands, 2, len(words) == 2 and words[0] in properties and words[1] in ("f32", "f64"))
    return assign(operands[0], call(f"is_{words[0]}", [P + words[1]], [scope.value(operands[1])]), scope)


ARITHMETIC: dict[str, Instruction] = {
    **dict.fromkeys(("addc", "subc", "madc"), with_carry),
    "mov": move,
    "setp": set_predicate,
    "set": set_value,
    "cvt": convert,
    "prmt": permute,
    "testp": test,
}
