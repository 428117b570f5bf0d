"""The parameters of a CUDA kernel, read from its source text.

CUDA's launch takes a list of addresses and trusts them: an int where the kernel declares an int64_t is silently half
garbage. So the declaration itself is read here, and what Python passes is converted to exactly that.

Understood: comments, attributes, qualifiers, default arguments, `typedef`, `using A = B`, `#define A B`, namespaces,
#if and #ifdef over what the text or the command line defines, and templates over types and values with their defaults,
instantiated as in `softmax<float, 128>`. A type that needs more of C++ than that (a trait, a struct by value) stays as
it is written, for the compiler to say what it is (reading.py); a reference is refused with the parameter's name.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cudascope.declarations import Declaration, find_kernel
from cudascope.names import read_names
from cudascope.parameters import Parameter, read_parameter, spelled
from cudascope.tokens import NAME, Tokens, evaluate, split, substitute, tokens_of


class Signature(NamedTuple):
    """A kernel as its source declares it. `max_threads` is what `__launch_bounds__` promises, if it is known."""

    function: str
    parameters: tuple[Parameter, ...]
    max_threads: int | None


def read_signature(source: str, name: str, defines: Sequence[str] = ()) -> Signature:
    """The signature of kernel `name` in `source`; `defines` as for the compiler.

    Raises:
        ValueError: no `__global__` function has this name (the message lists those there are), several have it, or
            template arguments do not fit.
    """
    base, path, arguments, overload = _split_name(name)
    tokens, named = read_names(source, defines)
    read: list[tuple[tuple[Parameter, ...], Declaration, dict[str, Tokens]]] = []
    refused: list[ValueError] = []
    for declaration in find_kernel(tokens, path, base):
        try:
            instance = _template_arguments(base, declaration.template, arguments)
            known, declared = {**named, **instance}, _unpacked(split(declaration.parameters), instance)
        except ValueError as error:  # of several it may be another that is meant
            refused.append(error)
        else:
            read.append((_parameters(declared, declaration.function, known), declaration, known))
    if not read:
        raise refused[0]
    if overload is not None:
        wanted = _types(_parameters(overload, path[-1], read[0][2]))
        read = [each for each in read if _types(each[0]) == wanted] or read
    overloads = {tuple(_types(parameters)): parameters for parameters, *_ in read}
    if len(overloads) > 1:
        choices = " or ".join(f'"{base}({", ".join(map(spelled, each))})"' for each in overloads.values())
        raise ValueError(
            f"name: there are several kernels {path[-1]!r} with different parameters: name one, {choices}, or choose "
            f"by #ifdef of a name that is given in `defines`"
        )
    written = zip(*([parameter.default for parameter in parameters] for parameters, *_ in read), strict=True)
    parameters = tuple(
        parameter._replace(default=next(filter(None, defaults), ""))
        for parameter, defaults in zip(read[-1][0], written, strict=True)
    )
    attributes = {key: (value, known) for _, each, known in read for key, value in each.attributes.items()}
    bounds, known = attributes.get("__launch_bounds__", ([], {}))
    max_threads = evaluate(" ".join(substitute(split(bounds)[0], known))) if bounds else None
    return Signature(path[-1], parameters, max_threads)


def address_of(name: str) -> str:
    """The C++ expression for the address of kernel `name`."""
    base, _, _, overload = _split_name(name)
    base = base if base.startswith("::") else f"::{base}"  # `using namespace std` may bring another of the name
    if overload is None:
        return f"&{base}"
    return f"static_cast<void (*)({', '.join(' '.join(each) for each in overload)})>(&{base})"


class _Name(NamedTuple):
    """A kernel's name in parts: "ns::f<float>(int)" is ns::f<float>, (ns, f), [[float]] and [[int]]."""

    base: str
    path: tuple[str, ...]
    arguments: list[Tokens]
    overload: list[Tokens] | None  # the types of its parameters, if they are named


def _split_name(name: str) -> _Name:
    pattern = r"\s*((?:::)?((?:\w+\s*::\s*)*[A-Za-z_]\w*)\s*(<.*>)?)\s*(\(.*\))?\s*"
    match = re.fullmatch(pattern, name, re.DOTALL)
    if not match:
        raise ValueError(
            f'name must be a kernel ("scale"), an instantiation ("softmax<float, 128>") or an overload '
            f'("scale(float*, int)"), got {name!r}'
        )
    base, path, arguments, overload = match.groups()
    return _Name(
        base,
        tuple(re.findall(r"\w+", path)),
        split(tokens_of(arguments)[1:-1]) if arguments else [],
        split(tokens_of(overload)[1:-1]) if overload else None,
    )


def base_name(name: str) -> str:
    """The function that `name` means, without namespace, template arguments and parameters."""
    return _split_name(name).path[-1]


def _parameters(declared: Sequence[Tokens], function: str, known: Mapping[str, Tokens]) -> tuple[Parameter, ...]:
    return tuple(
        read_parameter(position, tokens, function, known)
        for position, tokens in enumerate(declared)
        if tokens != ["void"]
    )


_DOTS = ". . ."  # in tokens


def _unpacked(declared: Sequence[Tokens], values: Mapping[str, Tokens]) -> list[Tokens]:
    """`declared`, in which `T... x` becomes a parameter for each argument of the pack: x0, x1 and so on."""
    parameters: list[Tokens] = []
    for tokens in declared:
        pack = next((token for token in tokens if token in values), None)
        if pack is None or _DOTS not in " ".join(tokens):
            parameters.append(tokens)
            continue
        dots = tokens.index(".")
        for i, value in enumerate(split(values[pack])):
            name = [f"{tokens[dots + 3]}{i}"] if tokens[dots + 3 :] else []
            parameters.append(substitute(tokens[:dots], {pack: value}) + name)
    return parameters


def _types(parameters: Sequence[Parameter]) -> list[tuple[str, bool, bool]]:
    return [(parameter.ctype, parameter.pointer, parameter.pointer and parameter.const) for parameter in parameters]


def _template_arguments(name: str, template: Tokens | None, arguments: list[Tokens]) -> dict[str, Tokens]:
    """Return the argument of each template parameter in the instantiation `name`."""
    if template is None:
        if arguments or "<" in name:
            raise ValueError(f"name: {name!r} has template arguments, but the kernel is not a template")
        return {}
    declared = split(template)
    wanted = "<" + ", ".join(" ".join(parameter) for parameter in declared) + ">"
    if len(arguments) > len(declared) and _DOTS not in " ".join(declared[-1]):
        raise ValueError(f"name: {name!r} has {len(arguments)} template arguments, the kernel takes {wanted}")
    values: dict[str, Tokens] = {}
    for position, parameter in enumerate(declared):
        if _DOTS in " ".join(parameter):  # the last one: it takes the rest
            values[parameter[-1]] = [token for each in arguments[position:] for token in (*each, ",")][:-1]
            break
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
