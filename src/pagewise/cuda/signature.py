"""The parameters of a CUDA kernel, read from its source text.

CUDA's launch takes a list of addresses and trusts them: an int where the kernel declares an int64_t is silently half
garbage. So the declaration itself is read here, and what Python passes is converted to exactly that.

Understood: comments, attributes, qualifiers, default arguments, `typedef`, `using A = B`, `#define A B`, namespaces,
#if and #ifdef over what the text or the command line defines, and templates over types and values with their defaults,
instantiated as in `softmax<float, 128>`. A declaration that needs more of C++ than that (a trait, a struct by value, a
reference) is refused with the parameter's name.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pagewise.cuda.declarations import ATTRIBUTES, Declaration, find_kernel
from pagewise.cuda.names import AMBIGUOUS, read_names
from pagewise.cuda.tokens import NAME, Tokens, evaluate, matching, split, substitute, tokens_of

_QUALIFIERS = {"volatile", "__restrict__", "__restrict", "restrict", "__grid_constant__", "typename", "register"}
_FUNDAMENTAL = {"bool", "char", "short", "int", "long", "float", "double", "signed", "unsigned", "void"}
_PLAIN = {f"{u}{kind}" for u in ("", "unsigned ") for kind in ("char", "short", "int", "long", "long long")}
_PLAIN |= {"bool", "float", "double", "void"}
_ABBREVIATED = {"half": "__half", "half2": "__half2", "nv_bfloat16": "__nv_bfloat16", "nv_bfloat162": "__nv_bfloat162"}


class Parameter(NamedTuple):
    """A parameter of a kernel as the source declares it."""

    name: str
    ctype: str  # "int", "__half", …; of a pointer, what it points to
    pointer: bool
    const: bool


class Signature(NamedTuple):
    """A kernel as its source declares it. `max_threads` is what `__launch_bounds__` promises, if it is known."""

    function: str
    parameters: tuple[Parameter, ...]
    max_threads: int | None


def read_signature(source: str, name: str, defines: Sequence[str] = ()) -> Signature:
    """The signature of kernel `name` ("scale", "softmax<float, 128>") in `source`; `defines` as for the compiler.

    Raises:
        ValueError: no `__global__` function has this name (the message lists those there are), template arguments do
            not fit, or a parameter's type cannot be told.
    """
    path, arguments = _split_instantiation(name)
    tokens, named = read_names(source, defines)
    read, attributes, known = [], {}, named
    for declaration in find_kernel(tokens, path, name):
        known = {**named, **_template_arguments(name, declaration.template, arguments)}
        read.append(_parameters(declaration, known))
        attributes |= declaration.attributes
    if different := [each for each in read if _types(each) != _types(read[0])]:
        first, second = (
            ", ".join(f"{p.ctype}{'*' * p.pointer} {p.name}" for p in each) for each in (read[0], different[0])
        )
        raise ValueError(
            f"name: kernel {path[-1]!r} is declared more than once with different parameters, ({first}) and "
            f"({second}): rename one, or choose by #ifdef of a name that is given in `defines`"
        )
    bounds = split(attributes.get("__launch_bounds__", []))
    max_threads = evaluate(" ".join(substitute(bounds[0], known))) if bounds else None
    return Signature(path[-1], read[-1], max_threads)


def _parameters(declaration: Declaration, known: Mapping[str, Tokens]) -> tuple[Parameter, ...]:
    return tuple(
        _parameter(position, declared, declaration.function, known)
        for position, declared in enumerate(split(declaration.parameters))
        if declared != ["void"]
    )


def _types(parameters: Sequence[Parameter]) -> list[tuple[str, bool]]:
    return [(parameter.ctype, parameter.pointer) for parameter in parameters]


def _split_instantiation(name: str) -> tuple[tuple[str, ...], list[Tokens]]:
    """Split "ns::softmax<float, 128>" into ("ns", "softmax") and [["float"], ["128"]]."""
    match = re.fullmatch(r"\s*(?:::)?((?:\w+\s*::\s*)*[A-Za-z_]\w*)\s*(<.*>)?\s*", name, re.DOTALL)
    if not match:
        raise ValueError(f'name must be a kernel ("scale") or an instantiation ("softmax<float, 128>"), got {name!r}')
    arguments = tokens_of(match[2])[1:-1] if match[2] else []
    return tuple(re.findall(r"\w+", match[1])), split(arguments)


def _template_arguments(name: str, template: Tokens | None, arguments: list[Tokens]) -> dict[str, Tokens]:
    """What each template parameter stands for in the instantiation `name`."""
    if template is None:
        if arguments or "<" in name:
            raise ValueError(f"name: {name!r} has template arguments, but the kernel is not a template")
        return {}
    declared = split(template)
    wanted = "<" + ", ".join(" ".join(parameter) for parameter in declared) + ">"
    if len(arguments) > len(declared):
        raise ValueError(f"name: {name!r} has {len(arguments)} template arguments, the kernel takes {wanted}")
    values: dict[str, Tokens] = {}
    for position, parameter in enumerate(declared):
        if "..." in "".join(parameter):
            raise ValueError(f"name: {name!r} is a variadic template {wanted}, which is not understood")
        equals = parameter.index("=") if "=" in parameter else len(parameter)
        default = parameter[equals + 1 :]
        if position >= len(arguments) and not default:
            raise ValueError(f"name: {name!r} lacks a template argument, the kernel takes {wanted}")
        value = arguments[position] if position < len(arguments) else substitute(default, values)
        if equals >= 2 and NAME.fullmatch(parameter[equals - 1]):
            values[parameter[equals - 1]] = value
    if "<" not in name:
        raise ValueError(f'name: {name!r} is a template {wanted}: name it "{name.strip()}<>"')
    return values


# ------------------------------------------------------------------------------------------------ one parameter


def _parameter(position: int, declared: Tokens, function: str, known: Mapping[str, Tokens]) -> Parameter:
    tokens = declared[: declared.index("=")] if "=" in declared else list(declared)
    while tokens[:2] == ["[", "["]:
        del tokens[: matching(tokens, 0) + 1]
    for attribute in ATTRIBUTES & set(tokens):
        start = tokens.index(attribute)
        del tokens[start : matching(tokens, start + 1) + 1]
    is_array = "[" in tokens
    tokens = tokens[: tokens.index("[")] if is_array else tokens
    tokens = [token for token in tokens if token not in _QUALIFIERS]

    bare = [token for token in tokens if token not in ("const", "*", "&")]
    has_name = len(bare) > 1 and bare[-1] not in _FUNDAMENTAL and bare[-2] != "::"
    name = bare[-1] if has_name else f"#{position}"
    written = " ".join(tokens[:-1] if has_name else tokens) + (" *" if is_array else "")
    tokens = substitute(tokens[:-1] if has_name else tokens, known) + (["*"] if is_array else [])
    tokens = [token for token in tokens if token not in _QUALIFIERS]

    def refuse(why: str) -> ValueError:
        return ValueError(f"kernel {function}: parameter {name} is declared `{written}`, {why}")

    if "&" in tokens:
        raise refuse("a reference, which a kernel cannot take: pass the value or a pointer")
    stars = tokens.count("*")
    if stars > 1:
        raise refuse("a pointer to pointers: pass one tensor and an offset into it")
    pointee = tokens[: tokens.index("*")] if stars else tokens
    ctype = canonical_type([token for token in pointee if token != "const"])
    if AMBIGUOUS in tokens:
        raise refuse("which the source defines more than once and differently: give the types different names")
    if ctype is None:
        raise refuse("whose type cannot be told from the source: use a plain type, `using` or a template parameter")
    if ctype == "void" and not stars:
        raise refuse("which is no type of a value")
    return Parameter(name, ctype, bool(stars), "const" in pointee)


def canonical_type(tokens: Tokens) -> str | None:
    """One spelling per type: `unsigned` is "unsigned int", `half` is "__half". None for what is no plain type."""
    if tokens[:1] == ["::"] or tokens[:2] == ["std", "::"]:
        tokens = tokens[1 + (tokens[0] == "std") :]
    if tokens and all(token in _FUNDAMENTAL for token in tokens):
        if sorted(tokens) == ["char", "signed"]:
            return "signed char"
        name = " ".join(sorted((token for token in tokens if token not in ("int", "signed")), reverse=True))
        name = f"{name} int".strip() if name in ("", "unsigned") else name
        return name if name in _PLAIN else None
    if len(tokens) == 1 and NAME.fullmatch(tokens[0]):
        return _ABBREVIATED.get(tokens[0], tokens[0])
    return None
