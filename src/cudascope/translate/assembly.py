"""Changes to the assembly text of a compiled kernel, which the compiler's options cannot make.

gcc and clang write this text for x86-64 and for aarch64. cpu/build.py applies `changed` before it calls the assembler.
tests/cudascope/test_assembly.py has samples of each change.
"""

import re
from collections.abc import Iterable

_EMPTY_LOOP = re.compile(r"^(\.L\w+):\n(?:[ \t]*\.[^\n]*\n|[ \t]*#[^\n]*\n)*[ \t]*(?:jmp|b)[ \t]+\1$", re.M)
_STRING = r'"(?:[^"\\]|\\.)*"'
_FILE_0 = re.compile(rf"^(\t\.file 0 {_STRING} ){_STRING}", re.M)
_FIRST_FILE = re.compile(rf"^\t\.file 1 ({_STRING})$", re.M)
_DIVISION = re.compile(r"^\t(?P<kind>[su])div\t(?P<width>[wx])\w+, (?P<dividend>\w+), (?P<divisor>\w+)$", re.M)
_CHECK = re.compile(
    r"^(\.Lubsan_data\d+):\n\t\.(?:quad|xword|8byte)\t\S+\n\t\.(?:long|word|4byte)\t(\d+)\n\t\.(?:long|word|4byte)\t\d+\n"
    r"\t\.(?:quad|xword|8byte)\t\S+\n\t\.byte\t(\d+)\n\t\.byte\t(\d+)$",
    re.M,
)
_FUNCTION = re.compile(r"^\t\.type\t([\w.$]+), [@%]function$")
_HOOK = re.compile(r"^\t(?:call|jmp|bl|b)\t__tsan_(read|write)(_range|16)(?:@PLT)?$")
_VARIABLE = re.compile(r"^\t\.type\t([\w$][\w.$]*), [@%]object$", re.M)
_LOCAL_COMMON = re.compile(r"^\t\.local\t\S+\n\t\.comm\t([^,\s]+),(\d+),(\d+)$", re.M)
_SECTION = re.compile(r"\s*\.(section|text|data|bss)\b")
_ALIGNMENT = re.compile(r"\s*\.(?:b?align)\s+(\d+)")
_DATA = re.compile(
    r"\s*\.(?:zero|skip|[bs]yte|[248]byte|short|h?word|xword|long|int|quad|octa|value|single|float|double|string\d*|asci[iz])\b"
)
_OURS = {
    "_?exit|_Exit|quick_exit|pthread_exit": "simt_host_exit",
    "__cxa_throw": "simt_throw",
    "malloc|_Zn[wa]m": "simt_malloc",
    "free|_Zd[la]Pvm?": "simt_free_memory",
}


def has_empty_loop(assembly: str) -> bool:
    """Whether a loop does nothing: the optimizer has made it from one that waits for memory that is not volatile."""
    return _EMPTY_LOOP.search(assembly) is not None


def changed(assembly: str, *, gaps: bool) -> str:
    """Return the assembly of a kernel with the runtime's shared memory and functions; with `gaps` of a watched one."""
    assembly = with_alignments(with_runtime_functions(with_dynamic_memory(with_first_file(assembly))))
    assembly = with_checked_divisions(assembly)
    return with_any_alignment(with_gaps(assembly)) if gaps else assembly


def with_first_file(assembly: str) -> str:
    """Give file 0, which addr2line takes first, the name of file 1, with which lines begin (DWARF 5, section 6.2.2)."""
    first = _FIRST_FILE.search(assembly)
    return _FILE_0.sub(lambda match: f"{match[1]}{first[1]}", assembly, count=1) if first else assembly


def with_dynamic_memory(assembly: str) -> str:
    """Define every `extern __shared__` array.

    Each array is a thread-local symbol that the file uses and does not define. The indices of a thread are such symbols
    too, and the runtime defines them.
    """
    if "\nsimt_dynamic:" not in assembly:
        return assembly
    used = set(re.findall(r"\b([\w$.]+)@(?:tlsgd|tlsld|gottpoff|dtpoff|tpoff)\b", assembly))
    used |= set(re.findall(r":tlsgd:([\w$.]+)", assembly))
    defined = {"threadIdx", "blockIdx", "blockDim", "gridDim", *re.findall(r"^([\w$.]+):", assembly, re.M)}
    return assembly + "".join(f"\t.globl {name}\n\t.set {name}, simt_dynamic\n" for name in sorted(used - defined))


def with_runtime_functions(assembly: str) -> str:
    """Call the runtime for the address of a thread-local variable, for memory, and for the end of the process.

    Each thread block has shared memory of its own, the runtime must know the memory that a kernel may touch, and a
    kernel may end its launch but not the process.
    """
    for host, ours in _OURS.items():
        assembly = re.sub(rf"\b(?:{host})@PLT", f"{ours}@PLT", assembly)
        if "\tbl\t" in assembly or "\tb\t" in assembly:  # aarch64
            assembly = re.sub(rf"^(\tbl?\t)(?:{host})$", rf"\1{ours}", assembly, flags=re.M)
    return assembly.replace("__tls_get_addr", "simt_shared_at")


