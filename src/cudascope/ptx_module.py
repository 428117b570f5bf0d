"""A PTX file as values: its entries, their parameters and statements, its variables, and the source line of each line.

    module = read_module(text)
    module.entries["softmax_kernel"].parameters

The text is what NVRTC and Triton write: PTX ISA 9.0, sections 4.2 to 5.4 and 11. Debug sections are passed over.
"""

import bisect
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import NamedTuple

TYPES = {"pred": 1, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "b32": 4, "u32": 4, "s32": 4}
TYPES |= {"f32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "b128": 16}


class PtxError(ValueError):
    """The text is not PTX that the CPU runner can execute. The message names the line."""


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
    """A variable in `.global`, `.const`, `.shared` or `.local` memory. `bytes` is None for `name[]`."""

    space: str
    name: str
    alignment: int
    bytes: int | None
    contents: bytes | Mapping[int, str]  # its first bytes
    line: int


class Statement(NamedTuple):
    """An instruction or a directive without its semicolon, a `label:`, `{` or `}`."""

    text: str
    line: int


class Entry(NamedTuple):
    """A kernel. `threads` is `.reqntid`, `max_threads` is `.maxntid`."""

    name: str
    parameters: tuple[Parameter, ...]
    threads: tuple[int, ...] | None
    max_threads: int | None
    body: tuple[Statement, ...]
    line: int


class Place(NamedTuple):
    """A line of the source that the PTX was compiled from."""

    file: str
    line: int


class Module(NamedTuple):
    """A PTX file. `places` tells the source line of each line of the text that has one."""

    version: str
    target: str
    entries: Mapping[str, Entry]
    variables: tuple[Variable, ...]
    places: Mapping[int, Place]


_HEADER = re.compile(r"\.(version|target|address_size)\s+([^\n]+)")
_LINKAGE = re.compile(r"(?:\.(?:visible|extern|weak|common)\b\s*)*")
_ENTRY = re.compile(r"\.entry\s+([\w$.]+)\s*(?:\(([^)]*)\))?")
_FUNCTION = re.compile(r"\.func\b")
_VARIABLE = re.compile(
    r"\.(global|const|shared|local)\b(?P<attributes>(?:\s*\.(?:align\s+\d+|attribute\([^)]*\)|managed))*)"
    r"\s*\.(?P<type>\w+)\s+(?P<name>[\w$.]+)\s*(?P<sizes>(?:\[\s*\d*\s*\])*)\s*(?:=\s*(?P<contents>[^;]*))?;"
)
_PIECE = re.compile(
    r'\s*(?:([{}])|([A-Za-z_$%][\w$]*)\s*:(?!:)|((?:"[^"]*"|[^\s;{}"])(?:\{[^}]*\}|"[^"]*"|[^;{}"])*);?|;)'
)


def read_module(text: str) -> Module:
    """Read a PTX file.

    Raises:
        PtxError: it is not PTX, or uses a directive that is not known; the message has the line.
    """
    places = _places(text)
    code = re.sub(r"/\*.*?\*/", lambda match: re.sub(r"[^\n]", " ", match[0]), text, flags=re.DOTALL)
    code = re.sub(r"//[^\n]*", "", code)
    code = re.sub(r"^[ \t]*\.(?:loc|file)\b[^\n]*", "", code, flags=re.MULTILINE)
    starts = [match.end() for match in re.finditer("\n", code)]

    def line(position: int) -> int:
        return bisect.bisect_right(starts, position) + 1

    header, entries, variables, position = {}, {}, [], 0
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
                end = _after_braces(code, brace, line)
                attributes = code[match.end() : brace]
                body = tuple(_statements(code, brace + 1, end - 1, line))
                entries[match[1]] = Entry(
                    match[1], _parameters(match[2] or "", line(start)), *_threads(attributes), body, line(start)
                )
                position = end
            elif _FUNCTION.match(code, start):
                brace, semicolon = code.find("{", start), code.find(";", start)
                is_declaration = brace < 0 or 0 <= semicolon < brace
                position = semicolon + 1 if is_declaration else _after_braces(code, brace, line)
            else:
                raise PtxError(
                    f"line {line(position)}: {_excerpt(code, position)} is no directive of PTX that is known"
                )
    if "version" not in header or "target" not in header:
        raise PtxError("the text has no .version and no .target: it is no PTX")
    return Module(header["version"], header["target"], entries, tuple(variables), places)


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


def _parameters(written: str, line: int) -> tuple[Parameter, ...]:
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
    size = None
    if most:
        size = 1
        for each in most:
            size *= each
    return required, size


def _variable(match: re.Match, line: int) -> Variable:
    aligned = re.search(r"align\s+(\d+)", match["attributes"])
    each = TYPES.get(match["type"])
    if each is None:
        raise PtxError(f"line {line}: a variable of type .{match['type']}")
    sizes = re.findall(r"\[\s*(\d*)\s*\]", match["sizes"])
    count: int | None = 1
    for size in sizes:
        count = None if not size or count is None else count * int(size)
    contents = _contents(match["contents"], match["type"], line)
    if count is None and contents:
        count = len(contents) // each
    return Variable(
        match[1],
        match["name"],
        int(aligned[1]) if aligned else each,
        None if count is None else count * each,
        contents,
        line,
    )


def _contents(written: str | None, kind: str, line: int) -> bytes:
    size, found = TYPES[kind], b""
    for each in re.findall(r"[^\s{},]+", written or ""):
        try:
            is_float = each[:2].lower() in ("0f", "0d")
            value = int(each[2:], 16) if is_float else int(each.rstrip("U"), 0)
        except ValueError:
            raise PtxError(f"line {line}: the initial value {each} is not understood") from None
        found += (value % (1 << 8 * size)).to_bytes(size, "little")
    return found


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


def _places(text: str) -> dict[int, Place]:
    """The source line of each line of the text.

    An instruction of an inlined function has several lines. The innermost one outside of Triton's own files counts.
    """
    files = {int(n): name for n, name in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.MULTILINE)}
    by_name = {PurePath(name).name: name for name in files.values()}
    places, now = {}, None
    for number, row in enumerate(text.split("\n"), 1):
        match = re.match(r"\s*\.loc\s+(\d+)\s+(\d+)\s+\d+([^/]*)(?://(.*))?", row)
        if not match:
            if now and row.strip() and not row.lstrip().startswith((".", "//", "$", "}")):
                places[number] = now
            elif row.startswith("}"):
                now = None
            continue
        frames = [
            Place(by_name.get(file, file), int(at))
            for file, at in re.findall(r"([^\s\[\]@:]+):(\d+):\d+", match[4] or "")
        ]
        if not frames:
            frames = [Place(files.get(int(match[1]), match[1]), int(match[2]))]
            if inlined := re.search(r"inlined_at\s+(\d+)\s+(\d+)", match[3]):
                frames.append(Place(files.get(int(inlined[1]), inlined[1]), int(inlined[2])))
        frames = [frame for frame in frames if frame.line]
        own = [frame for frame in frames if "/triton/language/" not in frame.file]
        now = (own or frames or [now])[0]
    return places
