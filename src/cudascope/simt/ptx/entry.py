"""A kernel of a PTX file as CUDA C++: registers become variables, a branch becomes a goto.

The lines of the C++ are numbered as those of the PTX, so a finding in the C++ has its place in the PTX.
"""

import re

from cudascope.ptx_module import Entry, Module, Parameter, PtxError, Statement, Variable
from cudascope.simt.ptx.body import declared_registers, predicate_of, translated
from cudascope.simt.ptx.costs import Counters
from cudascope.simt.ptx.scope import Malformed, P, Scope, Unknown
from cudascope.simt.translation import DYNAMIC_MEMORY, table_of

_INTEGERS = {1: "uint8_t", 2: "uint16_t", 4: "uint32_t", 8: "uint64_t"}
_LABELS = re.compile(r"\.branchtargets\s+(.*)")
_PARAMETER = re.compile(
    r"(@\s*!?\s*[\w%$]+\s+)?ld\.param((?:\.\w+)*)\.(\w+)\s+([^,{]+|\{[^}]*\})\s*,\s*\[\s*([\w$.]+)\s*(?:\+\s*(\d+))?\s*\]"
)


def entry_source(module: Module, entry: Entry, file: str, counters: Counters | None = None) -> str:
    """Return the C++ of `entry`, with what it needs of the module. With `counters`, the C++ counts what is executed.

    Raises:
        PtxError: it has an instruction that the CPU runner does not know; the message has its line.
    """
    scope = Scope({}, 0)
    outside = [_outside(each, scope, file) for each in module.variables]
    declared = ", ".join(f"{_type(each)} {_cpp(each.name)}" for each in entry.parameters)
    lines = [*outside, f'extern "C" __global__ void {_cpp(entry.name)}({declared}) {{']
    body = _body(entry, scope, file, counters)
    if counters:
        lines.insert(0, 'extern "C" unsigned* simt_executions(unsigned);')
        lines.append(f"unsigned* const simt_executed = simt_executions({len(counters.costs)});")
    lines += body
    kept = [each.name for each in module.variables if each.space in ("global", "const") and each.bytes]
    lines += ["}", '#line 1 "<cudascope>"', table_of((name, _cpp(name)) for name in kept)]
    if any(each.space == "shared" and each.bytes is None for each in module.variables):
        lines.append(DYNAMIC_MEMORY)
    lines += [f"SIMT_ENTRY(simt_entry, &::{_cpp(entry.name)})", 'extern "C" { void simt_base() {} }']
    return "\n".join(lines) + "\n"


def _cpp(name: str) -> str:
    return "ptx_" + re.sub(r"\W", "_", name.replace("$", "_S"))


def _type(parameter: Parameter) -> str:
    if parameter.count:
        return f"simt::ptx::Bytes<{parameter.bytes}, {parameter.alignment}>"
    return {"f32": "float", "f64": "double"}.get(parameter.type, _INTEGERS[parameter.bytes])


def _outside(variable: Variable, scope: Scope, file: str) -> str:
    """The declaration of a variable of the module. Its name is its address, of 32 bits in shared memory."""
    name = _cpp(variable.name)
    words = {"global": "__device__", "const": "__constant__", "shared": "__shared__"}[variable.space]
    size = "" if variable.bytes is None else variable.bytes
    contents = f" = {{{', '.join(map(str, variable.contents))}}}" if variable.contents else ""
    scope.addresses[variable.name] = _address(variable.space, name)
    extern = "extern " * (variable.bytes is None)
    aligned = f"__align__({variable.alignment}) unsigned char"
    return f'#line {variable.line} "{file}"\n{extern}{words} {aligned} {name}[{size}]{contents};'


def _address(space: str, name: str) -> str:
    return f"(uint32_t)__cvta_generic_to_shared({name})" if space == "shared" else f"(uint64_t){name}"


def _body(entry: Entry, scope: Scope, file: str, counters: Counters | None) -> list[str]:
    parameters = {each.name: each for each in entry.parameters}
    # a kernel takes the address of a tensor map, or of another struct
    scope.addresses |= {name: f"(uint64_t)&{_cpp(name)}" for name, each in parameters.items() if each.count}
    targets = {}  # of brx.idx
    lines, scopes, line = [], [scope], 0
    for i, statement in enumerate(entry.body):
        text, here = statement.text, scopes[-1]
        if text.startswith(".branchtargets"):
            targets[entry.body[i - 1].text.rstrip(":")] = re.split(r"\s*,\s*", _LABELS.fullmatch(text)[1])
    for position, statement in enumerate(entry.body):
        text, here = statement.text, scopes[-1]
        if statement.line != line:
            line = statement.line
            lines.append(f'#line {line} "{file}"')
        try:
            predicate = predicate_of(text, here) if text.startswith("@") else ""
            count = counters.before(statement, predicate) if counters else ""
            if text == "{":
                scopes.append(_inner(here, entry.body[position + 1 :], position))
                lines.append("{")
            elif text == "}":
                scopes.pop()
                lines.append("}")
            elif text.endswith(":"):
                lines.append(f"{here.label(text[:-1])}:;")
            elif text.startswith((".branchtargets", ".pragma")):
                pass
            elif text.startswith(".reg"):
                lines.append(declared_registers(text, here))
            elif text.startswith("."):
                lines.append(_local(text, here))
            elif (parameter := _PARAMETER.fullmatch(text)) and parameter[5] in parameters:
                lines.append(_load_parameter(parameter, parameters, here))
            else:
                lines.append(count + translated(text, here, targets))
        except Unknown as error:
            raise PtxError(f"line {line}: the CPU runner does not know {error}: {text}") from None
        except Malformed as error:
            raise PtxError(f"line {line}: {error}: {text}") from None
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


def _local(text: str, scope: Scope) -> str:
    match = re.fullmatch(r"\.(local|shared)\s*(?:\.align\s+(\d+))?\s*\.b8\s+([\w$.]+)\[(\d+)\]", text)
    if not match:
        raise Unknown(text)
    space, alignment, name, size = match.groups()
    scope.addresses[name] = _address(space, _cpp(name))
    word = "__shared__ " if space == "shared" else ""
    return f"{word}__align__({alignment or 1}) unsigned char {_cpp(name)}[{size}];"


def _load_parameter(match: re.Match, parameters: dict[str, Parameter], scope: Scope) -> str:
    predicate, vector, kind, target, name, offset = match.groups()
    if predicate or any(word not in ("v2", "v4") for word in vector.split(".") if word):
        raise Unknown("this load of a parameter")
    names = [each.strip() for each in target.strip("{} ").split(",")]
    loads = []
    for i, each in enumerate(names):
        at = f"(const char*)&{_cpp(name)} + {int(offset or 0)} + {i} * sizeof({P}{kind})"
        loads.append(f"{P}out({scope.variable(each)}, {P}parameter<{P}{kind}>({at}));")
    return " ".join(loads)