def with_alignments(assembly: str) -> str:
    """Tell the hook of an access to a struct the alignment of its type, as a last argument.

    A GPU reads a struct in pieces of its alignment. gcc's hook knows the size only, so `simt_read_range` and its like
    take its place. -fsanitize=alignment tells the alignment. A struct of characters has no check: its hook stays.
    """
    checks = {label: tuple(map(int, numbers)) for label, *numbers in _CHECK.findall(assembly)}
    if not checks:
        return assembly
    lines = assembly.split("\n")
    functions = {"": set()}  # the checks of each function
    name = ""
    for line in lines:
        if match := _FUNCTION.match(line):
            name = match[1].removesuffix(".cold")
            functions.setdefault(name, set())
        elif "Lubsan_data" in line and not line.startswith("."):
            functions[name].update(re.findall(r"\.Lubsan_data\d+", line))
    found, name, place, size = [], "", 0, 0
    for line in lines:
        if match := _FUNCTION.match(line):
            name = match[1].removesuffix(".cold")
        elif match := re.match(r"\t\.loc \d+ (\d+)", line):
            place = int(match[1])
        elif match := re.match(r"\tmovl?\t(?:\$(\d+), %esi|[wx]1, #?(\d+))$", line):
            size = int(match[1] or match[2])
        elif match := _HOOK.match(line):
            own = [checks[label] for label in functions[name] if label in checks]
            num_bytes = 16 if match[2] == "16" else size
            if alignment := _alignment(own, place, is_store=match[1] == "write", size=num_bytes):
                is_second = match[2] == "16"  # the hook of 16 bytes has no argument for the size
                if line.startswith(("\tcall", "\tjmp")):
                    found.append(f"\tmovl\t${alignment}, {'%esi' if is_second else '%edx'}")
                else:
                    found.append(f"\tmov\t{'w1' if is_second else 'w2'}, {alignment}")
                line = line.replace("__tsan_", "simt_")
        found.append(line)
    return "\n".join(found)


def _alignment(checks: Iterable[tuple[int, ...]], place: int, *, is_store: bool, size: int) -> int:
    """The alignment of an access of `size` bytes in line `place`; 0 if no check tells.

    `checks` are those of the function: (line, log2 of the alignment, kind). The kinds are 0 for a load, 1 for a store
    and 2 for a reference. A variable needs no check, and the compiler drops a check that it has made before: then
    another check of the line or of the function tells.
    """
    fits = [(line == place, kind == is_store, 1 << log) for line, log, kind in checks if log and size % (1 << log) == 0]
    return max(fits, default=(False, False, 0))[2]


def with_checked_divisions(assembly: str) -> str:
    """Stop where an integer division has no result, as x86-64 does: aarch64 goes on with 0 or the dividend.

    A division by zero, and one of the least integer by -1, execute `brk 0xd1f` (cpu/runtime/machine.h). The
    instructions in front of the division leave the flags and all registers as they are.
    """
    return _DIVISION.sub(_checked, assembly) if "\tsdiv\t" in assembly or "\tudiv\t" in assembly else assembly


def _checked(division: re.Match) -> str:
    kind, width, dividend, divisor = division.group("kind", "width", "dividend", "divisor")
    if divisor.endswith("zr"):
        return f"\tbrk\t0xd1f\n{division[0]}"
    lines = [f"\tcbnz\t{divisor}, . + 8", "\tbrk\t0xd1f"]
    if kind == "s":
        free = next(n for n in ("9", "10", "11") if n not in (dividend[1:], divisor[1:]))
        lines += [
            f"\tstr\tx{free}, [sp, -16]!",
            f"\tadd\t{width}{free}, {divisor}, 1",
            f"\tcbnz\t{width}{free}, . + 16",
            f"\teor\t{width}{free}, {dividend}, {'0x80000000' if width == 'w' else '0x8000000000000000'}",
            f"\tcbnz\t{width}{free}, . + 8",
            "\tbrk\t0xd1f",
            f"\tldr\tx{free}, [sp], 16",
        ]
    return "\n".join([*lines, division[0]])


def with_gaps(assembly: str) -> str:
    """Put unused bytes before and after every variable, and after every shared array: an overrun does not reach others.

    There are 256 of them (GAP in cpu/runtime/addresses.h), or as many as the alignment of the variable.
    """
    assembly = _LOCAL_COMMON.sub(_in_bss, assembly)
    variables = set(_VARIABLE.findall(assembly))
    lines, in_variable, is_local, alignment = [], False, False, 0
    for line in assembly.splitlines():
        if _SECTION.match(line) or "pushsection" in line:
            is_local = "tbss" in line or "tdata" in line
        if match := _ALIGNMENT.match(line):
            alignment = int(match[1])
        if in_variable and not _DATA.match(line):
            lines.append("\t.zero\t256")
            in_variable = False
        if line.removesuffix(":") in variables and line.endswith(":"):
            in_variable = True
            if not is_local:
                lines.append(f"\t.zero\t{max(256, alignment)}")
        lines.append(line)
    return "\n".join(lines) + "\n"


def _in_bss(common: re.Match) -> str:
    """A static variable that gcc leaves to the linker, where it can have gaps."""
    name, size, alignment = common.groups()
    lines = [".pushsection .bss", f".balign {alignment}", f".type\t{name}, @object", f".size\t{name}, {size}"]
    return "".join(f"\t{line}\n" for line in lines) + f"{name}:\n\t.zero\t{size}\n\t.popsection"


def with_any_alignment(assembly: str) -> str:
    """Let vectors of 16 bytes be anywhere: `check` reports a misaligned one, and the launch goes on."""
    assembly = re.sub(r"^\tmovap[sd]\b", "\tmovups", assembly, flags=re.M)
    return re.sub(r"^\tmovdqa\b", "\tmovdqu", assembly, flags=re.M)
