"""The source line of each line of a PTX file, as its `.file` and `.loc` directives tell it (PTX ISA, section 11.5)."""

import itertools
import re
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
            if now and row.strip() and not row.lstrip().startswith((".", "//", "$", "}")):
                places[number] = now
            elif row.startswith("}"):
                now = None
            continue
        at, caller = match.groups()[:3], _CALLER.search(match[4])
        if caller:
            callers[at] = caller.groups()
        else:
            callers.pop(at, None)
        frames = [  # Triton writes all of them
            Place(by_name.get(file, file), int(at))
            for file, at in re.findall(r"([^\s\[\]@:]+):(\d+):\d+", match[5] or "")
        ]
        for _ in range(_DEEPEST if not frames else 0):
            frames.append(Place(files.get(at[0], at[0]), int(at[1])))
            if at not in callers:
                break
            at = callers[at]
        frames = [frame for frame in frames if frame.line]
        own = [frame for frame in frames if not _is_foreign(frame.file)]
        now = (own or frames or [now])[0]
    return places


def _is_foreign(file: str) -> bool:
    """Whether a file belongs to Triton, to NVIDIA or to cudascope."""
    path = PurePath(file)
    of_triton = ("triton", "language") in itertools.pairwise(path.parts[:-1])
    return of_triton or path.name == "__nv_nvrtc_builtin_header.h" or is_foreign(file)
