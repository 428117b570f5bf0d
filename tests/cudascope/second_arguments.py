"""Second arguments that an instruction of a PTX kernel is not needed. They do not use the rules of `check`.

`Paths` walks along all paths through the text. replay.py replays the trace of a run without a barrier.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator

from cudascope.ptx.module import Statement, read_module

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
