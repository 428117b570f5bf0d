"""One cause, one finding: races that one barrier would end are one finding, which says where the barrier belongs."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from cudascope.watch.findings import Finding, MissingBarrier, merged


class _Lines(NamedTuple):
    """Lines after which a barrier ends some races: `first` to `last`; if they wrap, from `first` and up to `last`."""

    first: float
    last: float
    wraps: bool

    def both(self, other: "_Lines") -> "_Lines | None":
        """The lines in both; None if there are none."""
        if self.wraps and other.wraps:
            return _Lines(max(self.first, other.first), min(self.last, other.last), True)
        if other.wraps:
            return other.both(self)
        if self.wraps:  # either part of these lines may have some of the other's
            parts = (_Lines(self.first, math.inf, False), _Lines(-math.inf, self.last, False))
            return next((both for part in parts if (both := part.both(other))), None)
        first, last = max(self.first, other.first), min(self.last, other.last)
        return _Lines(first, last, False) if first <= last else None


def _lines(barrier: MissingBarrier) -> _Lines:
    wraps = barrier.after > barrier.before
    return _Lines(barrier.after, max(barrier.before - 1, barrier.after) if not wraps else barrier.before - 1, wraps)


def by_cause(findings: Iterable[Finding]) -> list[Finding]:
    """`findings` in their order. A race that the barrier of an earlier one ends too is in the `others` of that one."""
    apart = merged([each for finding in findings for each in (finding.alone(), *finding.others)])
    groups: list[tuple[Finding, _Lines | None, list[Finding]]] = []
    for finding in apart:
        lines = _lines(finding.barrier) if finding.barrier else None
        for i, (first, common, others) in enumerate(groups):
            same = common and lines and finding.rule == first.rule and finding.kernel == first.kernel
            if same and finding.barrier.file == first.barrier.file and (both := common.both(lines)):
                groups[i] = (first, both, [*others, finding])
                break
        else:
            groups.append((finding, lines, []))
    return [first.with_others(others) if others else first for first, _, others in groups]
