"""The rules that a check applies to a kernel. Each rule has a name, by which it can be switched off.

A rule belongs to a family, which is `Finding.what`; its own name is `Finding.rule`. `cudascope.check(ignore=…)` takes
names of both, `also=` those of the rules that are off unless asked for.

A new rule is one more paragraph of the table here, and the code in runtime/ that finds where a kernel breaks the rule.
The runtime is compiled with the names of this table (`FLAGS`).
"""

import re
from enum import IntEnum
from typing import NamedTuple


class Rule(NamedTuple):
    """One thing that can be wrong. `sentence` says of a thread what it did; findings.py fills it in."""

    what: str
    name: str
    summary: str
    sentence: str
    ends: bool  # the launch: it cannot go on
    is_on: bool  # unless `ignore` names it. A rule that is off is asked for with `also`


def _rules(table: str) -> tuple[Rule, ...]:
    """The rules of a table: family, name and options, then the summary in one line, then the sentence."""
    rules = []
    for names, summary, sentence in re.findall(r"^(\S.*)\n +(.*)\n((?: +.*\n)+)", table, re.MULTILINE):
        what, name, *options = names.split(" | ")
        is_on = "off" not in options
        rules.append(Rule(what, name, summary, " ".join(sentence.split()), "ends the launch" in options, is_on))
    return tuple(rules)


