"""Second arguments that an instruction of a PTX kernel is not needed. They do not use the rules of `check`.

`Paths` walks along all paths through the text. `unordered` replays the trace of a run without a
barrier.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from planting import MEMORY

from cudascope import Report
from cudascope.ptx_module import Statement, read_module
from cudascope.simt.report import Launch

FAMILIES = {
    "cp.async.": r"cp\.async\.c[ag]\b",
    "cp.async.bulk.": r"cp\.async\.bulk\..*bulk_group",
    "wgmma.": r"wgmma\.mma_async",
}
BARRIER = re.compile(r"(?:@!?%\w+ )?(?:bar(?:\.warp)?\.sync|barrier(?:\.cta)?\.sync)\b")
ACCESS = re.compile(
    r"(?:@!?%\w+ )?(?:ld\.(?!param)|st\.|atom|red\.|ldmatrix|stmatrix|wmma\.(?:load|store)|tensormap|mbarrier"
    r"|cp\.async\.(?:c[ag]|bulk\.(?!commit|wait))|wgmma\.mma_async)"
)


class Paths:
    """The statements of the only entry of `ptx`, and which statement may follow which."""

    def __init__(self, ptx: str) -> None:
        (entry,) = read_module(ptx).entries.values()
        self.body = entry.body
        self.labels = defaultdict(list)
        for i, each in enumerate(self.body):
            if each.text.endswith(":"):
                self.labels[each.text[:-1]].append(i)

    def at(self, line: int) -> int:
        """The first instruction at or after a line of the text."""
        return next(i for i, each in enumerate(self.body) if each.line >= line)

    def after(self, i: int) -> list[int]:
        text = self.body[i].text
        match = re.fullmatch(r"(@\S+ )?(?:bra(?:\.uni)? (\S+)|ret|exit)", text)
        following = [i + 1] if i + 1 < len(self.body) else []
        if not match:
            return following
        # Blocks may have labels of one name: a loop inside of a block goes back to the nearest.
        target = [min(self.labels[match[2]], key=lambda at: abs(at - i))] if match[2] else []
        return target + following * bool(match[1])

    def from_(self, i: int, ends: Callable[[Statement], bool]) -> Iterator[Statement]:
        """Every statement that may follow statement `i`. A statement for which `ends` holds is the last of its path."""
        seen, waiting = set(), self.after(i)
        while waiting:
            here = waiting.pop()
            if here in seen:
                continue
            seen.add(here)
            yield self.body[here]
            if not ends(self.body[here]):
                waiting += self.after(here)

    # -------------------------------------------------------------------------------------------- arguments

    def joins_the_next_group(self, line: int, family: str) -> bool:
        """Whether more than n later commits follow a removed one on every path to a wait for all but n groups."""
        seen, waiting = set(), [(each, 0) for each in self.after(self.at(line))]
        while waiting:
            here, commits = waiting.pop()
            text = self.body[here].text
            wait = re.search(rf"{re.escape(family)}wait_(?:group(?:\.read|\.sync\.aligned)?\s+(\d+)|all)", text)
            if wait and commits <= int(wait[1] or 0):
                return False
            commits += f"{family}commit_group" in text
            if (here, commits) not in seen and commits < 10:
                seen.add((here, commits))
                waiting += [(each, commits) for each in self.after(here)]
        return True

    def has_nothing_to_wait_for(self, line: int, family: str) -> bool:
        """Whether every path from a copy or product of the family to this commit or wait meets another one before it.

        The other wait is for all groups.
        """
        starts = [i for i, each in enumerate(self.body) if re.search(FAMILIES[family], each.text)]
        kind = "commit" if "commit" in self.body[self.at(line)].text else r"wait.* 0\s*$"
        other = re.compile(re.escape(family) + kind)

        def ends(each: Statement) -> bool:
            return each.line != line and bool(other.search(each.text))

        return not any(each.line == line for start in starts for each in self.from_(start, ends))

    def precedes_another_fence(self, line: int) -> bool:
        """Whether every path from a proxy fence to a use of the async proxy meets another fence."""

        def fences(each: Statement) -> bool:
            return "fence.proxy.async" in each.text

        uses = re.compile(r"wgmma\.mma_async|cp\.async\.bulk\.(?!commit|wait)")
        return not any(uses.search(each.text) for each in self.from_(self.at(line), fences))

    def is_beside_a_barrier(self, line: int) -> bool:
        """Whether every path from this barrier meets another, or every path to it does, before any access to memory."""
        me = next(i for i, each in enumerate(self.body) if each.line == line and BARRIER.match(each.text))

        def is_other(each: Statement) -> bool:
            return each.text == self.body[me].text and each.line != line

        def ends(each: Statement) -> bool:
            return bool(ACCESS.match(each.text)) or is_other(each)

        accesses = [i for i, each in enumerate(self.body) if ACCESS.match(each.text)]
        follows = any(ACCESS.match(each.text) for each in self.from_(me, ends))
        return not follows or not any(each.line == line for i in accesses for each in self.from_(i, is_other))

    def precedes_stores_of_the_whole_warp(self, line: int) -> bool:
        """Whether all accesses between a barrier of the warp and the next barrier are wmma.store of the whole warp."""

        def ends(each: Statement) -> bool:
            return bool(BARRIER.match(each.text))

        following = [each.text for each in self.from_(self.at(line), ends) if ACCESS.match(each.text)]
        return bool(following) and all(each.startswith("wmma.store") for each in following)


# ------------------------------------------------------------------------------------------------ the trace of a run


def unordered(report: Report, meetings: Sequence[str], without: int | None = None) -> int:
    """Count the accesses that nothing orders after an earlier access of another thread to the same place.

    Each thread has a vector clock. Each place keeps the last read, write and atomic of every thread, so no access is
    forgotten. Some accesses count even in a right kernel: the trace does not tell when a bulk copy lands, and several
    threads may store the same value. A kernel needs a barrier if the count without the barrier is larger. A cp.async
    counts where it begins and at the wait that completes it. A product (wgmma) counts where it begins.

    Args:
        report: of `observe`, with marks (planting.py).
        meetings: the marked instructions.
        without: the number of a barrier that shall order nothing.
    """
    return sum(_unordered(launch, meetings, without) for launch in report.launches)


def _unordered(launch: Launch, meetings: Sequence[str], without: int | None) -> int:
    trace, marks, num_threads = launch.trace, launch.tensors.index(MEMORY), int(np.prod(launch.block))
    columns = [
        trace[name].tolist() for name in ("thread_block", "thread", "space", "tensor", "element", "bytes", "access")
    ]
    blocks: dict[int, Clocks] = defaultdict(lambda: Clocks(num_threads))
    for block, thread, space, tensor, element, size, access in zip(*columns, strict=True):
        clocks = blocks[block]
        if space == "global" and tensor == marks:
            if access == "write" and element - 1 != without:
                clocks.meet(thread, meetings[element - 1])
        elif space in ("shared", "global"):
            words = range(size // 4 if space == "shared" and access != "atomic" and size > 4 else 1)
            places = [(space, tensor, element + word) for word in words]
            for place in places:
                clocks.touch(thread, place, access)
            if space == "shared" and access == "write":
                clocks.copy(thread, places)
    return sum(clocks.count for clocks in blocks.values())


class Clocks:
    """What each thread of a thread block knows of the others, and the last accesses."""

    def __init__(self, num_threads: int) -> None:
        self.clock = [1] * num_threads
        self.known = [[0] * num_threads] * num_threads  # accesses of u up to clock known[t][u] are before those of t
        self.coming = defaultdict(list)
        self.phases = defaultdict(
            lambda: [0] * num_threads
        )  # of each mbarrier: what the threads that have arrived know
        self.last_atomic, self.arrives = {}, set()
        self.copies = set()
        self.copied = [[[]] for _ in range(num_threads)]  # places in shared memory, by group of cp.async
        self.last = {kind: defaultdict(dict) for kind in ("read", "write", "atomic")}
        self.count = 0

    def meet(self, thread: int, instruction: str) -> None:
        name, _, operands = re.sub(r"^@\S+ ", "", instruction).partition(" ")
        if "mbarrier.arrive" in name:
            self.arrives.add(thread)  # with its next atomic
        elif "commit" in name:
            self.copied[thread].append([])
        elif "cp.async.wait_all" in name:
            self.copied[thread].append([])  # it waits for copies without a commit, too
            self.land(thread, 0)
        elif "cp.async.wait_group" in name:
            self.land(thread, int(operands))
        elif "cp.async" in name:
            self.copies.add(thread)  # with its next store to shared memory
        elif "mbarrier" in name:
            self.known[thread] = later(self.known[thread], self.phases[self.last_atomic[thread]])
        else:
            number, _, count = operands.partition(",")
            key = ("warp", thread // 32) if "warp" in name else number
            size = 32 if "warp" in name else int(count or len(self.known))
            self.coming[key].append(thread)
            if len(self.coming[key]) == size:
                self.join(self.coming.pop(key))

    def copy(self, thread: int, places: list[tuple]) -> None:
        """Keep what the thread stores to shared memory for `land` if it stores by a copy."""
        if thread in self.copies:
            self.copies.remove(thread)
            self.copied[thread][-1] += places

    def land(self, thread: int, newest: int) -> None:
        """Store again what the thread has copied in all its groups but the last `newest`."""
        groups = self.copied[thread]
        landing = max(0, len(groups) - 1 - newest)
        for place in [place for group in groups[:landing] for place in group]:
            self.touch(thread, place, "write")
        self.copied[thread] = groups[landing:]

    def join(self, threads: list[int]) -> None:
        joined = later(*{id(self.known[each]): self.known[each] for each in threads}.values())
        for each in threads:
            self.pass_on(each, joined)
            self.known[each] = joined

    def pass_on(self, thread: int, to: list[int]) -> None:
        to[thread] = self.clock[thread]
        self.clock[thread] += 1

    def touch(self, thread: int, place: tuple, access: str) -> None:
        known = self.known[thread]
        for kind, last in self.last.items():
            if {kind, access} not in ({"read"}, {"atomic"}) and place in last:
                self.count += sum(clock > known[other] for other, clock in last[place].items() if other != thread)
        self.last[access][place][thread] = self.clock[thread]
        if access == "atomic":
            self.last_atomic[thread] = place
            if thread in self.arrives:
                self.arrives.remove(thread)
                self.phases[place] = later(known, self.phases[place])
                self.pass_on(thread, self.phases[place])


def later(*clocks: list[int]) -> list[int]:
    return [max(each) for each in zip(*clocks, strict=True)]
