"""The control flow graph of a PTX body.

A region is a run of instructions that one thread executes in turn: it begins at a label or after a jump.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cudascope.ptx.module import Statement
from cudascope.translate.ptx.body import INSTRUCTION, split_operands

JUMPS = {"bra", "brx", "call", "ret", "exit", "trap"}

Braces = tuple[int, ...]  # the positions of the { round a statement: a label belongs to the innermost of them


class Region(NamedTuple):
    """A region of a body. `start` is the position of its first instruction, `next` are the regions that may follow."""

    start: int
    next: frozenset[int]


def regions_of(body: Sequence[Statement]) -> list[Region]:
    """Return the regions of a body in their order. The first one is where it is entered."""
    starts: list[int] = []
    ends: list[tuple[str, Braces]] = []  # the last instruction of each region, and the { round it
    labels: dict[tuple[Braces, str], int] = {}  # the region that follows a label
    tables: dict[tuple[Braces, str], list[str]] = {}  # the labels of a .branchtargets, by its own label
    braces: Braces = ()
    begins, name = True, ""
    for position, (text, _) in enumerate(body):
        if text == "{":
            braces = (*braces, position)
        elif text == "}":
            braces = braces[:-1]
        elif text.endswith(":"):
            begins, name = True, text[:-1]
            labels[braces, name] = len(starts)
        elif text.startswith(".branchtargets"):
            tables[braces, name] = split_operands(text.removeprefix(".branchtargets"))
        elif match := INSTRUCTION.fullmatch(text):
            if begins:
                starts.append(position)
                ends.append(("", ()))
            ends[-1] = text, braces
            begins = match[3].partition(".")[0] in JUMPS
    found = []
    for region, (start, end) in enumerate(zip(starts, ends, strict=True)):
        after = _after(end, region, labels, tables)
        found.append(Region(start, frozenset(each for each in after if each < len(starts))))  # else the body ends
    return found


def _after(end: tuple[str, Braces], region: int, labels: Mapping, tables: Mapping) -> list[int]:
    text, braces = end
    _, predicate, name, operands = INSTRUCTION.fullmatch(text).groups()
    jump = name.partition(".")[0]
    following = [region + 1] if predicate or jump not in ("bra", "brx", "ret", "exit", "trap") else []
    if jump == "bra":
        return [*following, _found(labels, braces, operands.strip())]
    if jump == "brx":
        table = _found(tables, braces, split_operands(operands)[-1])
        return [*following, *(_found(labels, braces, each) for each in table)]
    return following


def _found(known: Mapping, braces: Braces, name: str) -> object:
    """What a name means between these braces: the innermost of its meanings."""
    inside_out = (braces[:depth] for depth in range(len(braces), -1, -1))
    return next(known[each, name] for each in inside_out if (each, name) in known)