# Why "left before barrier" is off: a barrier waits for the threads that have not exited, and an exit releases it (PTX
# ISA, `barrier` and `exit`). The programming guide says the same of compute capability 7.0 and later; what it forbids
# is a barrier in a branch that not all threads take. In a kernel without `return` no thread can have left early, so
# the branch is the cause.
_OF_THREADS = _rules("""
deadlock | deadlock | ends the launch
    Threads wait for each other, and nobody can go on.
    waits for threads that never come{stuck}
deadlock | spin | ends the launch
    A loop that repeats for ever, mostly a poll, because no thread changes a value that it reads.
    {polls} for ever: {no_writer}. A GPU would wait for ever too{text}
deadlock | hang | ends the launch
    For a time no thread has ended or passed a barrier, or for ten times as long none has ended.
    gets no further: no thread has ended or passed a barrier for the time that cudascope.time_limit() gives, or no
    thread has ended for ten times as long{hang}
out of bounds | out of bounds
    An access to memory that belongs to no tensor, or lies past its ends.
    {verb} {place}
out of bounds | out of shared bounds
    An access past the ends of a shared array.
    {verb} {place}, outside of it
out of bounds | out of local bounds | ends the launch
    An access past the ends of a local variable.
    {verb} past the ends of a local variable
out of bounds | local of another thread
    An access to a local variable of another thread.
    {verb} a local variable of another thread by its address: on a GPU the address leads to other memory
out of bounds | local gone
    An access to a local variable of a function that has returned.
    {verb} a local variable of a function that has returned
misaligned | misaligned
    An access at an address that is no multiple of its size.
    {verb} {bytes} bytes at {place}: the address is no multiple of {bytes}
race | race
    Two threads touch one place, one of them writes, and nothing orders the two.
    {verb} {place}, which thread {other}{other_block} has {other_verb} in line {other_line}{unordered}{remedy}
race | same value
    Two threads write the same value to one place, and nothing orders the two.
    writes {place}, to which thread {other}{other_block} has written the same value in line {other_line}{unordered}:
    harmless on today's GPUs, a race by the rules of C++
race | small scope
    An atomic of block scope on what threads of another thread block update.
    {verb} {place}, which thread {other}{other_block} has {other_verb} in line {other_line}: one of the two is an atomic
    of block scope, which holds among the threads of one thread block only
race | no acquire | off
    Data is read after a flag, and neither an acquire nor a fence lies between.
    {verb} {place}, which thread {other}{other_block} has {other_verb} in line {other_line} and handed over by a flag:
    the flag was read by a relaxed or volatile read, and no fence follows the read
barrier | barrier in a branch
    A barrier that some threads of the thread block go round.
    has left the kernel while {waiting} threads wait here, the first of them {other}: every thread must reach the
    barrier
barrier | left before barrier | off
    A thread has returned before a barrier that others reach.
    has returned while {waiting} threads wait here, the first of them {other}: a GPU before sm_70 wants every thread at
    the barrier
barrier | different barriers
    Threads of one thread block wait at different barriers.
    waits at this barrier while thread {other} waits at the one in line {other_line}: all threads of a thread block must
    reach the same
lane | lane gone
    A shuffle from a lane that has left the kernel.
    shuffles from lane {lane}, which has left the kernel or is not there: the value is undefined
lane | lane not in mask
    A warp function that uses a lane its mask does not name.
    uses lane {lane}, which the mask does not name: the value is undefined
lane | warp function in a branch
    A warp function that some lanes of its mask go round.
    is in {function} with mask {mask} here, while lane {lane}, which the mask names, is in {other_function} in line
    {other_line}: all lanes of a mask must come to one place, or the mask must name only those that come
lane | different masks
    Lanes that name each other, or one the other, in different masks of one warp function.
    is in {function} with mask {mask}, which names lane {lane}, and that lane has come with mask {other_mask} in line
    {other_line}: all lanes of a mask must pass the same mask
lane | lanes missing | ends the launch
    A function of a whole warp that not all its lanes reach.
    is in {function}, which all 32 lanes of a warp must reach, and lane {lane} has left the kernel or is not there
argument | argument | ends the launch
    An argument that the function called does not allow.
    {text}
race | copy in flight
    The memory of an asynchronous copy is touched before a wait for it.
    {verb} {place} while the asynchronous copy or matrix product that thread {other}{other_block} began in line
    {other_line} may still {other_access} it: no wait for it lies between
race | no proxy fence
    A matrix product or a bulk copy uses shared memory that was stored without a fence.proxy.async.
    {verb} {place} through the async proxy, which thread {other} has written in line {other_line} with no
    fence.proxy.async between
copy | pending copy
    A thread leaves the kernel before its asynchronous copies have landed.
    leaves the kernel while its asynchronous copy to {place} is under way: no wait completes it
uninitialised | uninitialised
    A read of shared memory that nobody has written.
    {verb} {place}, which no thread of this thread block has written
uninitialised | unwritten output
    A read of an output that nobody has written.
    {verb} {place}, an output that nobody has written yet
assertion | assertion | ends the launch
    An assertion of the kernel failed.
    stopped: {text}
not supported | not supported | ends the launch
    The kernel reached what the CPU runner does not have.
    stopped: {text}
fault | fault | ends the launch
    An access to memory that is not there.
    touched memory that is not there, or a vector at an address that is no multiple of its size{check}
fault | stack overflow | ends the launch
    A thread needs more local memory than there is.
    overflows its stack: CUDA allows a thread 512 KB of local memory
out of bounds | overrun
    Something was written just outside of a tensor.
    has written just outside of {tensor}, or another thread did{check}
fault | read-only | ends the launch
    A tensor whose memory may not be written was written.
    has written to {tensor}, or another one did, and its memory may not be written: pass a copy
fault | unreadable | ends the launch
    A tensor whose memory is not there.
    was not started: the memory of {tensor} is not there, because it was freed or its file has become shorter
fault | division by zero | ends the launch
    An integer division without a result.
    divides an integer by zero (or the least integer by -1): the result is undefined
fault | trap | ends the launch
    The kernel stopped itself.
    stopped: __builtin_trap() or abort()
""")
# These need no thread: `check` finds them in the source or when it ends.
WITHOUT_THREAD = _rules("""
uninitialised | never written
    An element of an output that no thread writes.
    no thread writes {elements}
uninitialised | unset variable
    A local variable that is used before it has a value, or whose address outlives it, by a warning of the compiler.
    {warning}
uninitialised | maybe unset variable | off
    A local variable that may have no value on one of the ways to its use, by a warning of the compiler.
    {warning}
""")
NEVER_WRITTEN, UNSET_VARIABLE, MAYBE_UNSET_VARIABLE = WITHOUT_THREAD

_NAMES = [re.sub("[ -]", "_", rule.name.upper()) for rule in _OF_THREADS]
FindingKind = IntEnum("FindingKind", ["NOTHING", *_NAMES, "INTERRUPTED"], start=0)  # the last: by the user
RULES = {FindingKind[name]: rule for name, rule in zip(_NAMES, _OF_THREADS, strict=True)}
SUMMARIES = {rule.name: rule.summary for rule in (*_OF_THREADS, *WITHOUT_THREAD)}

_ENDINGS = sum(1 << finding for finding in FindingKind if finding not in RULES or RULES[finding].ends)
FLAGS = (f"-DSIMT_FINDINGS={','.join(FindingKind.__members__)}", f"-DSIMT_ENDINGS={_ENDINGS:#x}ull")  # launch.h
