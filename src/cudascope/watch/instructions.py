"""The PTX instructions that an observed launch has executed: `report.instructions`.

Each number is of instructions as a warp issues them: one for all its lanes together. An instruction whose predicate is
false takes its turn all the same, so it counts, and `predicated_off` has those that no lane of the warp has executed.

Divergence: both sides of a branch are issued, each once, if lanes of the warp go both ways. Lanes that come to an
instruction in different turns of a loop do not share its issue: `for (i = 0; i < 32; i++) if (i == lane) f();` issues f
32 times. A loop is issued for as many turns as the lane makes that makes most (translate/ptx/counters.py). A thread
that waits for an mbarrier or polls a flag counts as often as it has asked, which another schedule changes.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from cudascope.translate.ptx.costs import SPECIAL
from cudascope.translate.ptx.counters import Part
from cudascope.translate.ptx.regions import JUMPS

_CLASSES = (
    "integer, fp32, fp16, fp64, special, product, convert, move, global load, global store, shared load, shared store, "
    "atomic, local, constant, parameter, shuffle, barrier, control"
)
CLASSES = _CLASSES.split(", ")
_SHUFFLES = {"shfl", "redux", "vote", "match", "elect", "activemask"}
_BARRIERS = {"bar", "barrier", "mbarrier", "fence", "membar", "wgmma", "griddepcontrol"}
_CONTROL = JUMPS | {"nanosleep", "setmaxnreg", "brkpt", "pmevent"}
_FLOAT = re.compile(r"(?:b?f|tf|e\dm|ue\dm)\d\w*")
_FLOATS = {"f32": "fp32", "f32x2": "fp32", "f64": "fp64"}
_FLOATS |= dict.fromkeys(("f16", "f16x2", "bf16", "bf16x2"), "fp16")


def class_of(name: str) -> str:
    """Return the class of a PTX instruction, one of CLASSES, from its whole name ("ld.global.v4.b32").

    A copy between memories counts by the memory that it reads, unless it writes global memory: cp.async is a global
    load. A generic address counts as global. Waits for copies and products are barriers. All other instructions have
    the class of their last type: comparisons and selections are integer, fp32, fp16 or fp64. A conversion between
    integers is integer.
    """
    first, *words = name.split(".")
    words = [word.partition("::")[0] for word in words]
    if first == "mma" or name.startswith(("wmma.mma.", "wgmma.mma_async.")):
        return "product"
    if first in ("ld", "ldu", "st", "ldmatrix", "stmatrix", "atom", "red", "cp", "prefetch", "prefetchu", "wmma"):
        return _moved(first, words)
    if first in SPECIAL and words[-1] != "f64":
        return "special"
    if first in ("mov", "cvta"):
        return "move"
    if first == "cvt" and any(_FLOAT.fullmatch(word) for word in words):
        return "convert"
    for known, each in ((_SHUFFLES, "shuffle"), (_BARRIERS, "barrier"), (_CONTROL, "control")):
        if first in known:
            return each
    return next((_FLOATS[word] for word in reversed(words) if word in _FLOATS), "integer")


def _moved(first: str, words: Sequence[str]) -> str:
    if first in ("atom", "red"):
        return "atomic"
    if first == "cp" and {"commit_group", "wait_group", "wait_all", "mbarrier"} & set(words[:3]):
        return "barrier"
    for space, each in (("param", "parameter"), ("local", "local"), ("const", "constant")):
        if space in words:
            return each
    if first == "cp":  # cp.async.bulk names the target first
        spaces = [word for word in words if word in ("shared", "global")]
        return "global store" if spaces[:1] == ["global"] else "global load"
    writes = first in ("st", "stmatrix") or (first == "wmma" and words[0] == "store")
    shared = "shared" in words or first in ("ldmatrix", "stmatrix")
    return f"{'shared' if shared else 'global'} {'store' if writes else 'load'}"


class Instructions(dict[str, int]):
    """Executed PTX instructions by name, as issued by a warp. A name that was not executed raises KeyError.

    Attributes:
        predicated_off: those of them whose predicate held in no lane of the warp, by name. A jump is none of them: its
            predicate says where to go on.
    """

    def __init__(self, issued: Mapping[str, int], predicated_off: Mapping[str, int]) -> None:
        super().__init__(sorted(issued.items()))
        self.predicated_off = dict(sorted(predicated_off.items()))

    @property
    def total(self) -> int:
        """All instructions."""
        return sum(self.values())

    @property
    def classes(self) -> dict[str, int]:
        """The instructions by class, in the order of CLASSES; only classes that were executed."""
        found = dict.fromkeys(CLASSES, 0)
        for name, number in self.items():
            found[class_of(name)] += number
        return {each: number for each, number in found.items() if number}

    def __add__(self, other: "Instructions") -> "Instructions":
        off = Counter(self.predicated_off) + Counter(other.predicated_off)
        return Instructions(Counter(self) + Counter(other), off)

    def __str__(self) -> str:
        off = sum(self.predicated_off.values())
        rows = [f"{self.total:,} PTX instructions, as issued by a warp; {off:,} of them predicated off"]
        rows += [f"{each:<13} {number:>12,}" for each, number in self.classes.items()]
        return "\n".join(rows)

    __repr__ = __str__


def instructions_of(parts: Sequence[Part], issued: Sequence[int]) -> Instructions:
    """Return the instructions of a launch from the number of issues of each counted part of its kernel."""
    names, off = Counter(), Counter()
    for part, times in zip(parts, issued, strict=True):
        names.update({name: number * times for name, number in part.issued.items()})
        off.update({name: number * times for name, number in part.off.items()})
    return Instructions(+names, +off)
