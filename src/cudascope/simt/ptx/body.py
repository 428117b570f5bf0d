"""The text of an asm statement as C++: its blocks, labels and predicates.

    { .reg .pred p; setp.ne.b32 p, %1, 0; @p st.global.b32 [%0], 7; }

A register is a variable in C++'s block; a branch is a goto.
"""

import re
from collections.abc import Mapping

from cudascope.simt.ptx.arithmetic import ARITHMETIC, compute
from cudascope.simt.ptx.bulk import BULK
from cudascope.simt.ptx.matrix import MATRIX
from cudascope.simt.ptx.memory import MEMORY
from cudascope.simt.ptx.scope import Malformed, Scope, Unknown
from cudascope.simt.ptx.threads import THREADS

_INSTRUCTIONS = BULK | ARITHMETIC | MEMORY | THREADS | MATRIX
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_PIECE = re.compile(r"\s*(?:([{}])|([A-Za-z_$][\w$]*)\s*:(?!:)|([^\s;{}][^;]*);?|;)")
_REGISTERS = re.compile(r"\.reg\s*\.(\w+)\s+(.*)", re.DOTALL)
_INSTRUCTION = re.compile(r"(?:@\s*(!?)\s*([\w%$]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)


def body(template: str, names: Mapping[str, str], number: int) -> str:
    """C++ for `template`. `names`: the variable of each operand. `number` tells its labels from other statements'."""
    scopes = [Scope(dict(names), number)]
    position, text = 0, _COMMENT.sub(" ", template).strip()
    while position < len(text):
        brace, label, piece = (match := _PIECE.match(text, position)).groups()
        position = match.end()
        scope = scopes[-1]
        if brace == "{":
            scopes.append(Scope(dict(scope.names), number))
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


def _instruction(text: str, scope: Scope) -> str:
    match = _INSTRUCTION.fullmatch(text)
    if not match:
        return stop(text)
    negated, predicate, name, operands = match.groups()
    try:
        first, *words = name.split(".")
        statement = _INSTRUCTIONS.get(first, compute)(name, words, _split(operands), scope)
    except Unknown as error:
        statement = stop(str(error))
    return f"if ({negated}{scope.variable(predicate)}) {{ {statement} }}" if predicate else statement


def declared_registers(text: str, scope: Scope) -> str:
    """The variables of a `.reg` directive."""
    match = _REGISTERS.fullmatch(text)
    if not match:
        raise Malformed("a .reg that declares nothing")
    before = len(scope.declared)
    scope.declare(match[1], match[2])
    return " ".join(scope.declared[before:])


def translated(text: str, scope: Scope, targets: Mapping[str, list[str]]) -> str:
    """One instruction of a kernel. `targets`: the labels of each list that a `brx.idx` chooses from.

    Raises:
        Unknown: the CPU runner does not have the instruction.
        Malformed: no assembler would take it.
    """
    match = _INSTRUCTION.fullmatch(text)
    if not match:
        raise Malformed("no instruction")
    negated, predicate, name, operands = match.groups()
    first, *words = name.split(".")
    if name in ("ret", "ret.uni"):
        statement = "return;"
    elif first == "brx":
        index, labels = _split(operands)
        cases = " ".join(f"case {i}: goto {scope.label(each)};" for i, each in enumerate(targets[labels]))
        statement = f"switch ((uint32_t){scope.value(index)}) {{ {cases} }}"
    else:
        words = [word for word in words if word != "uni"] if first == "bra" else words
        statement = _INSTRUCTIONS.get(first, compute)(name, words, _split(operands), scope)
    return f"if ({negated}{scope.variable(predicate)}) {{ {statement} }}" if predicate else statement


def stop(what: str) -> str:
    """The kernel ends where it gets to what is not known."""
    written = what.replace("\\", " ").replace('"', "'").replace("\n", " ")
    return f'simt_lacks("inline PTX: the CPU runner does not know {written}");'


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
