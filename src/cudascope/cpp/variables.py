"""The variables of a CUDA source that live as long as the program: `__constant__`, `__device__` and `__managed__`."""

import math
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from cudascope.cpp.constants import SIZES
from cudascope.cpp.file import File, Piece
from cudascope.cpp.tokens import Tokens, partners, split, substitute
from cudascope.cpp.types import POINTEES, canonical_type

_KINDS = {"__constant__", "__device__", "__managed__"}
_NO_TYPE = _KINDS | {"static", "inline", "volatile"}


class Variable(NamedTuple):
    """As declared: its name with its namespace; in tokens its type and the length of each dimension."""

    name: str
    type: Tokens
    lengths: tuple[Tokens, ...]


def variables_in(file: File, pieces: Iterable[Piece]) -> Iterator[Variable]:
    """Yield the variables that `pieces` define and a launch may change: no constants, no templates."""
    for piece in pieces:
        tokens = file.tokens[piece.start : piece.end - 1]
        if not piece.is_variable or _KINDS.isdisjoint(tokens) or not {"template", "extern"}.isdisjoint(tokens):
            continue
        parts = split(tokens)
        values = [next((i for i, token in enumerate(part) if token in ("=", "{")), None) for part in parts]
        first, *more = [part[:value] for part, value in zip(parts, values, strict=True)]
        end = first.index("[") if "[" in first else len(first)
        kind = [token for token in first[: end - 1] if token not in _NO_TYPE]
        if not kind or "(" in first[:end] or ("const" in kind and "*" not in kind) or "constexpr" in kind:
            continue
        for name, *lengths in (first[end - 1 :], *more):
            if name.isidentifier():
                yield Variable("::".join((*piece.namespace, name)), kind, tuple(_lengths(lengths)))


def plain_variables(file: File) -> list[Variable]:
    """Those that every compiler of the source sees."""
    return list(variables_in(file, filter(file.is_plain, file.pieces)))


def element_bytes(file: File) -> dict[str, int]:
    """The bytes of an element of each array that is no thread's own, by its name: `__shared__`, `static` and so on.

    An array is left out if its type is not one of C++ or CUDA, or if two arrays of one name have different types.
    """
    found: dict[str, set[int]] = {}
    for i, token in enumerate(file.tokens):
        if token not in _KINDS | {"__shared__", "static"}:
            continue
        ends = (j for j in range(i, len(file.tokens)) if file.tokens[j] in ("[", ";", "=", "{"))
        bracket = next(ends, i)
        if file.tokens[bracket] == "[":
            *words, name = file.tokens[i:bracket]
            after_attributes = len(words) - words[::-1].index(")") if ")" in words else 0  # __align__(16)
            words = [word for word in words[after_attributes:] if word not in _NO_TYPE | {"const", "__shared__"}]
            found.setdefault(name, set()).add(SIZES.get(canonical_type(substitute(words, file.named)) or "", 0))
    return {name: min(sizes) for name, sizes in found.items() if len(sizes) == 1 and min(sizes)}


def as_declared(memory: Any, name: str, file: File) -> Any:
    """`memory`, the bytes of variable `name`, in the dtype and the shape that `file` declares.

    A vector's lanes are the last dimension. A type without a dtype, a struct for example, stays bytes. Memory of the
    CPU is a numpy array. Where torch has been imported, a torch tensor of the same memory is returned.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(memory, np.ndarray):
        memory = torch.from_numpy(memory)
    declared = next((each for each in variables_in(file, file.pieces) if each.name == name), None)
    if declared is None:
        return memory
    dtype = getattr(torch or np, _dtype(substitute(declared.type, file.named)) or "_", None)
    if dtype is None:
        return memory
    values = memory.view(dtype)
    shape = [file.scope.evaluate(length).number for length in declared.lengths]
    if None in shape[1:]:
        return values
    if shape and shape[0] is None:  # its length follows from what it is set to
        shape[0] = len(values) // math.prod(shape[1:])
    lanes = len(values) // math.prod(shape)
    return values.reshape(*shape, lanes) if lanes > 1 else values.reshape(shape)


def may_hold_pointers(variable: Any, file: File) -> bool:
    """Whether `variable` (its name and bytes) is a pointer, an integer of 8 bytes, or of a type without a dtype."""
    values = as_declared(np.empty(variable.bytes, np.uint8), variable.name, file)
    return values.dtype.itemsize in (1, 8)


def _dtype(tokens: Tokens) -> str:
    """The dtype of a declared type, or "" if there is none."""
    if "*" in tokens:
        return "int64"
    known = POINTEES.get(canonical_type([token for token in tokens if token != "const"]))
    return known.dtypes[-1] if known and known.dtypes else ""  # the signed one: torch does more with it


def _lengths(tokens: Tokens) -> Iterator[Tokens]:
    close, i = partners(tokens), 0
    while tokens[i : i + 1] == ["["]:
        yield tokens[i + 1 : close[i]]
        i = close[i] + 1
