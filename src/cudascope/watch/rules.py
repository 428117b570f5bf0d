"""The rules that a check applies to a kernel. Each rule has a name, by which it can be switched off.

A rule belongs to a family, which is `Finding.what`; its own name is `Finding.rule`. `cudascope.check(ignore=…)` takes
names of both, `also=` those of the rules that are off unless asked for.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cudascope.cpu.abi import FindingKind


class Rule(NamedTuple):
    """One thing that can be wrong. `sentence` says of a thread what it did; findings.py fills it in."""

    what: str
    name: str
    summary: str
    sentence: str


RULES = {
    FindingKind.DEADLOCK: Rule(
        "deadlock",
        "deadlock",
        "Threads wait for each other, and nobody can go on.",
        "waits for threads that never come: the thread block cannot go on",
    ),
    FindingKind.SPINNING: Rule(
        "deadlock",
        "spin",
        "A thread repeats an atomic or polls a variable for ever, and no thread changes the value.",
        "{polls} for ever: {no_writer}. A GPU would wait for ever too",
    ),
    FindingKind.HANGING: Rule(
        "deadlock",
        "hang",
        "For a time no thread has ended or passed a barrier, or for ten times as long none has ended.",
        "gets no further: no thread has ended or passed a barrier for the time that cudascope.time_limit() gives, or "
        "no thread has ended for ten times as long{hang}",
    ),
    FindingKind.OUTSIDE_GLOBAL: Rule(
        "out of bounds",
        "out of bounds",
        "An access to memory that belongs to no tensor, or lies past its ends.",
        "{verb} {place}",
    ),
    FindingKind.OUTSIDE_SHARED: Rule(
        "out of bounds",
        "out of shared bounds",
        "An access past the ends of a shared array.",
        "{verb} {place}, outside of it",
    ),
    FindingKind.OUTSIDE_LOCAL: Rule(
        "out of bounds",
        "out of local bounds",
        "An access past the ends of a local variable.",
        "{verb} past the ends of a local variable",
    ),
    FindingKind.MISALIGNED: Rule(
        "misaligned",
        "misaligned",
        "An access at an address that is no multiple of its size.",
        "{verb} {bytes} bytes at {place}: the address is no multiple of {bytes}",
    ),
    FindingKind.RACE: Rule(
        "race",
        "race",
        "Two threads touch one place, one of them writes, and nothing orders the two.",
        "{verb} {place}, which thread {other}{other_block} has {other_verb} in line {other_line}{unordered}{remedy}",
    ),
    FindingKind.SAME_VALUE: Rule(
        "race",
        "same value",
        "Two threads write the same value to one place, and nothing orders the two.",
        "writes {place}, to which thread {other}{other_block} has written the same value in line {other_line}"
        "{unordered}: harmless on today's GPUs, a race by the rules of C++",
    ),
    FindingKind.BARRIER_NOT_REACHED: Rule(
        "barrier",
        "barrier in a branch",
        "A barrier that some threads of the thread block go round.",
        "has left the kernel while {waiting} threads wait here, the first of them {other}: every thread must reach the "
        "barrier",
    ),
    FindingKind.LEFT_BEFORE_BARRIER: Rule(
        "barrier",
        "left before barrier",
        "A thread has returned before a barrier that others reach.",
        "has returned while {waiting} threads wait here, the first of them {other}: a GPU before sm_70 wants every "
        "thread at the barrier",
    ),
    FindingKind.BARRIERS_DIFFER: Rule(
        "barrier",
        "different barriers",
        "Threads of one thread block wait at different barriers.",
        "waits at this barrier while thread {other} waits at the one in line {other_line}: all threads of a thread "
        "block must reach the same",
    ),
    FindingKind.LANE_GONE: Rule(
        "lane",
        "lane gone",
        "A shuffle from a lane that has left the kernel.",
        "shuffles from lane {lane}, which has left the kernel or is not there: the value is undefined",
    ),
    FindingKind.LANE_NOT_IN_MASK: Rule(
        "lane",
        "lane not in mask",
        "A warp function that uses a lane its mask does not name.",
        "uses lane {lane}, which the mask does not name: the value is undefined",
    ),
    FindingKind.LANES_MISSING: Rule(
        "lane",
        "lanes missing",
        "A function of a whole warp that not all its lanes reach.",
        "is in {function}, which all 32 lanes of a warp must reach, and lane {lane} has left the kernel or is not "
        "there",
    ),
    FindingKind.ARGUMENT: Rule(
        "argument", "argument", "An argument that the function called does not allow.", "{text}"
    ),
    FindingKind.COPY_IN_FLIGHT: Rule(
        "race",
        "copy in flight",
        "The memory of an asynchronous copy is touched before a wait for it.",
        "{verb} {place} while the asynchronous copy or matrix product that thread {other}{other_block} began in line "
        "{other_line} may still {other_access} it: no wait for it lies between",
    ),
    FindingKind.NO_PROXY_FENCE: Rule(
        "race",
        "no proxy fence",
        "A matrix product or a bulk copy uses shared memory that was stored without a fence.proxy.async.",
        "{verb} {place} through the async proxy, which thread {other} has written in line {other_line} with no "
        "fence.proxy.async between",
    ),
    FindingKind.COPY_PENDING: Rule(
        "copy",
        "pending copy",
        "A thread leaves the kernel before its asynchronous copies have landed.",
        "leaves the kernel while its asynchronous copy to {place} is under way: no wait completes it",
    ),
    FindingKind.UNINITIALISED_SHARED: Rule(
        "uninitialised",
        "uninitialised",
        "A read of shared memory that nobody has written.",
        "{verb} {place}, which no thread of this thread block has written",
    ),
    FindingKind.UNINITIALISED_GLOBAL: Rule(
        "uninitialised",
        "unwritten output",
        "A read of an output that nobody has written.",
        "{verb} {place}, an output that nobody has written yet",
    ),
    FindingKind.FAILED: Rule("assertion", "assertion", "An assertion of the kernel failed.", "stopped: {text}"),
    FindingKind.NOT_SUPPORTED: Rule(
        "not supported",
        "not supported",
        "The kernel reached what the CPU runner does not have.",
        "stopped: {text}",
    ),
    FindingKind.FAULT: Rule(
        "fault",
        "fault",
        "An access to memory that is not there.",
        "touched memory that is not there, or a vector at an address that is no multiple of its size{check}",
    ),
    FindingKind.STACK_OVERFLOW: Rule(
        "fault",
        "stack overflow",
        "A thread needs more local memory than there is.",
        "overflows its stack: CUDA allows a thread 512 KB of local memory",
    ),
    FindingKind.OVERRUN: Rule(
        "out of bounds",
        "overrun",
        "Something was written just outside of a tensor.",
        "has written just outside of {tensor}, or another thread did{check}",
    ),
    FindingKind.READ_ONLY: Rule(
        "fault",
        "read-only",
        "A tensor whose memory may not be written was written.",
        "has written to {tensor}, or another one did, and its memory may not be written: pass a copy",
    ),
    FindingKind.UNREADABLE: Rule(
        "fault",
        "unreadable",
        "A tensor whose memory is not there.",
        "was not started: the memory of {tensor} is not there, because it was freed or its file has become shorter",
    ),
    FindingKind.DIVIDED_BY_ZERO: Rule(
        "fault",
        "division by zero",
        "An integer division without a result.",
        "divides an integer by zero (or the least integer by -1): the result is undefined",
    ),
    FindingKind.STOPPED: Rule("fault", "trap", "The kernel stopped itself.", "stopped: __builtin_trap() or abort()"),
}

# PTX ISA, `barrier` and `exit`: a barrier waits for the threads that have not exited, and an exit releases it. The
# programming guide says the same of compute capability 7.0 and later; what it forbids is a barrier in a branch that
# not all threads take. In a kernel without `return` no thread can have left early, so the branch is the cause.
OFF = {FindingKind.LEFT_BEFORE_BARRIER}
# After these a launch cannot go on (cpu/runtime/block.h knows them too).
ENDINGS = {
    FindingKind.DEADLOCK,
    FindingKind.SPINNING,
    FindingKind.HANGING,
    FindingKind.LANES_MISSING,
    FindingKind.ARGUMENT,
    FindingKind.FAILED,
    FindingKind.FAULT,
    FindingKind.OUTSIDE_LOCAL,
    FindingKind.STACK_OVERFLOW,
    FindingKind.DIVIDED_BY_ZERO,
    FindingKind.STOPPED,
    FindingKind.READ_ONLY,
    FindingKind.UNREADABLE,
    FindingKind.NOT_SUPPORTED,
}


def ignored(ignore: Iterable[str] = (), also: Iterable[str] = ()) -> int:
    """The findings that are not reported, bit by bit, when `ignore` is switched off and `also` on.

    Raises:
        ValueError: a name that no rule and no family has, or one after which a launch cannot go on.
    """
    named = {finding: {rule.what, rule.name} for finding, rule in RULES.items() if finding not in ENDINGS}
    can_be_switched = sorted(set().union(*named.values()))
    ignore, also = _names("ignore", ignore, can_be_switched), _names("also", also, can_be_switched)
    off = {finding for finding, names in named.items() if names & ignore}
    off |= {finding for finding in OFF if not named[finding] & also}
    return sum(1 << finding for finding in off)


def _names(argument: str, names: Iterable[str], known: Sequence[str]) -> set[str]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        example = names if isinstance(names, str) else "race"
        raise TypeError(f'{argument} must be a tuple of names, as in ("{example}",), got {names!r}')
    names = [*names]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{argument} must name what can be switched, {known}, got {unknown[0]!r}")
    return set(names)
