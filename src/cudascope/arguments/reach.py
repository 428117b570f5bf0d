"""Memory that launches may touch besides their arguments: pointers in a struct or in a table of pointers lead there."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from cudascope.arguments.arrays import Array, array_of

_reachable: ContextVar[dict[str, Array]] = ContextVar("cudascope_reachable", default={})  # noqa: B039  never changed


@contextlib.contextmanager
def reachable(**arrays: object) -> Iterator[None]:
    """Let launches inside touch these arrays too: torch tensors, numpy arrays, or objects with DLPack.

    `check` and `observe` treat this memory like the memory of an argument, and findings use the names given here. The
    memory keeps its address during a launch, so pointers to it stay valid. A view stands for all the memory that it is
    a view of. An argument whose address is also in a struct or in a table of pointers keeps its address without a name
    here. On a GPU the context manager changes nothing.

    Raises:
        TypeError: a value is not an array.
        ValueError: an array is read-only, is on another device than the first, or has the name of other memory.
    """
    known = dict(_reachable.get())
    for name, value in arrays.items():
        array = array_of(value, f"reachable: {name}", must=f"reachable: {name} must be a tensor or an array")
        if not array.writable:
            raise ValueError(f"reachable: {name} is read-only memory, and a kernel may write there: name a copy")
        if known and array.device != reached_device(known):
            raise ValueError(f"reachable: {name} must be on {reached_device(known)}, got {array.device}")
        if name in known and not _same(known[name], array):
            raise ValueError(f"reachable: {name} already names other memory: choose another name")
        known[name] = array
    token = _reachable.set(known)
    try:
        yield
    finally:
        _reachable.reset(token)


def reached(kernel: str, arrays: dict[str, Array]) -> dict[str, Array]:
    """Return the CPU memory that a launch may touch besides its arguments. ValueError: one name means two memories."""
    known = _reachable.get()
    if not known or reached_device() != "cpu":
        return {}
    for name in known.keys() & arrays.keys():
        if not _same(known[name], arrays[name]):
            raise ValueError(
                f"kernel {kernel}: its argument {name} and {name} in cudascope.reachable() are different memory: "
                f"choose another name in reachable()"
            )
    return known


def reached_device(known: dict[str, Array] | None = None) -> str | None:
    """Return the device of the memory named by `reachable`; None if no memory is named."""
    return next((array.device for array in (known or _reachable.get()).values()), None)


def _same(one: Array, other: Array) -> bool:
    return one._replace(owner=None, writable=True) == other._replace(owner=None, writable=True)
