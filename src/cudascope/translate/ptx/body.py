"""The text of an asm statement as C++: its blocks, labels and predicates.

    { .reg .pred p; setp.ne.b32 p, %1, 0; @p st.global.b32 [%0], 7; }

A register is a variable in C++'s block; a branch is a goto.
"""

import re
from collections.abc import Mapping

from cudascope.translate.ptx.arithmetic import ARITHMETIC, compute
from cudascope.translate.ptx.bulk import BULK
from cudascope.translate.ptx.matrix import MATRIX
from cudascope.translate.ptx.memory import MEMORY
from cudascope.translate.ptx.scope import Malformed, Scope, Unknown
from cudascope.translate.ptx.threads import THREADS

_INSTRUCTIONS = BULK | ARITHMETIC | MEMORY | THREADS | MATRIX
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_PIECE = re.compile(r"\s*(?:([{}])|([A-Za-z_$][\w$]*)\s*:(?!:)|([^\s;{}][^;]*);?|;)")
_REGISTERS = re.compile(r"\.reg\s*\.(\w+)\s+(.*)", re.DOTALL)
INSTRUCTION = re.compile(r"(?:@\s*(!?)\s*([\w%$]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)


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
    """One instruction of an asm statement. One that is not known stops the kernel where it gets there."""
    if not INSTRUCTION.fullmatch(text):
        return stop(text)
    name, words, operands = _parts(text)
    try:
        statement = _INSTRUCTIONS.get(words.pop(0), compute)(name, words, operands, scope)
    except Unknown as error:
        statement = stop(str(error))
    return _guarded(statement, text, scope)


def _parts(text: str) -> tuple[str, list[str], list[str]]:
    """The name of an instruction, the words of the name, and the operands."""
    _, _, name, operands = INSTRUCTION.fullmatch(text).groups()
    return name, name.split("."), split_operands(operands)


def _guarded(statement: str, text: str, scope: Scope) -> str:
    condition = predicate_of(text, scope)
    return f"if ({condition}) {{ {statement} }}" if condition else statement


def predicate_of(text: str, scope: Scope) -> str:
    """Return the C++ condition under which `@p instruction` is executed. Without a predicate, return ""."""
    negated, predicate, *_ = INSTRUCTION.fullmatch(text).groups()
    return f"{negated}{scope.variable(predicate)}" if predicate else ""


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

    Unknown: the CPU runner does not have the instruction. Malformed: no assembler would take it.
    """
    if not INSTRUCTION.fullmatch(text):
        raise Malformed("no instruction")
    name, (first, *words), operands = _parts(text)
    if name in ("ret", "ret.uni"):
        statement = "return;"
    elif first == "brx":
        index, labels = operands
        cases = " ".join(f"case {i}: goto {scope.label(each)};" for i, each in enumerate(targets[labels]))
        statement = f"switch ((uint32_t){scope.value(index)}) {{ {cases} }}"
    elif first == "tcgen05":
        raise Unknown(f"{name}, an instruction of tensor memory (sm_100): compile the kernel for another architecture")
    else:
        statement = _INSTRUCTIONS.get(first, compute)(name, words, operands, scope)
    return _guarded(statement, text, scope)


def stop(what: str) -> str:
    """The kernel ends where it gets to what is not known."""
    written = what.replace("\\", " ").replace('"', "'").replace("\n", " ")
    return f'simt_lacks("inline PTX: the CPU runner does not know {written}");'


def split_operands(operands: str) -> list[str]:
    """At the commas outside brackets."""
    parts, depth = [""], 0
    for character in operands:
        depth += (character in "[{(") - (character in "]})")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]
