"""The parameters of a CUDA kernel, read from its source text.

CUDA's launch takes a list of addresses and trusts them: an int where the kernel declares an int64_t is silently half
garbage. So the declaration itself is read here, and what Python passes is converted to exactly that.

The reader knows attributes, qualifiers, default arguments, `typedef`, `using A = B`, macros, namespaces, the #if that
the text or the command line decides, and templates over types and values with their defaults and their explicit
specialisations. A type that needs more of C++ (a trait, a struct by value) stays as it is written, and the compiler
says what it is (kernels/cuda.py).
"""

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cudascope.cpp.constants import UNKNOWN, Value
from cudascope.cpp.definitions import ConstantError, Scope
from cudascope.cpp.file import AMBIGUOUS, ATTRIBUTES, File, Kernel
from cudascope.cpp.tokens import Tokens, partners, split, substitute, text_of, tokens_of
from cudascope.cpp.types import FUNDAMENTAL, INTEGERS, canonical_type

_QUALIFIERS = {"volatile", "__restrict__", "__restrict", "restrict", "__grid_constant__", "register"}
_QUALIFIERS |= {"typename", "struct", "class", "enum"}


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


def _parameter(position: int, declared: Tokens, function: str, known: Mapping[str, Tokens], scope: Scope) -> Parameter:
    """Parameter `position` of kernel `function`. A type that is not plain keeps its spelling.

    `known` says which tokens names stand for in a type, `scope` what they mean in the default argument. ValueError:
    Python can pass nothing for it, or its default argument has no value in C++.
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
    name = f"#{position}"
    if len(bare) > 1 and bare[-1] not in FUNDAMENTAL and bare[-1].isidentifier() and bare[-2] != "::":
        name = bare[-1]
        tokens.pop()
    written = " ".join([*tokens, *["*"] * is_array])
    tokens = [token for token in substitute(tokens, known) if token not in _QUALIFIERS] + ["*"] * is_array

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


class Signature(NamedTuple):
    """A kernel as its source declares it. `max_threads` is what `__launch_bounds__` promises, if it is known."""

    function: str
    parameters: tuple[Parameter, ...]
    max_threads: int | None


def read_signature(file: File, name: str) -> Signature:
    """The signature of kernel `name` of `file`.

    ValueError: no `__global__` function has this name (the message lists those there are), several have it, template
    arguments do not fit, or the parameters depend on an #if that cannot be told.
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
    return Signature(function, parameters, _max_threads(read))


def _instance(kernel: Kernel, wanted: "_Name", file: File) -> Signature:
    """One declaration with the template arguments put in. Raises ValueError if it is not meant or cannot be told."""
    values, scope = _template_arguments(wanted.base, kernel.template, wanted.arguments, file.scope)
    signature = _declared(kernel, values, file, scope)
    meant = {name: _meaning(name, values, scope, file) for name in values}
    special = []
    for each in file.specialisations:
        if not kernel.template or (each.namespace, each.function) != (kernel.namespace, kernel.function):
            continue
        with contextlib.suppress(ValueError):  # it is of another template of this name
            arguments = _deduced(split(each.specialises), kernel, wanted.arguments)
            own = _template_arguments(wanted.base, kernel.template, arguments, file.scope)
            declared = _declared(each, {}, file, file.scope)
            is_meant = meant == {name: _meaning(name, *own, file) for name in values}
            if is_meant and _types(declared.parameters) == _types(signature.parameters):
                special.append(declared)
    if not special:
        return signature
    pairs = zip(special[-1].parameters, signature.parameters, strict=True)
    parameters = tuple(own._replace(default=of_template.default) for own, of_template in pairs)
    return Signature(kernel.function, parameters, _max_threads([signature, *special]))


def _deduced(given: list[Tokens], kernel: Kernel, wanted: list[Tokens]) -> list[Tokens]:
    """The template arguments of an explicit specialisation: those it gives, then those that its parameters tell.

    An argument before such a one, which they do not tell, is the default of its parameter, whatever is `wanted`.
    """
    declared = [_template_parameter(parameter) for parameter in split(kernel.template)]
    of_argument = [declared[min(i, len(declared) - 1)] for i in range(len(wanted))]  # a pack is the last, for many
    told = [i for i, (_, name, _) in enumerate(of_argument) if name in kernel.parameters]
    rest = range(len(given), max(told, default=-1) + 1)
    return [*given, *(wanted[i] if i in told else of_argument[i][2] for i in rest)]


def _meaning(name: str, values: Mapping[str, Tokens], scope: Scope, file: File) -> object:
    """What the argument of template parameter `name` is, to compare it: a value, or else a type."""
    value = scope.value(name)
    return type_of(substitute(values[name], file.named)) if value.number is None else value


def _declared(kernel: Kernel, values: Mapping[str, Tokens], file: File, scope: Scope) -> Signature:
    """What a declaration says, where the template parameters stand for `values`."""
    if kernel.has_alternatives:
        raise ValueError(f"kernel {kernel.function}: an #if among its parameters cannot be told from the source")
    declared = _unpacked(split(kernel.parameters), values)
    parameters = _parameters(declared, kernel.function, {**file.named, **values}, scope)
    try:
        bounds = scope.evaluate(split(kernel.bounds)[0]) if kernel.bounds else UNKNOWN
    except ConstantError as error:
        raise ValueError(f"kernel {kernel.function}: its __launch_bounds__, {error}") from None
    return Signature(kernel.function, parameters, bounds.number if bounds.type in INTEGERS else None)


def _max_threads(declarations: Sequence[Signature]) -> int | None:
    """What the `__launch_bounds__` of one of the declarations says."""
    return next(filter(None, (each.max_threads for each in reversed(declarations))), None)


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
    named = enumerate(tokens for tokens in declared if tokens != ["void"])
    return tuple(_parameter(position, tokens, function, known, scope) for position, tokens in named)


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
        declared_type, new, default = _template_parameter(parameter)
        if "..." in parameter:  # the last one: it takes the rest
            values[new] = [token for each in arguments[position:] for token in (*each, ",")][:-1]
            break
        is_given = position < len(arguments)
        if not is_given and not default:
            raise ValueError(f"name: {name!r} lacks a template argument, the kernel takes {wanted}")
        if not declared_type or not new.isidentifier():
            continue
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


def _template_parameter(tokens: Tokens) -> tuple[Tokens, str, Tokens]:
    """The type of a template parameter, its name and its default: `int`, `N` and `4` of `int N = 4`."""
    equals = tokens.index("=") if "=" in tokens else len(tokens)
    return tokens[: equals - 1], tokens[equals - 1], tokens[equals + 1 :]
