"""A kernel of a PTX file as CUDA C++: registers become variables, a branch becomes a goto.

The lines of the C++ are numbered as those of the PTX, so a finding in the C++ has its place in the PTX.

A device function gets the addresses of its results and of its parameters. So a call through a pointer needs no
prototype.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from cudascope.ptx.module import (
    Entry,
    Function,
    Module,
    Parameter,
    PtxError,
    Statement,
    Variable,
    read_parameters,
    read_variable,
)
from cudascope.translate.entry_points import DYNAMIC_MEMORY, table_of
from cudascope.translate.ptx.body import INSTRUCTION, declared_registers, predicate_of, split_operands, translated
from cudascope.translate.ptx.bulk import BULK
from cudascope.translate.ptx.counters import DECLARED, Counters
from cudascope.translate.ptx.matrix import MATRIX
from cudascope.translate.ptx.memory import MEMORY
from cudascope.translate.ptx.scope import Malformed, Scope, Unknown
from cudascope.translate.ptx.threads import THREADS

_INTEGERS = {1: "uint8_t", 2: "uint16_t", 4: "uint32_t", 8: "uint64_t"}
_LABELS = re.compile(r"\.branchtargets\s+(.*)")
_PASSED = "simt_passed"  # in a device function: the addresses of its results and parameters
_OTHERS = BULK | MATRIX | MEMORY | THREADS  # than instructions that only compute
_REGISTER = re.compile(r"[%A-Za-z_$][\w%$]*")
_STRONG = {"volatile", "relaxed", "acquire", "release", "mmio"}
BITS = 64  # of the word of a thread that tells whose values it has stored


def entry_source(
    module: Module, entry: Entry, file: str, names: Mapping[str, str], counters: Counters | None = None
) -> str:
    """Return the C++ of `entry` and of the functions that it calls. `names` are the variables' names in the source.

    With `counters`, the C++ counts what is executed. PtxError: it has an instruction that the CPU runner does not know,
    or calls a function that the module lacks; the message has its line.
    """
    if entry.cluster != 1:
        raise PtxError(f"line {entry.line}: the CPU runner does not know clusters of several thread blocks")
    functions = _called(module, entry)
    known = {each.name: f"(uint64_t)&{cpp_name(each.name)}" for each in functions}
    known |= {each.name: _address(each.space, cpp_name(each.name)) for each in module.variables}
    bodies = []
    for each in functions:
        places = {parameter.name: f"(uint64_t){_PASSED}[{i}]" for i, parameter in enumerate(each.parameters)}
        head = f"static void {cpp_name(each.name)}(char* const* {_PASSED}) {{"
        counting = counters.begin(each.body, is_entry=False) if counters else []
        bodies.append((head, [*counting, *_body(each.body, known | places, file, counters)]))
    places = {each.name: f"(uint64_t)&{cpp_name(each.name)}" for each in entry.parameters}
    declared = ", ".join(f"{_type(each)} {cpp_name(each.name)}" for each in entry.parameters)
    head = f'extern "C" __global__ void {cpp_name(entry.name)}({declared}) {{'
    counting = counters.begin(entry.body, is_entry=True) if counters else []
    bodies.append((head, [*counting, *_body(entry.body, known | places, file, counters)]))
    lines = [f'#line {each.line} "{file}"\n{_declared(each)}' for each in module.variables]
    lines += [f"static SIMT_NOINLINE void {cpp_name(each.name)}(char* const*);" for each in functions]
    lines.append(_filled_in(module.variables, known))
    count = []
    if counters:
        lines.append(DECLARED)
        count = [f"unsigned* const simt_executed = simt_executions({len(counters.parts)});"]
    for head, body in bodies:
        lines += [head, *count, *body, "}"]
    kept = [each.name for each in module.variables if each.space in ("global", "const") and each.bytes]
    lines += ['#line 1 "<cudascope>"', table_of((names.get(name, name), cpp_name(name)) for name in kept)]
    if any(each.space == "shared" and each.bytes is None for each in module.variables):
        lines.append(DYNAMIC_MEMORY)
    lines += [f"SIMT_ENTRY(simt_entry, &::{cpp_name(entry.name)})", 'extern "C" { void simt_base() {} }']
    return "\n".join(lines) + "\n"


def _called(module: Module, entry: Entry) -> list[Function]:
    """The device functions that the entry may call, itself, through another function, or through a variable."""
    words = {name for each in module.variables for name, _ in each.addresses.values()}
    words.update(_words(entry.body))
    found: dict[str, Function] = {}
    while new := [module.functions[word] for word in words if word in module.functions and word not in found]:
        found |= {each.name: each for each in new}
        words = {word for each in new for word in _words(each.body)}
    return [each for name, each in module.functions.items() if name in found]


def _words(body: Iterable[Statement]) -> Iterable[str]:
    return (word for statement in body for word in re.findall(r"[\w$]+", statement.text))


def cpp_name(name: str) -> str:
    """The name in C++ of a kernel, a function, a variable or a parameter."""
    return "ptx_" + re.sub(r"\W", "_", name.replace("$", "_S"))


def _type(parameter: Parameter) -> str:
    if parameter.count:
        return f"simt::ptx::Bytes<{parameter.bytes}, {parameter.alignment}>"
    return {"f32": "float", "f64": "double"}.get(parameter.type, _INTEGERS[parameter.bytes])


def _declared(variable: Variable) -> str:
    """The declaration of a variable."""
    words = {"global": "__device__", "const": "__constant__", "shared": "__shared__", "local": ""}[variable.space]
    size = "" if variable.bytes is None else variable.bytes
    contents = f" = {{{', '.join(map(str, variable.contents))}}}" if any(variable.contents) else ""
    extern = "extern " * (variable.bytes is None)
    return f"{extern}{words} __align__({variable.alignment}) unsigned char {cpp_name(variable.name)}[{size}]{contents};"


def _filled_in(variables: Iterable[Variable], known: Mapping[str, str]) -> str:
    """A function that stores the addresses that variables hold when the library is loaded."""
    stores = []
    for variable in variables:
        for offset, (name, more) in variable.addresses.items():
            if name in known:
                place = f"{cpp_name(variable.name)} + {offset}"
                stores.append(f"{{ uint64_t at = {known[name]} + {more}; __builtin_memcpy({place}, &at, 8); }}")
    return f"__attribute__((constructor)) static void simt_fill_in() {{ {' '.join(stores)} }}" if stores else ""


def _address(space: str, name: str) -> str:
    return f"(uint32_t)__cvta_generic_to_shared({name})" if space == "shared" else f"(uint64_t){name}"


def _body(body: tuple[Statement, ...], addresses: Mapping[str, str], file: str, counters: Counters | None) -> list[str]:
    scope = Scope({}, 0)
    scope.addresses |= addresses
    targets = {}  # of brx.idx
    loads, stores = loads_for_stores(body)
    lines, scopes = [], [scope]
    for i, statement in enumerate(body):
        if statement.text.startswith(".branchtargets"):
            targets[body[i - 1].text.rstrip(":")] = re.split(r"\s*,\s*", _LABELS.fullmatch(statement.text)[1])
    for position, statement in enumerate(body):
        text, here = statement.text, scopes[-1]
        line = statement.line
        lines.append(f'#line {line} "{file}"')  # of each statement: several may share a line
        try:
            predicate = predicate_of(text, here) if text.startswith("@") else ""
            if text == "{":
                scopes.append(_inner(here, body[position + 1 :], position))
                lines.append("{")
            elif text == "}":
                scopes.pop()
                lines.append("}")
            elif text.endswith(":"):
                lines.append(f"{here.label(text[:-1])}:;")
            elif text.startswith((".branchtargets", ".callprototype", ".pragma")):
                pass
            elif text.startswith(".reg"):
                lines.append(declared_registers(text, here))
            elif text.startswith("."):
                lines.append(_local(text, line, here))
            else:
                cpp = translated(text, here, targets)
                if counters:
                    cpp = counters.before(position, statement, predicate) + cpp
                if position in loads:
                    cpp = f"SIMT_LOADS({loads[position]}); {cpp} SIMT_LOADS(0);"
                elif position in stores:
                    condition = f"if ({predicate}) " * bool(predicate)
                    cpp = f"{condition}{{ SIMT_STORES({stores[position]:#x}ull); }} {cpp}"
                lines.append(cpp)
        except Unknown as error:
            raise PtxError(f"line {line}: the CPU runner does not know {error}: {text}") from None
        except Malformed as error:
            raise PtxError(f"line {line}: {error}: {text}") from None
    if body:  # what ends the function has the line of its last statement
        lines.append(f'#line {body[-1].line} "{file}"')
    return lines


def _inner(outer: Scope, body: tuple[Statement, ...], number: int) -> Scope:
    """The scope of a block: what it declares, and its labels, are its own."""
    scope = Scope(dict(outer.names), number)
    scope.addresses, scope.labels, depth = dict(outer.addresses), dict(outer.labels), 0
    for statement in body:
        depth += {"{": 1, "}": -1}.get(statement.text, 0)
        if depth < 0:
            return scope
        if depth == 0 and statement.text.endswith(":"):
            name = statement.text[:-1]
            scope.labels[name] = f"simt_{name.replace('$', '_')}_{number}"
    raise Malformed("a { without its }")


def _local(text: str, line: int, scope: Scope) -> str:
    """Return the declaration of a variable, or of the memory of a parameter that the body passes on."""
    if text.startswith(".param"):
        (passed,) = read_parameters(text, line)
        variable = Variable("local", passed.name, passed.alignment, passed.bytes, b"", {}, line)
    else:
        variable = read_variable(text, line)
    if not variable or variable.space not in ("local", "shared"):
        raise Unknown(text)
    scope.addresses[variable.name] = _address(variable.space, cpp_name(variable.name))
    return _declared(variable)


class _Instruction(NamedTuple):
    position: int
    kind: str  # "load", "store", "computes", "other"
    targets: set[str]
    sources: set[str]  # of a store: what is stored
    escapes: set[str]  # what an address, a condition or another thread needs


def loads_for_stores(body: Sequence[Statement]) -> tuple[dict[int, int], dict[int, int]]:
    """Return a number from 1 to 64 for each load whose value only stores use, and for each store the bits of its loads.

    Triton gives one element to several threads if a tile has fewer elements than the thread block has threads. All of
    them load the element, and one of them stores the result. If the kernel works in place, another thread may load what
    was already stored. Nothing comes of this value, so `check` reports such a race only if the reading thread also
    executes a store of the value. The keys are positions in `body`. Two loads may share a number.
    """
    instructions = list(_instructions(body))
    computing = [each for each in instructions if each.kind == "computes"]
    escaped = set().union(*(each.escapes for each in instructions))
    while before := len(escaped):
        for each in reversed(computing):
            if each.targets & escaped:
                escaped |= each.sources
        if len(escaped) == before:
            break
    loads = [each for each in instructions if each.kind == "load" and not each.targets & escaped]
    numbers = {load.position: 1 + i % BITS for i, load in enumerate(loads)}
    carried: dict[str, int] = {}
    for load in loads:
        for target in load.targets:
            carried[target] = carried.get(target, 0) | 1 << numbers[load.position] - 1
    changed = bool(carried)
    while changed:
        changed = False
        for each in computing:
            bits = _bits(each.sources, carried)
            for target in each.targets if bits else ():
                changed |= bool(bits & ~carried.get(target, 0))
                carried[target] = carried.get(target, 0) | bits
    stores = {each.position: _bits(each.sources, carried) for each in instructions if each.kind == "store"}
    return numbers, {position: bits for position, bits in stores.items() if bits}


def _bits(registers: set[str], carried: dict[str, int]) -> int:
    found = 0
    for register in registers:
        found |= carried.get(register, 0)
    return found


def _instructions(body: Sequence[Statement]) -> Iterator[_Instruction]:
    for position, statement in enumerate(body):
        match = INSTRUCTION.fullmatch(statement.text)
        if not match:
            continue
        _, predicate, name, written = match.groups()
        operands = [set(_REGISTER.findall(each)) for each in split_operands(written)]
        first, *words = name.split(".")
        guard, everything = {predicate} - {None}, set().union(*operands)
        plain = "global" in words and not _STRONG & set(words)
        if first == "ld" and plain:
            yield _Instruction(position, "load", operands[0], set(), guard.union(*operands[1:]))
        elif first == "st" and plain:
            yield _Instruction(position, "store", set(), operands[1], guard.union(operands[0], *operands[2:]))
        elif first in _OTHERS or not operands:
            yield _Instruction(position, "other", set(), set(), guard | everything)
        else:
            yield _Instruction(position, "computes", operands[0], set().union(*operands[1:]), guard)
