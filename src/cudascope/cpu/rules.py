"""The rules that a check applies to a kernel. Each rule has a name, by which it can be switched off.

A rule belongs to a family, which is `Finding.what`; its own name is `Finding.rule`. `cudascope.check(ignore=…)` takes
names of both, `also=` those of the rules that are off unless asked for.

A new rule is one more row here, and the code in runtime/ that finds where a kernel breaks the rule. The runtime is
compiled with the names of this table (`FLAGS`).
"""

from enum import IntEnum
from typing import NamedTuple


class Rule(NamedTuple):
    """One thing that can be wrong. `sentence` says of a thread what it did; findings.py fills it in."""

    what: str
    name: str
    summary: str
    sentence: str
    ends: bool = False  # the launch: it cannot go on
    is_on: bool = True  # unless `ignore` names it. A rule that is off is asked for with `also`


_RULES = {
    "DEADLOCK": Rule(
        "deadlock",
        "deadlock",
        "Threads wait for each other, and nobody can go on.",
        "waits for threads that never come{stuck}",
        ends=True,
    ),
    "SPINNING": Rule(
        "deadlock",
        "spin",
        "A loop that repeats for ever, mostly a poll, because no thread changes a value that it reads.",
        "{polls} for ever: {no_writer}. A GPU would wait for ever too{text}",
        ends=True,
    ),
    "HANGING": Rule(
        "deadlock",
        "hang",
        "For a time no thread has ended or passed a barrier, or for ten times as long none has ended.",
        "gets no further: no thread has ended or passed a barrier for the time that cudascope.time_limit() gives, or "
        "no thread has ended for ten times as long{hang}",
        ends=True,
    ),
    "OUTSIDE_GLOBAL": Rule(
        "out of bounds",
        "out of bounds",
        "An access to memory that belongs to no tensor, or lies past its ends.",
        "{verb} {place}",
    ),
    "OUTSIDE_SHARED": Rule(
        "out of bounds",
        "out of shared bounds",
        "An access past the ends of a shared array.",
        "{verb} {place}, outside of it",
    ),
    "OUTSIDE_LOCAL": Rule(
        "out of bounds",
        "out of local bounds",
        "An access past the ends of a local variable.",
        "{verb} past the ends of a local variable",
        ends=True,
    ),
    "LOCAL_OF_ANOTHER": Rule(
        "out of bounds",
        "local of another thread",
        "An access to a local variable of another thread.",
        "{verb} a local variable of another thread by its address: on a GPU the address leads to other memory",
    ),
    "LOCAL_GONE": Rule(
        "out of bounds",
        "local gone",
        "An access to a local variable of a function that has returned.",
        "{verb} a local variable of a function that has returned",
    ),
    "MISALIGNED": Rule(
        "misaligned",
        "misaligned",
        "An access at an address that is no multiple of its size.",
        "{verb} {bytes} bytes at {place}: the address is no multiple of {bytes}",
    ),
    "RACE": Rule(
        "race",
        "race",
        "Two threads touch one place, one of them writes, and nothing orders the two.",
        "{verb} {place}, which thread {other}{other_block} has {other_verb} in line {other_line}{unordered}{remedy}",
    ),
    "SAME_VALUE": Rule(
        "race",
        "same value",
        "Two threads write the same value to one place, and nothing orders the two.",
        "writes {place}, to which thread {other}{other_block} has written the same value in line {other_line}"
        "{unordered}: harmless on today's GPUs, a race by the rules of C++",
    ),
    "SMALL_SCOPE": Rule(
        "race",
        "small scope",
        "An atomic of block scope on what threads of another thread block update.",
        "{verb} {place}, which thread {other}{other_block} has {other_verb} in line {other_line}: one of the two is an "
        "atomic of block scope, which holds among the threads of one thread block only",
    ),
    "NO_ACQUIRE": Rule(
        "race",
        "no acquire",
        "Data is read after a flag, and neither an acquire nor a fence lies between.",
        "{verb} {place}, which thread {other}{other_block} has {other_verb} in line {other_line} and handed over by a "
        "flag: the flag was read by a relaxed or volatile read, and no fence follows the read",
        is_on=False,
    ),
    "BARRIER_NOT_REACHED": Rule(
        "barrier",
        "barrier in a branch",
        "A barrier that some threads of the thread block go round.",
        "has left the kernel while {waiting} threads wait here, the first of them {other}: every thread must reach the "
        "barrier",
    ),
    # PTX ISA, `barrier` and `exit`: a barrier waits for the threads that have not exited, and an exit releases it. The
    # programming guide says the same of compute capability 7.0 and later; what it forbids is a barrier in a branch that
    # not all threads take. In a kernel without `return` no thread can have left early, so the branch is the cause.
    "LEFT_BEFORE_BARRIER": Rule(
        "barrier",
        "left before barrier",
        "A thread has returned before a barrier that others reach.",
        "has returned while {waiting} threads wait here, the first of them {other}: a GPU before sm_70 wants every "
        "thread at the barrier",
        is_on=False,
    ),
    "BARRIERS_DIFFER": Rule(
        "barrier",
        "different barriers",
        "Threads of one thread block wait at different barriers.",
        "waits at this barrier while thread {other} waits at the one in line {other_line}: all threads of a thread "
        "block must reach the same",
    ),
    "LANE_GONE": Rule(
        "lane",
        "lane gone",
        "A shuffle from a lane that has left the kernel.",
        "shuffles from lane {lane}, which has left the kernel or is not there: the value is undefined",
    ),
    "LANE_NOT_IN_MASK": Rule(
        "lane",
        "lane not in mask",
        "A warp function that uses a lane its mask does not name.",
        "uses lane {lane}, which the mask does not name: the value is undefined",
    ),
    "LANES_APART": Rule(
        "lane",
        "warp function in a branch",
        "A warp function that some lanes of its mask go round.",
        "is in {function} with mask {mask} here, while lane {lane}, which the mask names, is in {other_function} in "
        "line {other_line}: all lanes of a mask must come to one place, or the mask must name only those that come",
    ),
    "MASKS_DIFFER": Rule(
        "lane",
        "different masks",
        "Lanes that name each other, or one the other, in different masks of one warp function.",
        "is in {function} with mask {mask}, which names lane {lane}, and that lane has come with mask {other_mask} in "
        "line {other_line}: all lanes of a mask must pass the same mask",
    ),
    "LANES_MISSING": Rule(
        "lane",
        "lanes missing",
        "A function of a whole warp that not all its lanes reach.",
        "is in {function}, which all 32 lanes of a warp must reach, and lane {lane} has left the kernel or is not "
        "there",
        ends=True,
    ),
    "ARGUMENT": Rule(
        "argument",
        "argument",
        "An argument that the function called does not allow.",
        "{text}",
        ends=True,
    ),
    "COPY_IN_FLIGHT": Rule(
        "race",
        "copy in flight",
        "The memory of an asynchronous copy is touched before a wait for it.",
        "{verb} {place} while the asynchronous copy or matrix product that thread {other}{other_block} began in line "
        "{other_line} may still {other_access} it: no wait for it lies between",
    ),
    "NO_PROXY_FENCE": Rule(
        "race",
        "no proxy fence",
        "A matrix product or a bulk copy uses shared memory that was stored without a fence.proxy.async.",
        "{verb} {place} through the async proxy, which thread {other} has written in line {other_line} with no "
        "fence.proxy.async between",
    ),
    "COPY_PENDING": Rule(
        "copy",
        "pending copy",
        "A thread leaves the kernel before its asynchronous copies have landed.",
        "leaves the kernel while its asynchronous copy to {place} is under way: no wait completes it",
    ),
    "UNINITIALISED_SHARED": Rule(
        "uninitialised",
        "uninitialised",
        "A read of shared memory that nobody has written.",
        "{verb} {place}, which no thread of this thread block has written",
    ),
    "UNINITIALISED_GLOBAL": Rule(
        "uninitialised",
        "unwritten output",
        "A read of an output that nobody has written.",
        "{verb} {place}, an output that nobody has written yet",
    ),
    "FAILED": Rule("assertion", "assertion", "An assertion of the kernel failed.", "stopped: {text}", ends=True),
    "NOT_SUPPORTED": Rule(
        "not supported",
        "not supported",
        "The kernel reached what the CPU runner does not have.",
        "stopped: {text}",
        ends=True,
    ),
    "FAULT": Rule(
        "fault",
        "fault",
        "An access to memory that is not there.",
        "touched memory that is not there, or a vector at an address that is no multiple of its size{check}",
        ends=True,
    ),
    "STACK_OVERFLOW": Rule(
        "fault",
        "stack overflow",
        "A thread needs more local memory than there is.",
        "overflows its stack: CUDA allows a thread 512 KB of local memory",
        ends=True,
    ),
    "OVERRUN": Rule(
        "out of bounds",
        "overrun",
        "Something was written just outside of a tensor.",
        "has written just outside of {tensor}, or another thread did{check}",
    ),
    "READ_ONLY": Rule(
        "fault",
        "read-only",
        "A tensor whose memory may not be written was written.",
        "has written to {tensor}, or another one did, and its memory may not be written: pass a copy",
        ends=True,
    ),
    "UNREADABLE": Rule(
        "fault",
        "unreadable",
        "A tensor whose memory is not there.",
        "was not started: the memory of {tensor} is not there, because it was freed or its file has become shorter",
        ends=True,
    ),
    "DIVIDED_BY_ZERO": Rule(
        "fault",
        "division by zero",
        "An integer division without a result.",
        "divides an integer by zero (or the least integer by -1): the result is undefined",
        ends=True,
    ),
    "STOPPED": Rule("fault", "trap", "The kernel stopped itself.", "stopped: __builtin_trap() or abort()", ends=True),
}

