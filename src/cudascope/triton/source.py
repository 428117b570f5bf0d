"""A Triton kernel as plain data, so that a second process can compile the kernel without importing its module.

A `Description` describes a function by its text and by the values of the names that it uses, so a kernel of a notebook
cell is described like a kernel of a file. `worker.py` makes functions of the description. It lasts as long as its
functions read the same objects under the same names: `Description.is_current`.
"""

import ast
import functools
import inspect
import sys
import textwrap
import types
from collections.abc import Iterable, Iterator
from typing import Any

CHAIN = list[str]  # the names of `a.b.c`

_PLAIN = {bool, int, float, str, type(None)}
_ABSENT = object()


class Description:
    """Values as JSON. Every function that a value needs is in `functions`, once."""

    def __init__(self) -> None:
        self.functions: list[dict[str, Any]] = []
        self._index: dict[int, int] = {}
        self._read: list[tuple[Any, str, Any]] = []  # by functions: the owner of a name, the name and the object
        self._lasts = True  # no function reads an object that may change

    def __copy__(self) -> "Description":
        """A description that tells of more values, and leaves this one as it is."""
        made = Description()
        made.functions, made._index = self.functions.copy(), self._index.copy()
        return made

    def is_current(self) -> bool:
        """Whether the functions would be described in the same way now."""
        for owner, name, value in self._read:
            try:
                now = owner.get(name, _ABSENT) if type(owner) is dict else getattr(owner, name, _ABSENT)
            except ValueError:  # a variable of a closure has no value any more
                return False
            if now is not value:
                return False
        return self._lasts

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

        def again(value: Any) -> Any:
            return self.value(value, runs_in_python=runs_in_python)

        def each(values: Iterable[Any]) -> list[Any]:
            return [value if type(value) in _PLAIN else again(value) for value in values]

        if isinstance(value, tl.constexpr):
            if is_definition(value.value):  # @tl.constexpr def f
                return ["constexpr", self._function(value.value, "python", value.value)]
            return ["constexpr", again(value.value)]
        if isinstance(value, tl.pointer_type):
            return ["pointer", again(value.element_ty)]
        if type(value) is tl.dtype:
            return ["dtype", value.name]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return ["namedtuple", type(value).__name__, list(value._fields), each(value)]
        if isinstance(value, tuple | list | dict):
            kind = tuple if isinstance(value, tuple) else list if isinstance(value, list) else dict  # torch.Size too
            self._lasts &= kind is tuple
            return [kind.__name__, [each(value), each(value.values())] if kind is dict else each(value)]
        if isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields"):
            defaults = value._field_defaults
            return ["namedtuple class", value.__name__, list(value._fields), each(defaults.values())]
        function = function_of(value)
        if isinstance(value, types.ModuleType) or _is_tritons(function or value) or inspect.isbuiltin(value):
            return _imported(function or value)
        if isinstance(value, ConstexprFunction):
            return self._function(value.fn, "constexpr_function", value)
        if function is not None:
            return self._function(function, "jit", value)
        if runs_in_python and getattr(value, "__module__", "") == "__main__" and is_definition(value):
            return self._function(value, "python", value)  # the process that compiles has another __main__
        self._lasts = False
        return _imported(value) if runs_in_python else ["opaque", type(value).__name__, {}]

    def _function(self, function: types.FunctionType, kind: str, owner: Any) -> list[Any]:
        if id(function) not in self._index:
            self._index[id(function)] = len(self.functions)
            self.functions.append({})
            self.functions[self._index[id(function)]].update(self._described(function, kind, owner))
        return ["function", self._index[id(function)]]

    def _described(self, function: types.FunctionType, kind: str, owner: Any) -> dict[str, Any]:
        from triton.runtime.jit import _normalize_ty

        lines, first = _source(function)
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        self._lasts &= types.CellType() not in cells.values()
        found: dict[str, Any] = {}
        for name, *attributes in _names("".join(lines)):
            cell = cells.get(name, types.CellType())
            if cell != types.CellType():
                value = cell.cell_contents
                self._read.append((cell, "cell_contents", value))
            else:
                value = function.__globals__.get(name, _ABSENT)
                self._read.append((function.__globals__, name, value))
            if value is not _ABSENT:
                self._add(found, name, value, attributes, runs_in_python=kind != "jit")
        options = getattr(owner, "kwargs", None) or vars(owner)  # an InterpretedFunction's, or a JITFunction's
        return {
            "kind": kind,
            "name": function.__name__,
            "qualname": function.__qualname__,
            "module": function.__module__,
            "file": function.__code__.co_filename,
            "line": first,
            "lines": lines,
            "annotations": {name: _normalize_ty(each) for name, each in function.__annotations__.items()},
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
        if not attributes:
            return
        member = getattr(value, attributes[0], _ABSENT)
        self._read.append((value, attributes[0], member))
        if member is not _ABSENT:
            self._add(members, attributes[0], member, attributes[1:], runs_in_python=False)


def function_of(kernel: Any) -> types.FunctionType | None:
    """The Python function of a `@triton.jit` function, compiled or interpreted; None if it is something else."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    return kernel.fn if isinstance(kernel, InterpretedFunction | JITFunction) else None


_source = functools.lru_cache(maxsize=4096)(inspect.getsourcelines)  # at each launch it would take milliseconds


def is_definition(value: Any) -> bool:
    """Whether a value is a plain function with a `def` whose text is known."""
    if not isinstance(value, types.FunctionType):
        return False
    try:
        (tree,) = ast.parse(textwrap.dedent("".join(_source(value)[0]))).body
    except (OSError, SyntaxError, ValueError):
        return False
    return isinstance(tree, ast.FunctionDef)


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
