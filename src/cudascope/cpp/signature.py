"""The parameters of a CUDA kernel, read from its source text.

CUDA's launch takes a list of addresses and trusts them: an int where the kernel declares an int64_t is silently half
garbage. So the declaration itself is read here, and what Python passes is converted to exactly that.

Understood: comments, attributes, qualifiers, default arguments, `typedef`, `using A = B`, `#define A B`, namespaces,
#if and #ifdef over what the text or the command line defines, and templates over types and values with their defaults,
instantiated as in `softmax<float, 128>`. A type that needs more of C++ than that (a trait, a struct by value) stays as
it is written, for the compiler to say what it is (kernels/reading.py); a reference is refused with the parameter's
name.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cudascope.cpp.constants import UNKNOWN
from cudascope.cpp.definitions import ConstantError, Scope
from cudascope.cpp.file import File, Kernel
from cudascope.cpp.parameters import Parameter, read_parameter, spelled
from cudascope.cpp.tokens import Tokens, split, substitute, tokens_of
from cudascope.cpp.types import INTEGERS


class Signature(NamedTuple):
    """A kernel as its source declares it. `max_threads` is what `__launch_bounds__` promises, if it is known."""

    function: str
    parameters: tuple[Parameter, ...]
    max_threads: int | None


def read_signature(file: File, name: str) -> Signature:
    """The signature of kernel `name` of `file`.

    Raises:
        ValueError: no `__global__` function has this name (the message lists those there are), several have it,
            template arguments do not fit, or the parameters depend on an #if that cannot be told.
    """
    wanted = _split_name(name)
    function = wanted.path[-1]
    read: list[Signature] = []
    refused: list[ValueError] = []
    for kernel in _find(file, wanted):
        try:
            read.append(_instance(kernel, wanted, file))
        except ValueError as error:  # of several it may be another that is meant
            refused.append(error)
    if not read:
        raise refused[0]
    if wanted.overload is not None:
        types = _types(_parameters(wanted.overload, function, file.named, file.scope))
        read = [each for each in read if _types(each.parameters) == types] or read
    overloads = {tuple(_types(each.parameters)): each.parameters for each in read}
    if len(overloads) > 1:
        choices = " or ".join(f'"{wanted.base}({", ".join(map(spelled, each))})"' for each in overloads.values())
        raise ValueError(
            f"name: there are several kernels {function!r} with different parameters: name one, {choices}, or choose "
            f"by #ifdef of a name that is given in `defines`"
        )
    defaults = zip(*([parameter.default for parameter in each.parameters] for each in read), strict=True)
    parameters = tuple(
        parameter._replace(default=next(filter(None, written), None))
        for parameter, written in zip(read[-1].parameters, defaults, strict=True)
    )
    return Signature(function, parameters, next(filter(None, (each.max_threads for each in reversed(read))), None))


def _instance(kernel: Kernel, wanted: "_Name", file: File) -> Signature:
    """One declaration with the template arguments put in. Raises ValueError if it is not meant or cannot be told."""
    instance, scope = _template_arguments(wanted.base, kernel.template, wanted.arguments, file.scope)
    if kernel.has_alternatives:
        raise ValueError(f"kernel {kernel.function}: an #if among its parameters cannot be told from the source")
    known = {**file.named, **instance}
    parameters = _parameters(_unpacked(split(kernel.parameters), instance), kernel.function, known, scope)
    try:
        bounds = scope.evaluate(split(kernel.bounds)[0]) if kernel.bounds else UNKNOWN
    except ConstantError as error:
        raise ValueError(f"kernel {kernel.function}: its __launch_bounds__, {error}") from None
    return Signature(kernel.function, parameters, bounds.number if bounds.type in INTEGERS else None)


def _find(file: File, wanted: "_Name") -> list[Kernel]:
    """All declarations of the kernel, each with the default template arguments of the first."""
    path, kernels = wanted.path, file.kernels
    same_name = [kernel for kernel in kernels if kernel.function == path[-1]]
    found = [kernel for kernel in same_name if (*kernel.namespace, kernel.function) == path]
    other_paths = rf"(using|inline) namespace |namespace \w+ = |using [\w: ]*:: {path[-1]} ;"
    if not found and re.search(other_paths, " ".join(file.tokens)):
        found = same_name
    if not found:
        full = [*dict.fromkeys("::".join((*kernel.namespace, kernel.function)) for kernel in same_name or kernels)]
        if not same_name:
            names = ", ".join(full) or "no __global__ function at all"
            raise ValueError(f"name: the source has no kernel {'::'.join(path)!r}; it has {names}")
        instance = wanted.base[wanted.base.index("<") :] if "<" in wanted.base else ""
        remedy = " or ".join(f'"{each}{instance}"' for each in full)
        raise ValueError(f"name: the source has no kernel {'::'.join(path)!r}: name it {remedy}")
    return [kernel._replace(template=_with_defaults(kernel.template, found[0].template)) for kernel in found]


def _with_defaults(template: Tokens | None, first: Tokens | None) -> Tokens | None:
    if not template or not first or len(split(template)) != len(split(first)):
        return template
    pairs = zip(split(template), split(first), strict=True)
    merged = [own if "=" in own or "=" not in old else own + old[old.index("=") :] for own, old in pairs]
    return [token for parameter in merged for token in (*parameter, ",")][:-1]


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


def _parameters(
    declared: Sequence[Tokens], function: str, known: Mapping[str, Tokens], scope: Scope
) -> tuple[Parameter, ...]:
    return tuple(
        read_parameter(position, tokens, function, known, scope)
        for position, tokens in enumerate(declared)
        if tokens != ["void"]
    )


def _unpacked(declared: Sequence[Tokens], values: Mapping[str, Tokens]) -> list[Tokens]:
    """`declared`, in which `T... x` becomes a parameter for each argument of the pack: x0, x1 and so on."""
    parameters: list[Tokens] = []
    for tokens in declared:
        pack = next((token for token in tokens if token in values), None)
        if pack is None or "..." not in tokens:
            parameters.append(tokens)
            continue
        dots = tokens.index("...")
        for i, value in enumerate(split(values[pack])):
            name = [f"{tokens[dots + 1]}{i}"] if tokens[dots + 1 :] else []
            parameters.append(substitute(tokens[:dots], {pack: value}) + name)
    return parameters


def _types(parameters: Sequence[Parameter]) -> list[tuple[str, bool, bool]]:
    return [(parameter.ctype, parameter.pointer, parameter.pointer and parameter.const) for parameter in parameters]


def _template_arguments(
    name: str, template: Tokens | None, arguments: list[Tokens], outer: Scope
) -> tuple[dict[str, Tokens], Scope]:
    """The argument of each template parameter in the instantiation `name`: as tokens, and as a value or a type."""
    if template is None:
        if arguments or "<" in name:
            raise ValueError(f"name: {name!r} has template arguments, but the kernel is not a template")
        return {}, outer
    declared, scope = split(template), outer.inner()
    wanted = "<" + ", ".join(" ".join(parameter) for parameter in declared) + ">"
    if len(arguments) > len(declared) and "..." not in declared[-1]:
        raise ValueError(f"name: {name!r} has {len(arguments)} template arguments, the kernel takes {wanted}")
    values: dict[str, Tokens] = {}
    for position, parameter in enumerate(declared):
        if "..." in parameter:  # the last one: it takes the rest
            values[parameter[-1]] = [token for each in arguments[position:] for token in (*each, ",")][:-1]
            break
        equals = parameter.index("=") if "=" in parameter else len(parameter)
        default = parameter[equals + 1 :]
        if position >= len(arguments) and not default:
            raise ValueError(f"name: {name!r} lacks a template argument, the kernel takes {wanted}")
        is_given = position < len(arguments)
        if equals < 2 or not parameter[equals - 1].isidentifier():
            continue
        declared_type, new = parameter[: equals - 1], parameter[equals - 1]
        values[new] = arguments[position] if is_given else substitute(default, values)
        written, names = (arguments[position], outer) if is_given else (default, scope)
        if declared_type[0] in ("class", "typename"):
            scope.bind(new, UNKNOWN, names.type(written))
            continue
        try:
            scope.bind(new, names.evaluate(written, None if "auto" in declared_type else scope.type(declared_type)))
        except ConstantError as error:
            raise ValueError(f"name: the template argument of {new} in {name!r}, {error}") from None
    if "<" not in name:
        raise ValueError(f'name: {name!r} is a template {wanted}: name it "{name.strip()}<>"')
    return values, scope
