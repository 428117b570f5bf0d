"""Device code of the exercises: kept as files, shown with holes, handed out as a kernel.

What the reader shall write stands between `yours: …` and `end`, each a comment on a line of its own.
"""

import linecache
import re
import zlib
from pathlib import Path

from pagewise.exercises.exercise import Mistake

_HOLE = re.compile(
    r"(?P<ask>^[ \t]*(?P<mark>#|//) yours: .*\n(?:^[ \t]*(?P=mark) .*\n)*)"
    r"(?P<answer>(?s:.*?))^[ \t]*(?P=mark) end\n",
    re.MULTILINE,
)


def solution_text(file: str) -> str:
    """The file without the marks."""
    return _HOLE.sub(lambda hole: hole["answer"], _read(file)).rstrip()


def stub_text(file: str) -> str:
    """The file with holes where the answers are; in Python "..." stands there, since a loop cannot be empty."""

    def hole(match: re.Match) -> str:
        indent, mark = match["ask"].partition(match["mark"])[:2]
        return match["ask"] + (f"{indent}...\n" if mark == "#" else "\n")

    return _HOLE.sub(hole, _read(file)).rstrip()


def _read(file: str) -> str:
    return (Path(__file__).parent / "device_code" / file).read_text()


def edited(source: str, *edits: tuple[str, str]) -> str:
    """`source` with each (old, new) replaced: a mistake is the solution with another line or two."""
    for old, new in edits:
        assert old in source, f"no {old!r} in this source"
        source = source.replace(old, new)
    return source


def variants(file: str, **mistakes: tuple) -> dict[str, Mistake]:
    """Mistakes as edits of the file's solution: title = (hint, (old, new), …)."""
    source = solution_text(file)
    return {
        title.replace("_", " "): Mistake(edited(source, *edits), hint) for title, (hint, *edits) in mistakes.items()
    }


def triton_kernel(source: str) -> object:
    """The Triton kernel of a Python source text, which Triton can read again as it could a cell's."""
    filename = f"<exercise {zlib.crc32(source.encode()):08x}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace = {"__name__": __name__}
    exec(compile(source, filename, "exec"), namespace)
    return next(value for value in namespace.values() if hasattr(value, "fn"))
