"""The text of an asm statement as C++: its blocks, registers, labels, predicates and operands.

    { .reg .pred p; setp.ne.b32 p, %1, 0; @p st.global.b32 [%0], 7; }

A register is a variable in C++'s block; a branch is a goto.
"""

import re
from collections.abc import Mapping

from pagewise.cuda.simt.ptx.arithmetic import ARITHMETIC, compute
from pagewise.cuda.simt.ptx.calls import Malformed, P, Unknown
from pagewise.cuda.simt.ptx.matrix import MATRIX
from pagewise.cuda.simt.ptx.memory import MEMORY
from pagewise.cuda.simt.ptx.threads import SPECIAL_REGISTERS, THREADS

_INSTRUCTIONS = ARITHMETIC | MEMORY | THREADS | MATRIX
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_PIECE = re.compile(r"\s*(?:([{}])|([A-Za-z_$][\w$]*)\s*:(?!:)|([^\s;{}][^;]*);?|;)")
_REGISTERS = re.compile(r"\.reg\s*\.(\w+)\s+(.*)", re.DOTALL)
_INSTRUCTION = re.compile(r"(?:@\s*(!?)\s*([\w%$]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_ADDRESS = re.compile(r"\[\s*(%\[\w+\]|[^\s+\-\[\]]+)\s*(?:([+-])\s*([^\s\]]+))?\s*\]")
_BITS = {
    "pred": "bool",
    "8": "uint8_t",
    "16": "uint16_t",
    "32": "uint32_t",
    "64": "uint64_t",
    "128": "unsigned __int128",
}


def body(template: str, names: Mapping[str, str], number: int) -> str:
    """C++ for `template`. `names`: the variable of each operand. `number` tells its labels from other statements'."""
    scopes = [_Scope(dict(names), number)]
    position, text = 0, _COMMENT.sub(" ", template).strip()
    while position < len(text):
        brace, label, piece = (match := _PIECE.match(text, position)).groups()
        position = match.end()
        scope = scopes[-1]
        if brace == "{":
            scopes.append(_Scope(dict(scope.names), number))
        elif brace and len(scopes) == 1:
            raise Malformed("a } without its {")
        elif brace:
            inner = scopes.pop()
            scopes[-1].statements.append(inner.cpp())
        elif label:
            scope.statements.append(f"{scope.label(label)}:;")
        elif piece and (declared := _REGISTERS.fullmatch(piece.strip())):
            scope.declare(declared[1], declared[2])
        elif piece:
            scope.statements.append(_instruction(piece.strip(), scope))
    if len(scopes) > 1:
        raise Malformed("a { without its }")
    return scopes[0].cpp()


class _Scope:
    """A block under way: the variable of each register, those it declares itself, and its statements."""

    def __init__(self, names: dict[str, str], number: int) -> None:
        self.names, self.number = names, number
        self.declared: list[str] = []
        self.statements: list[str] = []

    def cpp(self) -> str:
        return " ".join(["{", *self.declared, *self.statements, "}"])

    def declare(self, kind: str, written: str) -> None:
        """`.reg .b32 a, b;` or `.reg .f32 r<4>;`"""
        bits = _BITS.get(kind.lstrip("busf")) or _BITS.get(
            {"f16x2": "32", "bf16x2": "32", "bf16": "16"}.get(kind, kind)
        )
        if bits is None:
            raise Malformed(f"a register of type .{kind}")
        for name in re.split(r"\s*,\s*", written.strip()):
            many = re.fullmatch(r"([\w%$]+)<(\d+)>", name)
            for each in [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]:
                self.names[each] = "simt_" + re.sub(r"\W", "_", each)
                self.declared.append(f"{bits} {self.names[each]}{{}};")

    def label(self, name: str) -> str:
        return f"simt_{name.replace('$', '_')}_{self.number}"

    # ------------------------------------------------------------------------------------------ operands

    def variable(self, written: str) -> str:
        """The C++ variable of a register."""
        if written not in self.names:
            raise Malformed(f"{written} is no operand and no register of this statement")
        return self.names[written]

    def value(self, written: str) -> str:
        """An operand that is read: something that turns into the type it is needed in."""
        if written.startswith("!"):
            return f"{P}in(!{self.variable(written[1:].strip())})"
        if written in self.names:
            return f"{P}in({self.names[written]})"
        if written in SPECIAL_REGISTERS:
            return f"{P}in({SPECIAL_REGISTERS[written]})"
        if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", written):
            return f"{P}Real<float>{{{P}cast_bits<float>(0x{match[1]}u)}}"
        if match := re.fullmatch(r"0[dD]([0-9a-fA-F]{16})", written):
            return f"{P}Real<double>{{{P}cast_bits<double>(0x{match[1]}ull)}}"
        if re.fullmatch(r"-?\d*\.\d+([eE][+-]?\d+)?|-?\d+\.\d*([eE][+-]?\d+)?", written):
            return f"{P}Real<double>{{{float(written)!r}}}"
        if match := re.fullmatch(r"(-?)\s*(0[xXbB][\da-fA-F]+|0[0-7]*|[1-9]\d*)U?", written):
            number = match[2]
            value = int(number, 8 if re.fullmatch(r"0\d+", number) else 0) * (-1 if match[1] else 1)
            return f"{P}Integer{{{value % 2**64:#x}ull}}"
        if written.startswith("%") and not written[1:2].isdigit():
            raise Unknown(written)
        raise Malformed(f"{written} is no operand, no register and no number")

    def address(self, written: str) -> tuple[str, str]:
        """`[register + offset]` as what is read and the offset in C++."""
        match = _ADDRESS.fullmatch(written)
        if not match:
            raise Malformed(f"an address is written [register + offset], got {written}")
        register, sign, offset = match.groups()
        return self.value(register), f"{sign or ''}(int64_t)({self.value(offset)})" if offset else "0"


def _instruction(text: str, scope: _Scope) -> str:
    match = _INSTRUCTION.fullmatch(text)
    if not match:
        raise Malformed(f"{text} is no instruction")
    negated, predicate, name, operands = match.groups()
    try:
        first, *words = name.split(".")
        statement = _INSTRUCTIONS.get(first, compute)(name, words, _split(operands), scope)
    except Unknown as error:
        what = f"inline PTX: the CPU runner does not know {error}"
        statement = f'simt_fail("{what}");'
    return f"if ({negated}{scope.variable(predicate)}) {{ {statement} }}" if predicate else statement


def _split(operands: str) -> list[str]:
    """At the commas outside brackets."""
    parts, depth = [""], 0
    for character in operands:
        depth += (character in "[{(") - (character in "]})")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]
