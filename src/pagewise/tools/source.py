"""Shows the package's live source in a lesson, so that page and package cannot drift apart."""

import ast
import inspect
import textwrap
from collections.abc import Callable

from IPython.display import Markdown


def show(*objects: Callable, docstring: bool = False) -> Markdown:
    """The source of functions, classes or Triton kernels as a code block; docstrings only on request."""
    return Markdown("```python\n" + "\n\n".join(source(o, docstring=docstring) for o in objects) + "\n```")


def source(obj: Callable, *, docstring: bool = False) -> str:
    """The source text of a function, class or Triton kernel, dedented."""
    text = textwrap.dedent(inspect.getsource(getattr(obj, "fn", obj))).rstrip()
    return text if docstring else _without_docstrings(text)


def _without_docstrings(text: str) -> str:
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or len(node.body) == 1:
            continue  # a docstring that is the whole body stays, or nothing would be left
        first = node.body[0]
        if ast.get_docstring(node) is not None:
            for number in range(first.lineno - 1, first.end_lineno):
                lines[number] = None
            if first.end_lineno < len(lines) and lines[first.end_lineno] == "":
                lines[first.end_lineno] = None
    return "\n".join(line for line in lines if line is not None)
