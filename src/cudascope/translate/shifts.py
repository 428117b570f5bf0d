"""Shifts as a GPU does them: by the width of the number or more they give 0, or the sign of a number shifted right.

C++ leaves such a shift open, and the host's instruction takes the amount modulo the width. With -fsanitize=shift-
exponent the compiler calls the runtime where an amount may be too large, and the assembly holds file, line and column
of each call. These shifts become operators of simt/shifts.h. A shift that cannot be changed still calls the runtime,
which stops the kernel if the amount is too large.
"""

import re
from collections.abc import Callable

from cudascope.toolchain.compiler import BYTES
from cudascope.translate.preprocess import MARKER

_CALLED = "__ubsan_handle_shift_out_of_bounds"
_PLACE = re.compile(  # file, line and column, then the types of both operands
    r"^\S+:[^\n]*\n\s*\.(?:quad|xword|8byte)\s+([\w.$]+)[^\n]*\n\s*\.(?:long|word|4byte)\s+(\d+)[^\n]*\n"
    r"\s*\.(?:long|word|4byte)\s+(\d+)[^\n]*\n\s*\.(?:quad|xword|8byte)[^\n]*\n\s*\.(?:quad|xword|8byte)\b",
    re.MULTILINE,
)
_STRING = re.compile(r'^(\S+):\n\s*\.(?:string|asciz)\s+"(.*)"$', re.MULTILINE)
_OPERATOR = re.compile(r"(<<|>>)(=?)")

Place = tuple[str, int, int]


def open_shifts(assembly: str, is_own: Callable[[str], bool]) -> set[Place]:
    """File, line and column of each shift in the user's files whose amount may be too large."""
    if _CALLED not in assembly:
        return set()
    files = {label: _unescaped(string) for label, string in _STRING.findall(assembly)}
    places = {(files.get(label, ""), int(line), int(column)) for label, line, column in _PLACE.findall(assembly)}
    return {place for place in places if is_own(place[0])}


def _unescaped(string: str) -> str:
    """A string of the assembly, in which a byte may be written as three octal digits."""

    def byte(escape: re.Match) -> bytes:
        return bytes([int(escape[1], 8)]) if len(escape[1]) == 3 else escape[1]

    return re.sub(rb"\\([0-7]{3}|.)", byte, string.encode(**BYTES)).decode(**BYTES)


def with_exact_shifts(text: str, places: set[Place]) -> tuple[str, set[Place]]:
    """`text` with the shifts at `places` made exact, and the places at which it has none: in a macro, a header."""
    lines, left = text.split("\n"), set(places)
    columns: dict[tuple[str, int], list[int]] = {}
    for file, line, column in sorted(places, reverse=True):  # from the last: the others keep their columns
        columns.setdefault((file, line), []).append(column)
    file, number = "<stdin>", 0
    for i, line in enumerate(lines):
        number += 1
        if marker := MARKER.match(line):
            file, number = marker[2], int(marker[1]) - 1
            continue
        for column in columns.get((file, number), ()):
            content = lines[i].encode(**BYTES)  # a column counts bytes from 1
            before, after = content[: column - 1].decode(**BYTES), content[column - 1 :].decode(**BYTES)
            if found := _OPERATOR.match(after):
                sign, equals = found.groups()
                exact = f" {sign}= ::simt::By() = " if equals else f" {sign} ::simt::shift {sign} "
                lines[i] = before + exact + after[found.end() :]
                left.discard((file, number, column))
    return "\n".join(lines), left
