"""Source text of exercises: the solution, the same text with gaps, and mistakes as edits of the solution.

The solution is a file in `device_code`, in which comments mark each gap, or the live source of a kernel of the package.
"""

import ast
import importlib.util
import linecache
import re
import zlib
from pathlib import Path
from typing import NamedTuple

from pagewise.exercises.exercise import Mistake

_MARKED_GAP = re.compile(
    r"(?P<ask>^[ \t]*(?P<mark>#|//) yours: .*\n(?:^[ \t]*(?P=mark) .*\n)*)"
    r"(?P<answer>(?s:.*?))^[ \t]*(?P=mark) end\n",
    re.MULTILINE,
)


def solution_text(file: str) -> str:
    """Return the text of a file in `device_code` without the marks of its gaps."""
    return _MARKED_GAP.sub(lambda gap: gap["answer"], _read(file)).rstrip()


def stub_text(file: str) -> str:
    """Return the text of a file in `device_code` with its gaps left empty. Python gets "..." in each gap."""

    def empty(gap: re.Match) -> str:
        indent, mark = gap["ask"].partition(gap["mark"])[:2]
        return gap["ask"] + (f"{indent}...\n" if mark == "#" else "\n")

    return _MARKED_GAP.sub(empty, _read(file)).rstrip()


def _read(file: str) -> str:
    return (Path(__file__).parent / "device_code" / file).read_text()


class Gap(NamedTuple):
    """Lines of a solution that the reader writes: from the line that begins with `first` to the one with `last`."""

    first: str
    last: str
    request: str  # what the reader writes, one comment line each
    instead: str = "..."  # the code that fills the gap in the stub


def kernel_text(module: str, name: str, imports: str = "") -> str:
    """Return the live source of a Triton kernel of `pagewise.kernels`, complete with its imports.

    The module is read as text, because importing it would import Triton.
    """
    text = Path(importlib.util.find_spec(f"pagewise.kernels.{module}").origin).read_text()
    (function,) = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == name)
    lines = text.splitlines()[function.decorator_list[0].lineno - 1 : function.end_lineno]
    return "\n".join(["import triton", "import triton.language as tl", *imports.splitlines(), "", "", *lines])


def with_gaps(source: str, *gaps: Gap) -> str:
    """Return `source` with each gap replaced by its request and the code that stands in for the answer."""
    lines = source.splitlines()
    for gap in gaps:
        first, last = (_only_line(lines, start) for start in (gap.first, gap.last))
        indent = lines[first][: -len(lines[first].lstrip())]
        asked = [f"# {line}" for line in f"yours: {gap.request}".splitlines()]
        lines[first : last + 1] = [indent + line for line in [*asked, *gap.instead.splitlines()]]
    return "\n".join(lines)


def _only_line(lines: list[str], start: str) -> int:
    found = [i for i, line in enumerate(lines) if line.lstrip().startswith(start)]
    assert len(found) == 1, f"{len(found)} lines begin with {start!r}, not one"
    return found[0]


def edited(source: str, *edits: tuple[str, str]) -> str:
    """Return `source` with each (old, new) replaced: a mistake is the solution with another line or two."""
    for old, new in edits:
        assert old in source, f"no {old!r} in this source"
        source = source.replace(old, new)
    return source


def variants_of(source: str, **mistakes: tuple) -> dict[str, Mistake]:
    """Return mistakes as edits of a solution: title = (hint, (old, new), …)."""
    return {
        title.replace("_", " "): Mistake(edited(source, *edits), hint) for title, (hint, *edits) in mistakes.items()
    }


def variants(file: str, **mistakes: tuple) -> dict[str, Mistake]:
    """Return `variants_of` the solution in a file of `device_code`."""
    return variants_of(solution_text(file), **mistakes)


def triton_kernel(source: str) -> object:
    """Return the Triton kernel of a Python source text. Triton can read the text again, as it could a cell's."""
    filename = f"<exercise {zlib.crc32(source.encode()):08x}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace = {"__name__": __name__}
    exec(compile(source, filename, "exec"), namespace)
    return [value for value in namespace.values() if hasattr(value, "fn")][-1]
