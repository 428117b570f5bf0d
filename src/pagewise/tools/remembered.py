"""Checks that are not repeated: what depends on shapes and options only is looked up the second time."""

import functools
from collections.abc import Callable, Hashable
from typing import TypeVar

from torch import Tensor

from pagewise.tools.architecture import compiled_for
from pagewise.tools.ops import NUMBERS
from pagewise.tools.transforms import is_plain

MOST = 512  # results that a function remembers; then it begins anew

Result = TypeVar("Result")


def remembers(check: Callable[..., Result]) -> Callable[..., Result]:
    """Return `check`, which is not called again for arguments that it has accepted before.

    check: a function of tensors, numbers and strings, or of tuples of these. Its result must follow from the numbers,
    the strings, the shapes, strides, dtypes and devices of the tensors, and the GPU that Triton compiles for. It must
    not contain a tensor. Neither an error nor None is remembered.
    """
    known: dict[Hashable, Result] = {}

    @functools.wraps(check)
    def checked(*arguments):
        key = facts(arguments)
        if key is None:
            return check(*arguments)
        found = known.get(key)
        if found is None:
            if len(known) >= MOST:
                known.clear()
            found = known[key] = check(*arguments)
        return found

    return checked


def facts(arguments: tuple) -> Hashable | None:
    """Return what arguments have in common for which a check has one answer.

    None inside a transform of torch, or if an argument is neither a plain tensor nor a number, nor a tuple of these.
    """
    if not is_plain():
        return None
    of_arguments = _facts(arguments)
    return None if of_arguments is None else (compiled_for(), of_arguments)


def _facts(arguments: tuple) -> Hashable | None:
    found = []
    for argument in arguments:
        kind = type(argument)
        if kind is Tensor:
            found.append((argument.shape, argument.stride(), argument.dtype, argument.device))
        elif kind in NUMBERS:
            found += kind, argument  # 1, 1.0 and True are equal
        elif isinstance(argument, tuple) and (fields := _facts(argument)) is not None:
            found.append(fields)
        else:
            return None
    return tuple(found)
