"""Shows the package's live source in a lesson, so that page and package cannot drift apart."""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

from IPython.display import Markdown


def show(*objects: Callable, docstring: bool = False) -> Markdown:
    """Return the source of functions, classes or Triton kernels as a code block, without docstrings by default."""
    return Markdown("```python\n" + "\n\n".join(source(o, docstring=docstring) for o in objects) + "\n```")


def show_part(obj: Callable, first: str, last: str) -> Markdown:
    """Return a part of a function: from its line with `first` to the next line with `last`, or raise ValueError."""
    return Markdown(f"```python\n{_part(source(obj), obj.__name__, first, last)}\n```")


def show_cuda(path: Path, *names: str) -> Markdown:
    """Return the source of functions of a CUDA file, each with the comment above it, as one code block."""
    text = path.read_text(encoding="utf-8")
    return Markdown("```cpp\n" + "\n\n".join(cuda_source(text, name) for name in names) + "\n```")


def show_cuda_part(path: Path, name: str, first: str, last: str) -> Markdown:
    """Return a part of a CUDA function: from its line with `first` to the next with `last`, or raise ValueError."""
    text = cuda_source(path.read_text(encoding="utf-8"), name)
    text = "\n".join(line for line in text.splitlines() if not line.startswith("#pragma"))
    return Markdown(f"```cpp\n{_part(text, name, first, last)}\n```")


def _part(text: str, name: str, first: str, last: str) -> str:
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if first in line), len(lines))
    stop = next((i for i, line in enumerate(lines) if i >= start and last in line), None)
    if stop is None:
        raise ValueError(f"{name} has no lines from {first!r} to {last!r}")
    return textwrap.dedent("\n".join(lines[start : stop + 1]))


def cuda_source(text: str, name: str) -> str:
    """Return a function or struct of CUDA C++, from its comment to its last brace, or raise ValueError."""
    comment, template = r"(?:^//[^\n]*\n)*", r"(?:^template[^;{}]*?>\s*\n)?"
    parameters = r"(?://[^\n]*\n|/(?!/)|[^;{}/])*"  # a comment may contain any character
    definition = re.search(rf"{comment}{template}^[^\n/]*\b{name}\b{parameters}\{{", text, re.MULTILINE)
    if definition is None:
        raise ValueError(f"there is no definition of {name} in this source")
    end, depth = definition.end(), 1
    while depth:
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
    return text[definition.start() : end]


def source(obj: Callable, *, docstring: bool = False) -> str:
    """Return the source text of a function, class or Triton kernel, dedented."""
    text = textwrap.dedent(inspect.getsource(getattr(obj, "fn", obj))).rstrip()
    return text if docstring else _without_docstrings(text)


def _without_docstrings(text: str) -> str:
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or len(node.body) == 1:
            continue  # a docstring that is the whole body stays
        first = node.body[0]
        if ast.get_docstring(node) is not None:
            for number in range(first.lineno - 1, first.end_lineno):
                lines[number] = None
            if first.end_lineno < len(lines) and lines[first.end_lineno] == "":
                lines[first.end_lineno] = None
    return "\n".join(line for line in lines if line is not None)
