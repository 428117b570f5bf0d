"""One parameter of a kernel: its name, its type, and what C++ passes if a launch leaves it out."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from cudascope.cpp.constants import Value
from cudascope.cpp.definitions import ConstantError, Scope
from cudascope.cpp.file import AMBIGUOUS
from cudascope.cpp.outline import ATTRIBUTES
from cudascope.cpp.tokens import Tokens, partners, substitute, text_of
from cudascope.cpp.types import FUNDAMENTAL, canonical_type

_QUALIFIERS = {
    "volatile",
    "__restrict__",
    "__restrict",
    "restrict",
    "__grid_constant__",
    "typename",
    "register",
    "struct",
    "class",
    "enum",
}


class Default(NamedTuple):
    """The C++ expression that a parameter has by default, and its value; its number is None if it cannot be told."""

    text: str
    value: Value


class Parameter(NamedTuple):
    """A parameter of a kernel as the source declares it."""

    name: str
    ctype: str  # "int", "__half", …; of a pointer, what it points to
    pointer: bool
    const: bool
    default: Default | None = None
    bytes: int = 0  # of a type that only the compiler knows: its size and its alignment
    alignment: int = 1


def read_parameter(
    position: int, declared: Tokens, function: str, known: Mapping[str, Tokens], scope: Scope
) -> Parameter:
    """Parameter `position` of kernel `function`. A type that is not plain keeps its spelling.

    `known` says which tokens names stand for in a type, `scope` what they mean in the default argument.

    Raises:
        ValueError: nothing of Python's could be passed for it, or its default argument has no value in C++.
    """
    equals = declared.index("=") if "=" in declared else len(declared)
    tokens, expression = list(declared[:equals]), declared[equals + 1 :]
    while tokens[:2] == ["[", "["]:
        del tokens[: partners(tokens).get(0, 1) + 1]
    for attribute in ATTRIBUTES & set(tokens):
        start = tokens.index(attribute)
        del tokens[start : partners(tokens).get(start + 1, start) + 1]
    if "(" in tokens and tokens[(start := tokens.index("(")) + 1] in ("*", "&", "&&"):  # of arrays: `float (*x)[8]`
        end = partners(tokens).get(start, start)
        if tokens[end + 1 : end + 2] == ["["]:
            tokens = tokens[:start] + tokens[start + 1 : end]
    is_array = "[" in tokens
    tokens = tokens[: tokens.index("[")] if is_array else tokens
    tokens = [token for token in tokens if token not in _QUALIFIERS]

    bare = [token for token in tokens if token not in ("const", "*", "&", "&&")]
    has_name = len(bare) > 1 and bare[-1] not in FUNDAMENTAL and bare[-1].isidentifier() and bare[-2] != "::"
    name = bare[-1] if has_name else f"#{position}"
    written = " ".join(tokens[:-1] if has_name else tokens) + (" *" if is_array else "")
    tokens = substitute(tokens[:-1] if has_name else tokens, known) + (["*"] if is_array else [])
    tokens = [token for token in tokens if token not in _QUALIFIERS]

    def refuse(why: str) -> ValueError:
        return ValueError(f"kernel {function}: parameter {name} is declared `{written}`, {why}")

    if tokens[-1:] in (["&"], ["&&"]):
        raise refuse("a reference, which a kernel cannot take: pass the value or a pointer")
    ctype, pointer, const = type_of(tokens)
    if ctype == "void" and not pointer:
        raise refuse("which is no type of a value")
    if AMBIGUOUS in tokens:
        ctype = written.rstrip(" *")
    try:
        default = Default(text_of(expression), scope.evaluate(expression)) if expression else None
    except ConstantError as error:
        raise ValueError(f"kernel {function}: the default of {name}, {error}") from None
    return Parameter(name, ctype, pointer, const, default)


def spelled(parameter: Parameter) -> str:
    """A parameter's type as C++ spells it, or PTX."""
    pointer = parameter.pointer and not parameter.ctype.startswith(".")
    return f"{'const ' * (parameter.const and pointer)}{parameter.ctype}{'*' * pointer}"


def type_of(tokens: Tokens) -> tuple[str, bool, bool]:
    """Return the type, or the type it points to; whether it is a pointer; and whether it points to const."""
    while tokens[-1:] == ["const"] and "*" in tokens:
        tokens = tokens[:-1]
    pointer = tokens[-1:] == ["*"]
    tokens = tokens[:-1] if pointer else tokens
    value = [token for token in tokens if token not in _QUALIFIERS | {"const"}]
    const = tokens[-1:] == ["const"] if "*" in tokens else "const" in tokens
    return canonical_type(value) or re.sub(r" ?(::|<) ?| (?=[>,*])", r"\1", " ".join(value)), pointer, const
