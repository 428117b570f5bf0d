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
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            first = node.body[0]
            for number in range(first.lineno - 1, first.end_lineno):
                lines[number] = None
            if len(node.body) > 1 and first.end_lineno < len(lines) and lines[first.end_lineno] == "":
                lines[first.end_lineno] = None
    return "\n".join(line for line in lines if line is not None)
