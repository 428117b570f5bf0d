"""A Triton kernel as plain data, so that a second process can compile the kernel without importing its module.

    description = Description()
    kernel = description.value(softmax_kernel)   # JSON; description.functions has the source of each function

A function is described by its text and by the values of the names that it uses, so a kernel of a notebook cell is
described like a kernel of a file. `worker.py` makes functions of the description.
"""

import ast
import functools
import inspect
import sys
import textwrap
import types
from collections.abc import Iterator
from typing import Any

CHAIN = list[str]  # the names of `a.b.c`


class Description:
    """Values as JSON. Every function that a value needs is in `functions`, once."""

    def __init__(self) -> None:
        self.functions: list[dict[str, Any]] = []
        self._index: dict[int, int] = {}

    def value(self, value: Any, *, runs_in_python: bool = False) -> Any:
        """Describe a value: [kind, what the kind needs], or a number, a string, True, False, None as itself.

        Args:
            runs_in_python: it belongs to a function that Python executes while Triton compiles (`constexpr_function`).
        """
        import triton.language as tl
        from triton.runtime.jit import ConstexprFunction

        if value is None or isinstance(value, bool):
            return value
        for plain in (int, float, str):  # also of a subclass, such as an IntEnum
            if isinstance(value, plain):
                return plain.__str__(value) if plain is str else plain(value)
        again = functools.partial(self.value, runs_in_python=runs_in_python)
        if isinstance(value, tl.constexpr):
            return ["constexpr", again(value.value)]
        if isinstance(value, tl.pointer_type):
            return ["pointer", again(value.element_ty)]
        if type(value) is tl.dtype:
            return ["dtype", value.name]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return ["namedtuple", type(value).__name__, list(value._fields), list(map(again, value))]
        if isinstance(value, tuple | list | dict):
            items = value.items() if isinstance(value, dict) else value
            kind = next(each for each in (tuple, list, dict) if isinstance(value, each))  # torch.Size is a tuple
            return [kind.__name__, list(map(again, items))]
        if isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields"):
            return ["namedtuple class", value.__name__, list(value._fields)]
        function = function_of(value)
        if isinstance(value, types.ModuleType) or _is_tritons(function or value) or inspect.isbuiltin(value):
            return _imported(function or value)
        if isinstance(value, ConstexprFunction):
            return self._function(value.fn, "constexpr_function", value)
        if function is not None:
            return self._function(function, "jit", value)
        return _imported(value) if runs_in_python else ["opaque", type(value).__name__, {}]

    def _function(self, function: types.FunctionType, kind: str, owner: Any) -> list[Any]:
        if id(function) not in self._index:
            self._index[id(function)] = len(self.functions)
            self.functions.append({})
            self.functions[self._index[id(function)]].update(self._described(function, kind, owner))
        return ["function", self._index[id(function)]]

    def _described(self, function: types.FunctionType, kind: str, owner: Any) -> dict[str, Any]:
        lines, first = _source(function)
        scope = function.__globals__ | _closure(function)
        found: dict[str, Any] = {}
        for name, *attributes in _names("".join(lines)):
            if name in scope:
                self._add(found, name, scope[name], attributes, runs_in_python=kind != "jit")
        options = getattr(owner, "kwargs", None) or vars(owner)  # an InterpretedFunction's, or a JITFunction's
        return {
            "kind": kind,
            "name": function.__name__,
            "qualname": function.__qualname__,
            "module": function.__module__,
            "file": function.__code__.co_filename,
            "line": first,
            "lines": lines,
            "annotations": {name: _annotation(each) for name, each in function.__annotations__.items()},
            "noinline": bool(options.get("noinline")) if kind == "jit" else False,
            "globals": found,
        }

    def _add(self, found: dict, name: str, value: Any, attributes: CHAIN, *, runs_in_python: bool) -> None:
        """Describe `value.a.b`.

        A name describes a module of Triton or of Python. Its used members describe any other module, and an object that
        only the default of a parameter may use (`def kernel(x, MOST=info.max)`).
        """
        own = isinstance(value, types.ModuleType) and not runs_in_python and not _is_known_module(value)
        described = ["module of", value.__name__, {}] if own else self.value(value, runs_in_python=runs_in_python)
        found.setdefault(name, described)
        if not own and described != ["opaque", type(value).__name__, {}]:
            return
        members = found[name][2]
        if attributes and hasattr(value, attributes[0]):
            member = getattr(value, attributes[0])
            self._add(members, attributes[0], member, attributes[1:], runs_in_python=False)


def function_of(kernel: Any) -> types.FunctionType | None:
    """The Python function of a `@triton.jit` function, compiled or interpreted; None if it is something else."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    return kernel.fn if isinstance(kernel, InterpretedFunction | JITFunction) else None


def _closure(function: types.FunctionType) -> dict[str, Any]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}


_source = functools.lru_cache(maxsize=4096)(inspect.getsourcelines)  # at each launch it would take milliseconds


@functools.lru_cache(maxsize=4096)
def _names(source: str) -> tuple[tuple[str, ...], ...]:
    """The names that a function reads, each with the attributes that follow: `a.b.c` is ("a", "b", "c")."""
    (tree,) = ast.parse(textwrap.dedent(source)).body
    tree.decorator_list = []
    return tuple(dict.fromkeys(_chains(tree)))


def _chains(node: ast.AST) -> Iterator[tuple[str, ...]]:
    chain, inner = [], node
    while isinstance(inner, ast.Attribute):
        chain.append(inner.attr)
        inner = inner.value
    if isinstance(inner, ast.Name):
        if isinstance(inner.ctx, ast.Load):
            yield (inner.id, *reversed(chain))
        return
    for child in ast.iter_child_nodes(inner):
        yield from _chains(child)


def _annotation(annotation: Any) -> str:
    from triton.runtime.jit import _normalize_ty

    return _normalize_ty(annotation)


def _is_tritons(value: Any) -> bool:
    return (getattr(value, "__module__", None) or "").split(".")[0] == "triton" and hasattr(value, "__qualname__")


def _is_known_module(module: types.ModuleType) -> bool:
    package = module.__name__.split(".")[0]
    return package == "triton" or package in sys.stdlib_module_names


def _imported(value: Any) -> list[Any]:
    if isinstance(value, types.ModuleType):
        return ["import", value.__name__, ""]
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    return ["import", module, name] if module and name else ["opaque", type(value).__name__, {}]
