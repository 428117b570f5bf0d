"""The variables of a CUDA source that live as long as the program: `__constant__`, `__device__` and `__managed__`."""

import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from cudascope.device_code import DeviceCode
from cudascope.names import read_names
from cudascope.outline import Piece
from cudascope.parameters import canonical_type
from cudascope.tokens import NAME, Tokens, evaluate, lexemes_of, matching, substitute
from cudascope.types import POINTEES

_KINDS = {"__constant__", "__device__", "__managed__"}
_NO_TYPE = _KINDS | {"static", "inline", "volatile"}


class Variable(NamedTuple):
    """As declared: its name with its namespace; in tokens its type and the length of each dimension."""

    name: str
    type: Tokens
    lengths: tuple[Tokens, ...]


def variables_in(code: DeviceCode, pieces: Sequence[Piece]) -> Iterator[Variable]:
    """Yield the variables that `pieces` define and a launch may change: no constants, no templates."""
    for piece in pieces:
        tokens = code.tokens[piece.start : piece.end - 1]
        if not piece.is_variable or _KINDS.isdisjoint(tokens) or not {"template", "extern"}.isdisjoint(tokens):
            continue
        first, *more = _declarators(tokens)
        end = first.index("[") if "[" in first else len(first)
        kind = [token for token in first[: end - 1] if token not in _NO_TYPE]
        if not kind or "(" in first[:end] or ("const" in kind and "*" not in kind) or "constexpr" in kind:
            continue
        for name, *lengths in (first[end - 1 :], *more):
            if NAME.fullmatch(name):
                yield Variable("::".join((*piece.namespace, name)), kind, tuple(_lengths(lengths)))


def variables_of(text: str) -> list[Variable]:
    """Those of all of `text`."""
    code = DeviceCode(text, list(lexemes_of(text)))
    return list(variables_in(code, code.pieces))


def as_declared(memory: Any, name: str, source: str, defines: Sequence[str]) -> Any:
    """`memory`, the bytes of variable `name`, in the dtype and the shape that `source` declares.

    A vector's lanes are the last dimension. A type without a dtype, a struct for example, stays bytes. Memory of the
    CPU is a numpy array. Where torch has been imported, a torch tensor of the same memory is returned.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(memory, np.ndarray):
        memory = torch.from_numpy(memory)
    declared = next((each for each in variables_of(source) if each.name == name), None)
    if declared is None:
        return memory
    _, named = read_names(source, defines)
    dtype = getattr(torch or np, _dtype(substitute(declared.type, named)) or "_", None)
    if dtype is None:
        return memory
    values = memory.view(dtype)
    shape = [evaluate(" ".join(substitute(length, named))) for length in declared.lengths]
    if None in shape[1:]:
        return values
    if shape and shape[0] is None:  # its length follows from what it is set to
        shape[0] = len(values) // math.prod(shape[1:])
    lanes = len(values) // math.prod(shape)
    return values.reshape(*shape, lanes) if lanes > 1 else values.reshape(shape)


def may_hold_pointers(variable: Any, source: str, defines: Sequence[str]) -> bool:
    """Whether `variable` (its name and bytes) is a pointer, an integer of 8 bytes, or of a type without a dtype."""
    values = as_declared(np.empty(variable.bytes, np.uint8), variable.name, source, defines)
    return values.dtype.itemsize in (1, 8)


def _dtype(tokens: Tokens) -> str:
    """The dtype of a declared type, or "" if there is none."""
    if "*" in tokens:
        return "int64"
    known = POINTEES.get(canonical_type([token for token in tokens if token != "const"]))
    return known.dtypes[-1] if known and known.dtypes else ""  # the signed one: torch does more with it


def _declarators(tokens: Tokens) -> list[Tokens]:
    """What stands between the commas of a declaration, without the values."""
    parts, i = [[]], 0
    skipping = False
    while i < len(tokens):
        end = i
        if tokens[i] in ("(", "[", "{") or (tokens[i] == "<" and not skipping):
            end = matching(tokens, i)
        if tokens[i] == ",":
            parts.append([])
            skipping = False
        else:
            skipping |= tokens[i] in ("=", "{")
            parts[-1] += [] if skipping else tokens[i : end + 1]
        i = end + 1
    return parts


def _lengths(tokens: Tokens) -> Iterator[Tokens]:
    i = 0
    while i < len(tokens) and tokens[i] == "[":
        end = matching(tokens, i)
        yield tokens[i + 1 : end]
        i = end + 1
