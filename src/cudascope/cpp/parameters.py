"""One parameter of a kernel: its name, its type, and what C++ passes if a launch leaves it out."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from cudascope.cpp.file import AMBIGUOUS
from cudascope.cpp.outline import ATTRIBUTES
from cudascope.cpp.tokens import Tokens, partners, substitute

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
_FUNDAMENTAL = {"bool", "char", "short", "int", "long", "float", "double", "signed", "unsigned", "void"}
_PLAIN = {f"{u}{kind}" for u in ("", "unsigned ") for kind in ("char", "short", "int", "long", "long long")}
_PLAIN |= {"bool", "float", "double", "void"}
_SAME = {
    "half": "__half",
    "half2": "__half2",
    "nv_bfloat16": "__nv_bfloat16",
    "nv_bfloat162": "__nv_bfloat162",
    "uint": "unsigned int",
    "ushort": "unsigned short",
    "ulong": "unsigned long",
    "uchar": "unsigned char",
    "__nv_fp8_storage_t": "unsigned char",
    "__nv_fp8x2_storage_t": "unsigned short",
    "__nv_fp8x4_storage_t": "unsigned int",
    "__half_raw": "__half",
    "__nv_bfloat16_raw": "__nv_bfloat16",
    "cudaTextureObject_t": "unsigned long long",
    "cudaSurfaceObject_t": "unsigned long long",
}

_TORCHS = {
    "Half": "__half",
    "BFloat16": "__nv_bfloat16",
    "Float8_e4m3fn": "__nv_fp8_e4m3",
    "Float8_e5m2": "__nv_fp8_e5m2",
}


class Parameter(NamedTuple):
    """A parameter of a kernel as the source declares it."""

    name: str
    ctype: str  # "int", "__half", …; of a pointer, what it points to
    pointer: bool
    const: bool
    default: str = ""  # the C++ expression
    bytes: int = 0  # of a type that only the compiler knows: its size and its alignment
    alignment: int = 1


def read_parameter(position: int, declared: Tokens, function: str, known: Mapping[str, Tokens]) -> Parameter:
    """Parameter `position` of kernel `function`. A type that is not plain keeps its spelling.

    Raises:
        ValueError: nothing of Python's could be passed for it.
    """
    tokens, default = list(declared), ""
    if "=" in declared:
        equals = declared.index("=")
        tokens, default = declared[:equals], " ".join(substitute(declared[equals + 1 :], known))
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
    has_name = len(bare) > 1 and bare[-1] not in _FUNDAMENTAL and bare[-1].isidentifier() and bare[-2] != "::"
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
    return Parameter(name, ctype, pointer, const, default)


def spelled(parameter: Parameter) -> str:
    """A parameter's type as C++ spells it."""
    return f"{'const ' * (parameter.const and parameter.pointer)}{parameter.ctype}{'*' * parameter.pointer}"


def type_of(tokens: Tokens) -> tuple[str, bool, bool]:
    """Return the type, or the type it points to; whether it is a pointer; and whether it points to const."""
    while tokens[-1:] == ["const"] and "*" in tokens:
        tokens = tokens[:-1]
    pointer = tokens[-1:] == ["*"]
    tokens = tokens[:-1] if pointer else tokens
    value = [token for token in tokens if token not in _QUALIFIERS | {"const"}]
    const = tokens[-1:] == ["const"] if "*" in tokens else "const" in tokens
    return canonical_type(value) or re.sub(r" ?(::|<) ?| (?=[>,*])", r"\1", " ".join(value)), pointer, const


def canonical_type(tokens: Tokens) -> str | None:
    """One spelling per type: `unsigned` is "unsigned int", `half` is "__half". None for other types."""
    if tokens[:1] == ["::"] or tokens[:2] == ["std", "::"]:
        tokens = tokens[1 + (tokens[0] == "std") :]
    if tokens and all(token in _FUNDAMENTAL for token in tokens):
        if sorted(tokens) == ["char", "signed"]:
            return "signed char"
        name = " ".join(sorted((token for token in tokens if token not in ("int", "signed")), reverse=True))
        name = f"{name} int".strip() if name in ("", "unsigned") else name
        return name if name in _PLAIN else None
    if tokens[:-1] in (["c10", "::"], ["at", "::"], ["torch", "::"]) and tokens[-1] in _TORCHS:
        return _TORCHS[tokens[-1]]
    if len(tokens) == 1 and tokens[0].isidentifier():
        return _SAME.get(tokens[0], tokens[0])
    return None
