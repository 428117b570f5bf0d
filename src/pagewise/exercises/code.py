"""Source text of exercises: a solution with gaps, and a mistake as edits of the solution."""

import ast
import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Gap(NamedTuple):
    """Lines of a solution that the reader writes: the only line that begins with `last`, and those up to `first`."""

    first: str
    last: str
    request: str  # what the reader writes, one comment line each
    instead: str = ""  # the code that fills the gap in the stub; by default an empty line, and "..." in Python


def device_code(file: str) -> str:
    """Return the text of a file in `device_code`."""
    return (Path(__file__).parent / "device_code" / file).read_text(encoding="utf-8").rstrip()


def with_gaps(source: str, *gaps: Gap) -> str:
    """Return `source` with each gap replaced by its request and by the code of the stub."""
    mark, empty = ("//", "") if "__global__" in source else ("#", "...")
    lines = source.splitlines()
    for gap in gaps:
        (last,) = (i for i, line in enumerate(lines) if line.lstrip().startswith(gap.last))
        first = max(i for i, line in enumerate(lines[: last + 1]) if line.lstrip().startswith(gap.first))
        indent = lines[first][: -len(lines[first].lstrip())]
        request = textwrap.indent(f"yours: {gap.request}", f"{mark} ")
        lines[first : last + 1] = textwrap.indent(f"{request}\n{gap.instead or empty}", indent).split("\n")
    return "\n".join(lines)


def edited(source: str, *edits: tuple[str, str]) -> str:
    """Return `source` with each (old, new) replaced: a mistake is the solution with another line or two."""
    for old, new in edits:
        assert old in source, f"no {old!r} in this source"
        source = source.replace(old, new)
    return source


def same_function(function: Callable, source: str) -> bool:
    """Return whether `function` has the body of the last function of `source`, docstrings and names aside.

    False, too, if the source of `function` is not known.
    """
    try:
        theirs = inspect.getsource(function)
    except (OSError, TypeError):
        return False
    return body(theirs) == body(source)


def body(source: str) -> list[str] | None:
    """Return the statements of the last function of a source text, without its docstring. None if there is none."""
    try:
        tree = ast.parse(textwrap.dedent(source))
    except SyntaxError:  # the line of a lambda need not be a statement
        return None
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    if not functions:
        return None
    has_docstring = ast.get_docstring(functions[-1]) is not None
    return [ast.dump(statement) for statement in functions[-1].body[has_docstring:]]
