"""The share of faults that `check` finds, on programs of this project, and that it is silent on the programs repaired.

Each kernel of programs/*.cu is two programs: it has a fault, and with `right` it has none. The comment before a kernel
says what is wrong and how it is launched. FAULT names the rules and marks the lines, and MISSED marks a fault that
is not found. `PYTHONPATH=src:tests python tests/cudascope/test_shares.py` prints the table.
"""

import re
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from covering import is_full

from cudascope import CudaKernel, Finding, check, time_limit

FOLDER = Path(__file__).parent / "programs"
FILES = ("memory", "order", "warps", "values")
ALSO = ("left before barrier", "no acquire")
NOT_FOUND = {
    "local_begin": "an index before the first element of a local array",
    "next_row": "an index past a row of an array, within the array",
    "partly_set": "an element of a local array without a value",
    "stale_tail": "values of an earlier tile",
    "lost_elements": "a wrong result without an access that is wrong",
    "shift_too_far": "a shift by the bits of a number or more",
}
ONLY_SHUFFLED = {"active_lanes"}  # found in some of the shuffled schedules, and not in the first one
_PROGRAM = re.compile(r"^// (.*) <<<(\d+), (\d+)(?:, (\d+))?>>>\n(?:.*\n)*?__global__ void (\w+)\(", re.MULTILINE)


class Program(NamedTuple):
    """A kernel with a fault, and the same kernel without it."""

    file: str
    name: str
    fault: str
    shape: tuple[int, int, int]
    rules: frozenset[str]  # that name the fault, one of them at least
    lines: frozenset[int]

    @property
    def repaired(self) -> str:
        """The kernel without the fault: another one if the fault is in the source alone."""
        return self.name + "_right" * self.name.startswith("unset_")


def programs() -> list[Program]:
    """All programs, in the order of their files."""
    found = []
    for file in FILES:
        text = (FOLDER / f"{file}.cu").read_text()
        for match in _PROGRAM.finditer(text):
            fault, grid, block, shared, name = match.groups()
            end = text.find("\n// ", match.end())
            marks = list(re.finditer(r"// (FAULT|MISSED)(.*)", text[match.start() : end if end > 0 else len(text)]))
            lines = frozenset(text.count("\n", 0, match.start() + mark.start()) + 1 for mark in marks)
            rules = frozenset(rule for rule in RULES for mark in marks if mark[1] == "FAULT" and rule in mark[2])
            found.append(Program(file, name, fault, (int(grid), int(block), int(shared or 0)), rules, lines))
    return found


RULES = (
    "out of bounds", "out of shared bounds", "out of local bounds", "misaligned", "local gone",
    "local of another thread", "race", "same value", "small scope", "no acquire", "copy in flight",
    "barrier in a branch", "different barriers", "left before barrier", "lane gone", "lane not in mask",
    "different masks", "warp function in a branch", "deadlock", "spin", "argument", "uninitialised",
    "never written", "unwritten output", "unset variable", "assertion", "division by zero", "stack overflow",
)  # fmt: skip
PROGRAMS = programs()
SEEDS = (None, 0, 1) if is_full() else (None,)
SELECTED = [each for each in PROGRAMS if is_full() or each.file == "warps"]  # a file is compiled as a whole


def findings(program: Program, seed: int | None, *, right: bool) -> list[Finding]:
    """What `check` finds in a program."""
    x, out = np.ones(256, np.float32), np.zeros(256, np.float32)
    flags = np.zeros(16, np.int32)
    kernel = CudaKernel(FOLDER / f"{program.file}.cu", program.repaired if right else program.name)
    outputs = [out] if "(output)" in program.fault else []
    report = None
    try:
        with time_limit(5), check(schedule=seed, stop=False, outputs=outputs, also=ALSO) as report:
            kernel[program.shape](x, out, flags, right)
    except Finding:
        pass  # it ends the launch, and is the report's last one
    return report.findings


def is_found(program: Program, seed: int | None) -> bool:
    """Whether a finding has the rule and a line of the fault."""
    return any(
        each.rule in program.rules and (each.rule == "never written" or {each.line, each.other_line} & program.lines)
        for each in findings(program, seed, right=False)
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("program", SELECTED, ids=lambda program: program.name)
def test_a_fault_is_found_at_its_line_or_is_known_not_to_be(program, seed):
    if program.name in ONLY_SHUFFLED:
        assert not is_found(program, None)
        assert any(is_found(program, other) for other in range(4))
    else:
        assert is_found(program, seed) == (program.name not in NOT_FOUND)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("program", SELECTED, ids=lambda program: program.name)
def test_a_right_program_is_silent(program, seed):
    assert [str(each) for each in findings(program, seed, right=True)] == []


def test_there_are_enough_programs_and_each_says_what_is_wrong():
    assert len(PROGRAMS) >= 60
    assert len({program.name for program in PROGRAMS}) == len(PROGRAMS)
    assert all(program.lines and bool(program.rules) == (program.name not in NOT_FOUND) for program in PROGRAMS)


def table() -> str:
    """The share that is found of each file, and what is not found."""
    rows = []
    for file in FILES:
        own = [program for program in PROGRAMS if program.file == file]
        found = [program for program in own if any(is_found(program, seed) for seed in (None, 0, 1, 2, 3))]
        loud = [program.name for program in own if findings(program, None, right=True)]
        rows.append(
            f"{file:8} {len(found):3} of {len(own):3} faults found, findings in {len(loud)} right programs {loud}"
        )
        rows += [f"         not found: {each.name}, {each.fault}" for each in own if each not in found]
    return "\n".join(rows)


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
