"""A PTX file as values: its entries, their parameters and statements, its variables, and the source line of each line.

    module = read_module(text)
    module.entries["softmax_kernel"].parameters

The text is what NVRTC and Triton write: PTX ISA 9.0, sections 4.2 to 5.4 and 11. Debug sections are passed over.
"""

import bisect
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import NamedTuple

from cudascope.toolchain.headers import is_foreign


class Place(NamedTuple):
    """A line of the source that the PTX was compiled from."""

    file: str
    line: int


_LOC = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)\s+(\d+)([^/]*)(?://(.*))?")
_CALLER = re.compile(r"inlined_at\s+(\d+)\s+(\d+)\s+(\d+)")

_DEEPEST = 50  # of calls within calls


def places_of(text: str) -> dict[int, Place]:
    """The source line of each line of the text that has one.

    An instruction of an inlined function has several lines. The innermost one outside of headers counts that belong to
    Triton, to NVIDIA or to cudascope.
    """
    files = {n: name for n, name in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.MULTILINE)}
    by_name = {PurePath(name).name: name for name in files.values()}
    callers: dict[tuple[str, ...], tuple[str, ...]] = {}  # the caller of each inlined place, as file, line and column
    places, now = {}, None
    for number, row in enumerate(text.split("\n"), 1):
        match = _LOC.match(row)
        if not match:
            if now and _has_instruction(row):
                places[number] = now
            elif row.startswith("}"):
                now = None
            continue
        at, caller = match.groups()[:3], _CALLER.search(match[4])
        if caller:
            callers[at] = caller.groups()
        else:
            callers.pop(at, None)
        written = re.findall(r"([^\s\[\]@:]+):(\d+):\d+", match[5] or "")  # by Triton: all of them
        frames = [Place(by_name.get(file, file), int(line)) for file, line in written]
        for _ in range(_DEEPEST if not frames else 0):
            frames.append(Place(files.get(at[0], at[0]), int(at[1])))
            if at not in callers:
                break
            at = callers[at]
        frames = [frame for frame in frames if frame.line]
        own = [frame for frame in frames if not _is_foreign(frame.file)]
        now = (own or frames or [now])[0]
    return places


_LABEL = re.compile(r"[\w$%]+\s*:(?!:)\s*")


def _has_instruction(row: str) -> bool:
    """Whether a line has an instruction, and not only directives, labels, braces and comments."""
    for piece in re.split(r";", row.partition("//")[0]):
        text = _LABEL.sub("", piece.strip(" \t{}"), count=1)
        if text and not text.startswith((".", ")", "(")):
            return True
    return False


def _is_foreign(file: str) -> bool:
    """Whether a file belongs to Triton, to NVIDIA or to cudascope."""
    path = PurePath(file)
    of_triton = ("triton", "language") in itertools.pairwise(path.parts[:-1])
    return of_triton or path.name == "__nv_nvrtc_builtin_header.h" or is_foreign(file)


