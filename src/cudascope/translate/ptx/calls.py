"""The parts of the translation of a PTX instruction: its operands, and a call of a C++ function with them."""

import re
from collections.abc import Callable, Iterable

from cudascope.translate.ptx.scope import Malformed, P, Scope, Unknown

# (name, its words after the first, operands, scope) -> a C++ statement
Instruction = Callable[[str, list[str], list[str], Scope], str]

INTEGERS = "u16 u32 u64 s16 s32 s64"
BITS = "b16 b32 b64"
HALVES = "f16 f16x2 bf16 bf16x2"
SCALARS = f"{BITS} {INTEGERS} f32 f64"


def names(written: str) -> frozenset[str]:
    """Return the words of a text, as a set of names."""
    return frozenset(written.split())


_WORDS = "rn rz rm rp rni rzi rmi rpi rna ftz sat satfinite relu hi lo wide clamp wrap shiftamt xorsign cc"
_FLAGS = {word: P + word.upper() for word in _WORDS.split()}
_FLAGS |= {"NaN": f"{P}NAN_WINS"} | dict.fromkeys(("approx", "full", "abs"), "0")  # the latter change nothing here


def expect(name: str, operands: list[str], count: int, known: bool = True) -> None:
    """Raise Unknown for an instruction that is not known, and Malformed for another number of operands."""
    if not known:
        raise Unknown(name)
    if len(operands) != count:
        raise Malformed(f"{name} has {count} operands, got {len(operands)}")


def always(statement: str) -> Instruction:
    """An instruction that is the same statement whatever its operands."""
    return lambda name, words, operands, scope: statement


def call(function: str, arguments: Iterable[str], sources: Iterable[str]) -> str:
    """`function<arguments>(sources)` of simt/ptx.h."""
    function = {"and": "and_", "or": "or_", "xor": "xor_", "not": "not_"}.get(function, function.replace(".", "_"))
    return f"{P}{function}<{', '.join(arguments)}>({', '.join(sources)})"


def flags(words: Iterable[str]) -> str:
    """The modifiers of an instruction, as an argument of its template. Raises Unknown."""
    try:
        return " | ".join(_FLAGS[word] for word in words) or "0"
    except KeyError as error:
        raise Unknown(f"the modifier .{error.args[0]}") from None


def elements(written: str) -> list[str]:
    """Return the elements of `{a, b}`, or `a` alone."""
    return [part.strip() for part in written.strip("{} \n").split(",")]


def in_scope(words: list[str], statement: str) -> str:
    """Return a statement on memory as one of block scope, if the words say `.cta`."""
    return f"{{ simt::Scope within(true); {statement} }}" if "cta" in words else statement


def vector(kind: str, written: str, scope: Scope) -> str:
    """`{a, b}`, or `a` alone, as a vector of C++."""
    parts = elements(written)
    return f"{P}Vector<{P}{kind}, {len(parts)}>{{{{{', '.join(map(scope.value, parts))}}}}}"


def assign(target: str, value: str, scope: Scope) -> str:
    """`d = value`; `d|p`: an answer and whether it holds; `{a, b}`: a vector; `_`: nobody wants it."""
    if target == "_":
        return f"(void){value};"
    parts = [part.strip() for part in re.split(r"[{},|]", target) if part.strip()]
    if target.startswith("{"):
        fields = [f"answer.x[{i}]" for i in range(len(parts))]
    elif len(parts) == 2:
        fields = ["answer.value", "answer.there"]
    else:
        return f"{P}out({scope.variable(target)}, {value});"
    outs = [f"{P}out({scope.variable(p)}, {f});" for p, f in zip(parts, fields, strict=True) if p != "_"]
    return f"{{ auto answer = {value}; {' '.join(outs)} }}"
