"""Counters of the PTX instructions that are executed, as C++ that stands before the instructions.

Each thread counts how often it executes a region (regions.py). Beside that, the runtime counts how often a warp issues
the region:

    issues of a region = the different paths on which lanes of the warp come to it

A path is how many turns of each loop around the region the lane has made since the loop began, and the calls that lead
there. Lanes on one path execute together, as on a GPU that joins the lanes of a warp again at the end of each branch
and of each turn of a loop. So both sides of a divergent branch are issued, each once, and a region that each lane of a
warp enters in another turn of a loop is issued 32 times.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from cudascope.ptx.module import Statement
from cudascope.toolchain.flow import Loop, loops_of
from cudascope.translate.ptx.body import INSTRUCTION
from cudascope.translate.ptx.costs import cost
from cudascope.translate.ptx.regions import JUMPS, regions_of

# The functions of the runtime (cpu/runtime/observe.h), and a number for each step of a path.
DECLARED = """extern "C" unsigned* simt_executions(unsigned);
extern "C" void simt_issue(unsigned, uint64_t);
extern "C" void simt_enter(uint64_t);
extern "C" uint64_t simt_entered();
[[gnu::always_inline]] static inline uint64_t simt_step(uint64_t path, uint64_t number) {
    path = (path ^ number) * 0x9E3779B97F4A7C15ull;
    return path ^ path >> 29;
}"""
_FIRST = "0x243F6A8885A308D3ull"  # no small number: `simt_issue` adds the number of the part


class Part(NamedTuple):
    """What one execution of a counted part of the kernel adds. A part is a region, or an instruction with a predicate.

    Attributes:
        needs: the units that one warp needs, as costs.cost gives them.
        issued: instructions, by name.
        off: of a region, its instructions with a predicate; of such an instruction, −1, where its predicate holds.
    """

    needs: Counter
    issued: Counter[str]
    off: Counter[str]


class Counters:
    """Counters of an entry and its functions: `parts`, by their numbers in `simt_executed`."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._region = Part(Counter(), Counter(), Counter())
        self._path = ""
        self._starts: dict[int, tuple[str, str]] = {}  # by position of a region's first instruction: its path, a turn

    def begin(self, body: Sequence[Statement], *, is_entry: bool) -> list[str]:
        """Begin an entry or a function. Return the declarations that its C++ starts with."""
        regions = regions_of(body)
        loops = loops_of([each.next for each in regions]) if regions else []
        self._starts = {}
        for number, region in enumerate(regions):
            loop = _innermost(loops, number)
            turns = loop is not None and number in loops[loop].headers
            turn = _turn(loop, _innermost(loops[:loop], number)) if turns else ""
            self._starts[region.start] = _path(loop), turn
        declared = [f"uint64_t simt_path = {_FIRST if is_entry else 'simt_entered()'};"]
        for loop in range(len(loops)):
            declared.append(f"uint64_t {_path(loop)} = 0, simt_outer_{loop} = ~0ull, simt_turn_{loop} = 0;")
        return declared

    def before(self, position: int, statement: Statement, predicate: str) -> str:
        """Return the C++ that counts, to stand before the instruction. `predicate`: what C++ tests for it, or ""."""
        name, needs = INSTRUCTION.fullmatch(statement.text)[3], cost(statement.text)
        code = ""
        if position in self._starts:
            self._path, turn = self._starts[position]
            self._region = Part(Counter(), Counter(), Counter())
            code = f"{turn}{self._count(self._region)} "
        self._region.issued[name] += 1
        if name.partition(".")[0] in JUMPS:  # the predicate of a jump says where to go on
            if name.startswith("call"):
                code += f"simt_enter(simt_step({self._path}, {len(self.parts)})); "
        elif predicate:
            self._region.off[name] += 1
            code += f"if ({predicate}) {{ {self._count(Part(Counter(needs), Counter(), Counter({name: -1})))} }} "
        else:
            self._region.needs.update(needs)
        return code

    def _count(self, part: Part) -> str:
        self.parts.append(part)
        number = len(self.parts) - 1
        return f"++simt_executed[{number}]; simt_issue({number}, {self._path});"


def _innermost(loops: Sequence[Loop], region: int) -> int | None:
    """The number of the innermost loop around a region."""
    return max((i for i, loop in enumerate(loops) if region in loop.nodes), default=None)


def _path(loop: int | None) -> str:
    return "simt_path" if loop is None else f"simt_path_{loop}"


def _turn(loop: int, outer: int | None) -> str:
    """The next turn of a loop, or its first turn on this path of the loop around it."""
    path, before, turn = _path(outer), f"simt_outer_{loop}", f"simt_turn_{loop}"
    counted = f"{turn} = {before} == {path} ? {turn} + 1 : 0; {before} = {path};"
    return f"{counted} {_path(loop)} = simt_step({path}, {turn}); "