TYPES = {"pred": 1, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "b32": 4, "u32": 4, "s32": 4}
TYPES |= {"f32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "b128": 16}


class PtxError(ValueError):
    """The text is not PTX that the CPU runner can execute. The message names the line."""


def line_of(error: PtxError) -> tuple[int, str]:
    """Return the line of the text that an error names, and the rest of the message."""
    number, message = re.fullmatch(r"line (\d+): (.*)", str(error), re.DOTALL).groups()
    return int(number), message


class Parameter(NamedTuple):
    """`.param .u64 .ptr .global .align 1 name` or `.param .align 8 .b8 name[24]`."""

    name: str
    type: str
    count: int  # of elements; 0 for a single value
    alignment: int

    @property
    def bytes(self) -> int:
        return TYPES[self.type] * max(self.count, 1)


class Variable(NamedTuple):
    """A variable in `.global`, `.const`, `.shared` or `.local` memory. `bytes` is None for `name[]`.

    `addresses` tells, for each offset that holds an address at first, the name of its variable and the bytes to add.
    """

    space: str
    name: str
    alignment: int
    bytes: int | None
    contents: bytes  # its first bytes
    addresses: Mapping[int, tuple[str, int]]
    line: int


class Statement(NamedTuple):
    """An instruction or a directive without its semicolon, a `label:`, `{` or `}`."""

    text: str
    line: int


class Function(NamedTuple):
    """A device function. `parameters` begin with its results."""

    name: str
    parameters: tuple[Parameter, ...]
    body: tuple[Statement, ...]
    line: int


class Entry(NamedTuple):
    """A kernel. `threads` is `.reqntid`, `max_threads` is `.maxntid`.

    `cluster` is the number of thread blocks in a cluster that the kernel requires; None if the launch must tell it.
    """

    name: str
    parameters: tuple[Parameter, ...]
    threads: tuple[int, ...] | None
    max_threads: int | None
    cluster: int | None
    body: tuple[Statement, ...]
    line: int


class Module(NamedTuple):
    """A PTX file. `places` tells the source line of each line of the text that has one."""

    version: str
    target: str
    entries: Mapping[str, Entry]
    functions: Mapping[str, Function]
    variables: tuple[Variable, ...]
    places: Mapping[int, Place]


_HEADER = re.compile(r"\.(version|target|address_size)\s+([^\n]+)")
_LINKAGE = re.compile(r"(?:\.(?:visible|extern|weak|common)\b\s*)*")
_ENTRY = re.compile(r"\.entry\s+([\w$.]+)\s*(?:\(([^)]*)\))?")
_FUNCTION = re.compile(r"\.func\s*(?:\(([^)]*)\))?\s*([\w$.]+)\s*(?:\(([^)]*)\))?([^;{]*)")
_VARIABLE = re.compile(
    r"\.(global|const|shared|local)\b(?P<attributes>(?:\s*\.(?:align\s+\d+|attribute\([^)]*\)|managed))*)"
    r"\s*\.(?P<type>\w+)\s+(?P<name>[\w$.]+)\s*(?P<sizes>(?:\[\s*\d*\s*\])*)\s*(?:=\s*(?P<contents>[^;]*))?;"
)
_PIECE = re.compile(
    r'\s*(?:([{}])|([A-Za-z_$%][\w$]*)\s*:(?!:)|((?:"[^"]*"|[^\s;{}"])(?:\{[^}]*\}|"[^"]*"|[^;{}"])*);?|;)'
)


def read_module(text: str) -> Module:
    """Read a PTX file. PtxError names the line of what is not PTX, and of a directive that is not known."""
    places = places_of(text)
    code = re.sub(r"/\*.*?\*/", lambda match: re.sub(r"[^\n]", " ", match[0]), text, flags=re.DOTALL)
    code = re.sub(r"//[^\n]*", "", code)
    code = re.sub(r"^[ \t]*\.(?:loc|file)\b[^\n]*", "", code, flags=re.MULTILINE)
    starts = [match.end() for match in re.finditer("\n", code)]

    def line(position: int) -> int:
        return bisect.bisect_right(starts, position) + 1

    header, entries, functions, variables, position = {}, {}, {}, [], 0
    while position < len(code.rstrip()):
        position = re.compile(r"\s*").match(code, position).end()
        if match := _HEADER.match(code, position):
            header[match[1]] = match[2].strip()
            position = match.end()
        elif match := re.compile(r"\.section\s+[\w.]+\s*").match(code, position):
            position = _after_braces(code, match.end(), line)
        elif match := re.compile(r"\.(?:pragma|alias)\b[^;]*;").match(code, position):
            position = match.end()
        else:
            start = _LINKAGE.match(code, position).end()
            if match := _VARIABLE.match(code, start):
                variables.append(_variable(match, line(start)))
                position = match.end()
            elif match := _ENTRY.match(code, start):
                brace = code.find("{", match.end())
                position = _after_braces(code, brace, line)
                parameters, attributes = read_parameters(match[2] or "", line(start)), code[match.end() : brace]
                limits = *_threads(attributes), _cluster(attributes)
                body = tuple(_statements(code, brace + 1, position - 1, line))
                entries[match[1]] = Entry(match[1], parameters, *limits, body, line(start))
            elif match := _FUNCTION.match(code, start):
                position = match.end() + 1
                if code[match.end() : position] == "{":  # else it is declared only
                    position = _after_braces(code, match.end(), line)
                    parameters = read_parameters(f"{match[1] or ''},{match[3] or ''}", line(start))
                    body = tuple(_statements(code, match.end() + 1, position - 1, line))
                    functions[match[2]] = Function(match[2], parameters, body, line(start))
            else:
                raise PtxError(f"line {line(position)}: {_excerpt(code, position)} is no directive of PTX known here")
    if "version" not in header or "target" not in header:
        raise PtxError("the text has no .version and no .target: it is no PTX")
    return Module(header["version"], header["target"], entries, functions, tuple(variables), places)


def read_variable(text: str, line: int) -> Variable | None:
    """The variable that a statement of a body declares; None for another statement."""
    match = _VARIABLE.fullmatch(f"{text};")
    return match and _variable(match, line)


def _excerpt(code: str, position: int) -> str:
    return repr(code[position : position + 40].split("\n")[0])


def _after_braces(code: str, start: int, line) -> int:
    """The position after the } that closes the { at `start`."""
    depth = 0
    for match in re.compile(r'"[^"\n]*"|[{}]').finditer(code, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.end()
    raise PtxError(f"line {line(start)}: a {{ without its }}")


def read_parameters(written: str, line: int) -> tuple[Parameter, ...]:
    """Read a list of parameters, `.param .b32 a, .param .align 8 .b8 b[24]`."""
    found = []
    for each in filter(str.strip, written.split(",")):
        match = re.fullmatch(
            r"\s*\.param\s*((?:\.align\s+\d+\s*)?)\.(\w+)\s*((?:\.ptr\b[^%]*?)?)\s*([\w$.%]+)\s*(?:\[(\d+)\])?\s*", each
        )
        if not match or match[2] not in TYPES:
            raise PtxError(f"line {line}: the parameter {' '.join(each.split())} is not understood")
        aligned = re.search(r"\d+", match[1])
        found.append(Parameter(match[4], match[2], int(match[5] or 0), int(aligned[0]) if aligned else TYPES[match[2]]))
    return tuple(found)


def _threads(attributes: str) -> tuple[tuple[int, ...] | None, int | None]:
    numbers = {
        match[1]: tuple(map(int, match[2].split(",")))
        for match in re.finditer(r"\.(reqntid|maxntid)\s+(\d+(?:\s*,\s*\d+)*)", attributes)
    }
    required, most = numbers.get("reqntid"), numbers.get("maxntid")
    if required:
        required = (*required, 1, 1)[:3]
    return required, math.prod(most) if most else None


def _cluster(attributes: str) -> int | None:
    if match := re.search(r"\.reqnctapercluster\s+(\d+(?:\s*,\s*\d+)*)", attributes):
        return math.prod(map(int, match[1].split(",")))
    return None if ".explicitcluster" in attributes else 1


def _variable(match: re.Match, line: int) -> Variable:
    aligned = re.search(r"align\s+(\d+)", match["attributes"])
    each = TYPES.get(match["type"])
    if each is None:
        raise PtxError(f"line {line}: a variable of type .{match['type']}")
    sizes = re.findall(r"\[\s*(\d*)\s*\]", match["sizes"])
    count: int | None = 1
    for size in sizes:
        count = None if not size or count is None else count * int(size)
    contents, addresses = _contents(match["contents"], match["type"], line)
    if count is None and contents:
        count = len(contents) // each
    alignment, num_bytes = int(aligned[1]) if aligned else each, None if count is None else count * each
    return Variable(match[1], match["name"], alignment, num_bytes, contents, addresses, line)


_NUMBER = re.compile(r"-?\d\w*")
_PLACE = re.compile(r"(?:generic\s*\(\s*([\w$]+)\s*\)|([\w$]+))(?:\s*\+\s*(\d+))?")


def _contents(written: str | None, kind: str, line: int) -> tuple[bytes, dict[int, tuple[str, int]]]:
    """The first bytes of a variable, and the addresses in them by offset."""
    size, found, addresses = TYPES[kind], b"", {}
    for each in filter(None, map(str.strip, re.split(r"[{},]", written or ""))):
        value = 0
        try:
            if _NUMBER.fullmatch(each):
                value = int(each[2:], 16) if each[:2].lower() in ("0f", "0d") else int(each.rstrip("U"), 0)
            elif size == 8 and (place := _PLACE.fullmatch(each)):
                addresses[len(found)] = place[1] or place[2], int(place[3] or 0)
            else:
                raise ValueError
        except ValueError:
            raise PtxError(f"line {line}: the initial value {each} is not understood") from None
        found += (value % (1 << 8 * size)).to_bytes(size, "little")
    return found, addresses


def _statements(code: str, start: int, end: int, line) -> Iterator[Statement]:
    position = start
    while position < end:
        match = _PIECE.match(code, position, end)
        if not match:
            if not code[position:end].strip():
                return
            raise PtxError(f"line {line(position)}: {_excerpt(code, position)} is not understood")
        brace, label, text = match.groups()
        if brace or label or text:
            at = line(match.start(1 if brace else 2 if label else 3))
            yield Statement(brace or (label and f"{label}:") or " ".join(text.split()), at)
        position = match.end()
