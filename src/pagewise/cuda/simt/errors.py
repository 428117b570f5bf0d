"""What the runtime found wrong in a kernel, in words."""

import os
from collections.abc import Sequence

from pagewise.cuda.simt.abi import ERROR, Collective, Finding, Space
from pagewise.cuda.simt.library import Library, SharedArray
from pagewise.cuda.simt.memory import Memory


class SimtError(RuntimeError):
    """What went wrong in a kernel, and where.

    kernel, line: where in the source            thread_block, thread: who, as (x, y, z)
    tensor, element: the tensor or shared array and the element in it, if memory is concerned
    what: "out of bounds", "misaligned", "race", "barrier", "deadlock", "lane", "uninitialised",
          "argument", "copy", "assertion", "fault"
    """

    def __init__(
        self, message: str, *, kernel: str, what: str, line: int, thread_block: tuple[int, int, int],
        thread: tuple[int, int, int], tensor: str | None = None, element: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.kernel, self.what, self.line = kernel, what, line
        self.thread_block, self.thread, self.tensor, self.element = thread_block, thread, tensor, element


_TEXTS = {
    Finding.DEADLOCK: ("deadlock", "waits for threads that never come: the thread block cannot go on"),
    Finding.OUTSIDE_GLOBAL: ("out of bounds", "{verb} {place}"),
    Finding.OUTSIDE_SHARED: ("out of bounds", "{verb} {place}, outside of it"),
    Finding.MISALIGNED: ("misaligned", "{verb} {bytes} bytes at {place}: the address is no multiple of {bytes}"),
    Finding.RACE: (
        "race",
        "{verb} {place}, which thread {other}{other_block} has {other_verb} in line {other_line} with no barrier "
        "between",
    ),
    Finding.BARRIER_NOT_REACHED: (
        "barrier",
        "has left the kernel while {waiting} threads wait here, the first of them {other}: every thread must reach the "
        "barrier",
    ),
    Finding.LANE_GONE: (
        "lane",
        "shuffles from lane {lane}, which has left the kernel or is not there: the value is undefined",
    ),
    Finding.LANE_NOT_IN_MASK: ("lane", "uses lane {lane}, which the mask does not name: the value is undefined"),
    Finding.UNINITIALISED_SHARED: (
        "uninitialised",
        "{verb} {place}, which no thread of this thread block has written",
    ),
    Finding.UNINITIALISED_GLOBAL: ("uninitialised", "{verb} {place}, an output that nobody has written yet"),
    Finding.FAILED: ("assertion", "stopped: {text}"),
    Finding.FAULT: (
        "fault",
        "touched memory that is not there, or a vector at an address that is no multiple of its size: run under "
        "simt.check(), which says which",
    ),
    Finding.SPINNING: (
        "deadlock",
        "repeats an atomic for ever and nobody changes the value: a GPU would wait for ever too",
    ),
    Finding.HANGING: (
        "deadlock",
        "gets no further: for the time that simt.time_limit() gives, no thread has ended or passed a barrier",
    ),
    Finding.STACK_OVERFLOW: (
        "fault",
        "overflows its stack: CUDA allows a thread 512 KB of local memory",
    ),
    Finding.OVERRUN: (
        "out of bounds",
        "has written just outside of {tensor}, or another one did: run under simt.check(), which says who",
    ),
    Finding.SAME_VALUE: (
        "race",
        "{verb} {place}, which thread {other}{other_block} has {other_verb} in line {other_line} with no barrier "
        "between (the same value)",
    ),
    Finding.BARRIERS_DIFFER: (
        "barrier",
        "waits at this barrier while thread {other} waits at the one in line {other_line}: all threads of a thread "
        "block must reach the same",
    ),
    Finding.DIVIDED_BY_ZERO: (
        "fault",
        "divides an integer by zero (or the least integer by -1): the result is undefined",
    ),
    Finding.STOPPED: ("fault", "stopped: __builtin_trap() or abort()"),
    Finding.LANES_MISSING: (
        "lane",
        "is in {function}, which all 32 lanes of a warp must reach: lane {lane} has left the kernel or is not there",
    ),
    Finding.ARGUMENT: ("argument", "{text}"),
    Finding.COPY_IN_FLIGHT: (
        "race",
        "{verb} {place} while the asynchronous copy that thread {other}{other_block} began in line {other_line} may "
        "still {other_access} it: no wait for that copy lies between",
    ),
    Finding.COPY_PENDING: (
        "copy",
        "leaves the kernel while its asynchronous copy to {place} is under way: no wait completes it",
    ),
}
# by Access
_READS, _READ, _ACCESS = ("reads", "writes", "updates"), ("read", "written", "updated"), ("read", "write", "update")
_FUNCTIONS = {
    Collective.SHFL: "a shuffle",
    Collective.VOTE: "a vote",
    Collective.MATCH: "__match",
    Collective.REDUCE: "__reduce",
    Collective.SYNCWARP: "__syncwarp",
    Collective.EXCHANGE: "a group's exchange",
    Collective.PRODUCT: "a matrix product",
    Collective.MATRIX: "a load or store of a matrix",
}
_BARRIERS = {Collective.SYNCTHREADS: "__syncthreads", Collective.SYNCGRID: "the grid's barrier"}

CLASSES = {"same value": {Finding.SAME_VALUE}, "left before barrier": {Finding.BARRIER_NOT_REACHED}}


def checked_classes(ignore: Sequence[str]) -> tuple[str, ...]:
    """`ignore`, or ValueError if it names a class that there is not."""
    unknown = [name for name in ignore if name not in CLASSES]
    if unknown or isinstance(ignore, str):
        raise ValueError(f"ignore must name classes of findings ({', '.join(CLASSES)}), got {ignore!r}")
    return tuple(ignore)


def findings_of(ignore: Sequence[str]) -> set[Finding]:
    """The kinds that belong to these classes."""
    return set().union(*(CLASSES[name] for name in ignore))


def error_of(
    kernel: str, source_lines: list[str], error: ERROR, library: Library, memory: Memory,
    shared: list[SharedArray],
) -> SimtError:  # fmt: skip
    """What was found in a launch of `kernel`, in words."""
    waits = error.finding in (Finding.DEADLOCK, Finding.SPINNING, Finding.HANGING)
    waiters = error.waiters[: error.num_waiters] if waits else []
    lines = {0: ("", 0)} | library.lines([error.site, error.other_site, *(w.site for w in waiters)])
    place, tensor, element = f"address {error.address:#x}, which belongs to no tensor of this launch", None, None
    if error.region >= 0 and error.space == Space.SHARED:
        array = shared[error.region]
        tensor, element = array.name, error.offset // error.bytes
        place = f"{tensor}[{element}] (byte {error.offset} of the {array.bytes} of this shared array)"
    elif error.region >= 0:
        tensor, element, place = memory.element_at(error.region, error.offset)
    block, thread, other_block = _dim(error.block), _dim(error.thread), _dim(error.other_block)
    what, text = _TEXTS[error.finding]
    text = text.format(
        verb=_READS[error.access], place=place, bytes=error.bytes, lane=error.lane, other=_dim(error.other_thread),
        waiting=error.num_waiters, other_verb=_READ[error.other_access], other_line=lines[error.other_site][1],
        other_access=_ACCESS[error.other_access], function=_FUNCTIONS.get(error.waiters[0].collective),
        other_block=f" of thread block {other_block}" if other_block != block else "",
        text=error.text.decode(errors="replace"), tensor=tensor,
    )  # fmt: skip
    for w in waiters:
        who = f"thread {_dim(w.thread)}" + (f" and {w.count - 1} more" if w.count > 1 else "")
        where = f"in line {lines[w.site][1]}" if w.site else "at its start"
        if w.running:
            text += f"\n  {who} {where}, running"
            continue
        warp_wide = w.collective in _FUNCTIONS
        function = f"{_FUNCTIONS[w.collective]} with mask {w.mask:#010x}" if warp_wide else _BARRIERS[w.collective]
        text += f"\n  {who} {where} in {function}"
    file, line = lines[error.site]
    code = source_lines[line - 1].strip() if file == library.source_name and 0 < line <= len(source_lines) else ""
    at = f", line {line}" + (f" `{code}`" if code else f" of {os.path.basename(file)}") if line else ""
    message = f"{kernel}{at}: thread {thread} of thread block {block} {text}"
    return SimtError(
        message, kernel=kernel, what=what, line=line, thread_block=block, thread=thread, tensor=tensor, element=element
    )


def _dim(dim: object) -> tuple[int, int, int]:
    return dim.x, dim.y, dim.z
