"""The README's tables about a GPU show the numbers in hardware/: ncu's counts and compute-sanitizer's findings."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from conftest import ROOT

FOLDER = Path(__file__).parent / "hardware"
SECTION = (
    (ROOT / "src/cudascope/README.md").read_text(encoding="utf-8").split("\n## Against a GPU\n")[1].split("\n## ")[0]
)
NCU, SANITIZER = (json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")) for name in ("ncu", "sanitizer"))


def rows(first: str) -> list[list[str]]:
    """The rows of the table whose head begins with `first`."""
    lines = SECTION.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |")) + 2
    end = next(i for i in range(start, len(lines)) if not lines[i].startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:end]]


def test_each_difference_has_a_reason():
    assert len(NCU["launches"]) == 62
    for launch in NCU["launches"]:
        for quantity, (theirs, ours, *reason) in launch["counts"].items():
            is_compared = quantity != "instructions" and theirs != ours
            assert len(reason) == is_compared, (launch["case"], quantity)
            assert set(reason) <= NCU["reasons"].keys()


def test_the_counts_of_the_readme():
    counts = [each for launch in NCU["launches"] for each in launch["counts"].items()]
    quantities = {quantity for quantity, _ in counts} - {"instructions"}
    compared = [each for quantity, each in counts if quantity in quantities]
    assert f"{sum(a == b for a, b, *_ in compared)} of {len(compared)} numbers are equal" in " ".join(SECTION.split())
    table = rows("quantity")
    assert {row[0] for row in table} == quantities
    for quantity, _, equal, others in table:
        numbers = [each for name, each in counts if name == quantity]
        reasons = Counter(each[2] for each in numbers if len(each) == 3)
        assert equal == f"{sum(a == b for a, b, *_ in numbers)} of {len(numbers)}", quantity
        assert others == ", ".join(f"{reason} {number}" for reason, number in reasons.most_common()), quantity


def test_the_instructions_of_the_readme():
    pairs = [launch["counts"]["instructions"] for launch in NCU["launches"]]
    ratios = sorted(ours / theirs for theirs, ours in pairs)
    assert f"{ratios[0]:.2f} to {ratios[-1]:.1f} times" in SECTION


def test_the_findings_of_the_readme():
    tools = ("memcheck", "racecheck", "initcheck", "synccheck")
    complete = [each for each in SANITIZER["kernels"] if None not in each.get("tools", {"": None}).values()]
    found = Counter()
    for each in complete:
        rule = each["cudascope"][0]
        found[rule, "kernels"] += 1
        found.update((rule, tool) for tool in tools if each["tools"][tool])
        found[rule, "no tool"] += not any(each["tools"].values())
    table = rows("rule of cudascope")
    assert sorted(row[0] for row in table) == sorted({rule for rule, _ in found})
    for rule, *cells in table:
        assert [int(cell) for cell in cells] == [found[rule, each] for each in ("kernels", *tools, "no tool")], rule
    reported = sum(any(each["tools"].values()) for each in complete)
    assert f"they report {reported} of the {len(complete)}." in " ".join(SECTION.split())


def test_the_lines_of_the_readme():
    complete = [each for each in SANITIZER["kernels"] if None not in each.get("tools", {"": None}).values()]
    reported = [each for each in complete if any(each["tools"].values())]
    named = [each for each in reported if each["lines of the tools"]]
    other = [each["kernel"] for each in named if set(each["lines"]).isdisjoint(each["lines of the tools"])]
    assert other == ["producer_and_consumer"]
    text = " ".join(SECTION.split())
    assert f"In {len(named)} of the {len(reported)} kernels" in text
    assert f"in {len(named) - 1} of these" in text


@pytest.mark.parametrize("reason", NCU["reasons"])
def test_the_readme_explains_the_reason(reason):
    assert re.search(rf"^- \*\*[^*]*{re.escape(reason)}", SECTION, re.MULTILINE | re.IGNORECASE)


def test_what_did_not_run():
    kernels, runs = SANITIZER["kernels"], SANITIZER["runs"]
    late = sum(each.get("not run") == "no time left" for each in kernels)
    hang = sum(each.get("not run") == "would hang the GPU" for each in kernels)
    cut = sum(None in each["tools"].values() for each in kernels if "tools" in each)
    hosts = len(SANITIZER["programs of mistakes.cu not run (no time left)"])
    ran = len(kernels) - late - hang - cut
    text = " ".join(SECTION.split())
    assert cut == 2
    assert f"{ran} of {len(kernels)} kernels ran under all four. Two more were cut" in text
    assert f"{hang} would have hung the GPU, and {late} kernels and all {hosts} host programs were not reached" in text
    assert f"{runs['run']} of {runs['planned']} planned runs" in text
