"""A replay of the trace of a PTX kernel, without one of its barriers. It does not use the rules of `check`.

marked = [each.instruction for each in meetings(ptx)]
is_not_needed = unordered(report, marked, without=3) == unordered(report, marked)
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from planting import MEMORY

from cudascope import Report
from cudascope.watch.report import Launch

Place = tuple[str, int, int]  # space, tensor or shared array, element


def unordered(report: Report, meetings: Sequence[str], without: int | None = None) -> int:
    """Count the accesses that nothing orders after an earlier access of another thread to the same place.

    Each thread has a vector clock. Each place keeps the last read, write and atomic of every thread, so no access is
    forgotten. Some accesses count even in a right kernel: the trace does not tell when a bulk copy lands, and several
    threads may store the same value. A kernel needs a barrier if the count without the barrier is larger. A cp.async
    stores where it begins and again at the wait that completes it. In the same way, each warp of a product (wgmma)
    reads both matrices twice.

    Args:
        report: of `observe`, with marks (planting.py).
        meetings: the marked instructions.
        without: the number of a barrier that shall order nothing.
    """
    return sum(_unordered(launch, meetings, without) for launch in report.launches)


def _unordered(launch: Launch, meetings: Sequence[str], without: int | None) -> int:
    events, num_threads = list(_events(launch)), int(np.prod(launch.block))
    operands = _operands(events, meetings)
    blocks: dict[int, Clocks] = {}
    for each in events:
        if each.block not in blocks:
            blocks[each.block] = Clocks(num_threads, operands[each.block])
        clocks = blocks[each.block]
        if each.meeting is None and each.access == "write" and each.places[0][0] == "shared":
            clocks.store(each.thread, each.places)
        elif each.meeting is None:
            clocks.access(each.thread, each.places, each.access)
        elif each.meeting != without:
            clocks.meet(each.thread, meetings[each.meeting])
    return sum(clocks.count for clocks in blocks.values())


class Event(NamedTuple):
    """A thread accesses memory, or comes to the marked instruction `meeting`."""

    block: int
    thread: int
    access: str
    places: list[Place]
    meeting: int | None


def _events(launch: Launch) -> Iterator[Event]:
    trace, marks = launch.trace, launch.tensors.index(MEMORY)
    columns = [
        trace[name].tolist() for name in ("thread_block", "thread", "space", "tensor", "element", "bytes", "access")
    ]
    for block, thread, space, tensor, element, size, access in zip(*columns, strict=True):
        if space == "global" and tensor == marks:
            if access == "write":
                yield Event(block, thread, access, [], element - 1)
        elif space in ("shared", "global"):
            words = range(size // 4 if space == "shared" and access != "atomic" and size > 4 else 1)
            yield Event(block, thread, access, [(space, tensor, element + word) for word in words], None)


def _operands(events: Iterable[Event], meetings: Sequence[str]) -> Mapping[int, Mapping[tuple[int, int], set[Place]]]:
    """The places that a product reads, by its thread block, its four warps, and its number among their products.

    The trace gives each of the four warps a part of the reads. All reads of a thread from its first product to its
    commit count as reads of products.
    """
    operands = defaultdict(lambda: defaultdict(set))
    begun, multiplying = Counter(), set()
    for each in events:
        thread = each.block, each.thread
        if each.meeting is None:
            if thread in multiplying and each.access == "read":
                operands[each.block][each.thread // 128, begun[thread]].update(each.places)
        elif "wgmma.mma_async" in meetings[each.meeting]:
            begun[thread] += 1
            multiplying.add(thread)
        elif "wgmma.commit_group" in meetings[each.meeting]:
            multiplying.discard(thread)
    return operands


class Groups:
    """The places of the copies or products that a thread has begun, by the groups that it commits and waits for."""

    def __init__(self) -> None:
        self.groups = [[]]

    def begin(self, places: Iterable[Place]) -> None:
        self.groups[-1] += places

    def commit(self) -> None:
        self.groups.append([])

    def complete(self, newest: int) -> list[Place]:
        """Remove all committed groups but the last `newest`."""
        number = max(0, len(self.groups) - 1 - newest)
        completed, self.groups = self.groups[:number], self.groups[number:]
        return [place for group in completed for place in group]


class Clocks:
    """The accesses that each thread of a thread block knows to have happened, and the last accesses to each place."""

    def __init__(self, num_threads: int, operands: Mapping[tuple[int, int], set[Place]]) -> None:
        self.clock = [1] * num_threads
        self.known = [[0] * num_threads] * num_threads  # accesses of u up to clock known[t][u] are before those of t
        self.coming = defaultdict(list)
        self.phases = defaultdict(lambda: [0] * num_threads)  # of each mbarrier: the clocks of the arrived threads
        self.last_atomic, self.arrives = {}, set()
        self.copying, self.copies = set(), [Groups() for _ in range(num_threads)]
        self.operands, self.begun, self.products = operands, Counter(), [Groups() for _ in range(num_threads)]
        self.last = {kind: defaultdict(dict) for kind in ("read", "write", "atomic")}
        read, write, atomic = self.last.values()
        self.conflicting = {"read": (write, atomic), "write": (read, write, atomic), "atomic": (read, write)}
        self.count = 0

    def meet(self, thread: int, instruction: str) -> None:
        name, _, operands = re.sub(r"^@\S+ ", "", instruction).partition(" ")
        if "wgmma" in name:
            self.multiply(thread, name, operands)
        elif "cp.async" in name:
            self.copy(thread, name, operands)
        elif "mbarrier.arrive" in name:
            self.arrives.add(thread)  # with its next atomic
        elif "mbarrier" in name:
            self.known[thread] = later(self.known[thread], self.phases[self.last_atomic[thread]])
        else:
            number, _, count = operands.partition(",")
            key = ("warp", thread // 32) if "warp" in name else number
            size = 32 if "warp" in name else int(count or len(self.known))
            self.coming[key].append(thread)
            if len(self.coming[key]) == size:
                self.join(self.coming.pop(key))

    def copy(self, thread: int, name: str, operands: str) -> None:
        copies = self.copies[thread]
        if "commit_group" in name or "wait_all" in name:  # wait_all waits for copies without a commit, too
            copies.commit()
        if "wait" in name:
            self.access(thread, copies.complete(int(operands or 0)), "write")
        elif "commit" not in name:
            self.copying.add(thread)  # with its next store to shared memory

    def multiply(self, thread: int, name: str, operands: str) -> None:
        """The first lane of each warp stands for the warp: all lanes begin a product and wait for it together."""
        products = self.products[thread]
        if thread % 32:
            return
        if "commit_group" in name:
            products.commit()
        elif "wait_group" in name:
            self.access(thread, products.complete(int(operands)), "read")
        else:
            self.begun[thread] += 1
            places = self.operands[thread // 128, self.begun[thread]]
            self.access(thread, places, "read")
            products.begin(places)

    def join(self, threads: list[int]) -> None:
        joined = later(*{id(self.known[each]): self.known[each] for each in threads}.values())
        for each in threads:
            self.pass_on(each, joined)
            self.known[each] = joined

    def pass_on(self, thread: int, to: list[int]) -> None:
        to[thread] = self.clock[thread]
        self.clock[thread] += 1

    def access(self, thread: int, places: Iterable[Place], access: str) -> None:
        for place in places:
            self.touch(thread, place, access)

    def store(self, thread: int, places: Iterable[Place]) -> None:
        """A store to shared memory, or the beginning of a copy to it."""
        self.access(thread, places, "write")
        if thread in self.copying:
            self.copying.remove(thread)
            self.copies[thread].begin(places)

    def touch(self, thread: int, place: Place, access: str) -> None:
        known = self.known[thread]
        for last in self.conflicting[access]:
            if place in last:
                for other, clock in last[place].items():
                    self.count += clock > known[other] and other != thread
        self.last[access][place][thread] = self.clock[thread]
        if access == "atomic":
            self.last_atomic[thread] = place
            if thread in self.arrives:
                self.arrives.remove(thread)
                self.phases[place] = later(known, self.phases[place])
                self.pass_on(thread, self.phases[place])


def later(*clocks: list[int]) -> list[int]:
    return [max(each) for each in zip(*clocks, strict=True)]