# These need no thread: `check` finds them in the source or when it ends.
NEVER_WRITTEN = Rule(
    "uninitialised",
    "never written",
    "An element of an output that no thread writes.",
    "no thread writes {elements}",
)
UNSET_VARIABLE = Rule(
    "uninitialised",
    "unset variable",
    "A local variable that is used before it has a value, or whose address outlives it, by a warning of the compiler.",
    "{warning}",
)
MAYBE_UNSET_VARIABLE = Rule(
    "uninitialised",
    "maybe unset variable",
    "A local variable that may have no value on one of the ways to its use, by a warning of the compiler.",
    "{warning}",
    is_on=False,
)
WITHOUT_THREAD = (NEVER_WRITTEN, UNSET_VARIABLE, MAYBE_UNSET_VARIABLE)

FindingKind = IntEnum("FindingKind", ["NOTHING", *_RULES, "INTERRUPTED"], start=0)  # the last: by the user
RULES = {FindingKind[name]: rule for name, rule in _RULES.items()}
SUMMARIES = {rule.name: rule.summary for rule in (*RULES.values(), *WITHOUT_THREAD)}

_ENDINGS = sum(1 << finding for finding in FindingKind if finding not in RULES or RULES[finding].ends)
FLAGS = (f"-DSIMT_FINDINGS={','.join(FindingKind.__members__)}", f"-DSIMT_ENDINGS={_ENDINGS:#x}ull")  # launch.h
