"""Loads of a PTX kernel whose values are used by stores only, and these stores.

Triton gives one element to several threads if a tile has fewer elements than the thread block has threads. All of them
load the element, and one of them stores the result. If the kernel works in place, another thread may load what was
already stored. Nothing comes of this value, so `check` reports such a race only if the reading thread also executes a
store of the value.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cudascope.ptx.module import Statement
from cudascope.translate.ptx.body import INSTRUCTION, split_operands
from cudascope.translate.ptx.bulk import BULK
from cudascope.translate.ptx.matrix import MATRIX
from cudascope.translate.ptx.memory import MEMORY
from cudascope.translate.ptx.threads import THREADS

_OTHERS = BULK | MATRIX | MEMORY | THREADS  # than instructions that only compute
_REGISTER = re.compile(r"[%A-Za-z_$][\w%$]*")
_STRONG = {"volatile", "relaxed", "acquire", "release", "mmio"}
BITS = 64  # of the word of a thread that tells whose values it has stored


class _Instruction(NamedTuple):
    position: int
    kind: str  # "load", "store", "computes", "other"
    targets: set[str]
    sources: set[str]  # of a store: what is stored
    escapes: set[str]  # what an address, a condition or another thread needs


def loads_for_stores(body: Sequence[Statement]) -> tuple[dict[int, int], dict[int, int]]:
    """Return a number from 1 to 64 for each such load, and for each store the bits of the loads that it stores.

    The keys are positions in `body`. Two loads may share a number.
    """
    instructions = list(_instructions(body))
    computing = [each for each in instructions if each.kind == "computes"]
    escaped = set().union(*(each.escapes for each in instructions))
    while before := len(escaped):
        for each in reversed(computing):
            if each.targets & escaped:
                escaped |= each.sources
        if len(escaped) == before:
            break
    loads = [each for each in instructions if each.kind == "load" and not each.targets & escaped]
    numbers = {load.position: 1 + i % BITS for i, load in enumerate(loads)}
    carried: dict[str, int] = {}
    for load in loads:
        for target in load.targets:
            carried[target] = carried.get(target, 0) | 1 << numbers[load.position] - 1
    changed = bool(carried)
    while changed:
        changed = False
        for each in computing:
            bits = _bits(each.sources, carried)
            for target in each.targets if bits else ():
                changed |= bool(bits & ~carried.get(target, 0))
                carried[target] = carried.get(target, 0) | bits
    stores = {each.position: _bits(each.sources, carried) for each in instructions if each.kind == "store"}
    return numbers, {position: bits for position, bits in stores.items() if bits}


def _bits(registers: set[str], carried: dict[str, int]) -> int:
    found = 0
    for register in registers:
        found |= carried.get(register, 0)
    return found


def _instructions(body: Sequence[Statement]) -> Iterator[_Instruction]:
    for position, statement in enumerate(body):
        match = INSTRUCTION.fullmatch(statement.text)
        if not match:
            continue
        _, predicate, name, written = match.groups()
        operands = [set(_REGISTER.findall(each)) for each in split_operands(written)]
        first, *words = name.split(".")
        guard, everything = {predicate} - {None}, set().union(*operands)
        plain = "global" in words and not _STRONG & set(words)
        if first == "ld" and plain:
            yield _Instruction(position, "load", operands[0], set(), guard.union(*operands[1:]))
        elif first == "st" and plain:
            yield _Instruction(position, "store", set(), operands[1], guard.union(operands[0], *operands[2:]))
        elif first in _OTHERS or not operands:
            yield _Instruction(position, "other", set(), set(), guard | everything)
        else:
            yield _Instruction(position, "computes", operands[0], set().union(*operands[1:]), guard)
