"""The selection of test cases keeps its promise: every allowed pair, few cases, always the same ones."""

import re
from itertools import combinations

import pytest
from covering import all_cases, covering, in_turns

from conftest import ROOT

AXES = {
    "D": [32, 64, 80, 128, 256],
    "P": [8, 16, 32],
    "dtype": ["a", "b", "c"],
    "splits": [1, 3],
    "alibi": [False, True],
}


def pairs(cases):
    return {(x, case[x], y, case[y]) for case in cases for x, y in combinations(AXES, 2)}


RULES = {
    "all": lambda case: True,
    "a pair is impossible": lambda case: not (case["D"] == 256 and case["P"] == 8),
    "three together are impossible": lambda case: not (case["D"] > 64 and case["dtype"] == "a" and case["alibi"]),
    "little is possible": lambda case: case["P"] == 16 and case["splits"] == 3,
}


@pytest.mark.parametrize("rule", RULES)
def test_every_allowed_pair_occurs_and_nothing_else(rule):
    cases = covering(AXES, RULES[rule])
    assert all(RULES[rule](case) for case in cases)
    assert pairs(cases) == pairs(all_cases(AXES, RULES[rule]))


def test_few_cases_suffice_and_they_are_always_the_same():
    cases = covering(AXES)
    assert 15 <= len(cases) <= 18  # 5 · 3 pairs of D and P need 15 at least; the product has 180
    assert covering(AXES) == cases


def test_small_selections():
    assert covering({}) == []
    assert covering({"D": [1, 2]}, lambda case: case["D"] > 1) == [{"D": 2}]
    assert covering({"D": [1, 2], "P": []}) == []
    assert covering(AXES, lambda case: False) == []


def test_others_take_turns_or_are_all_met(monkeypatch):
    monkeypatch.delenv("PAGEWISE_FULL", raising=False)
    assert in_turns("abc", (80, 90)) == [("a", 80), ("b", 90), ("c", 80)]
    monkeypatch.setenv("PAGEWISE_FULL", "1")
    assert in_turns("ab", (80, 90)) == [("a", 80), ("a", 90), ("b", 80), ("b", 90)]


def test_make_test_full_runs_every_file_that_takes_a_selection():
    targets = re.search(r"^test-full:.*?\n\n", (ROOT / "Makefile").read_text(), re.MULTILINE | re.DOTALL)[0].split()
    selects = re.compile(r"PAGEWISE_FULL|from covering import .*(?:covering_or_all|one_in_three|in_turns|is_full)")
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if selects.search(path.read_text(encoding="utf-8"))]
    names = [str(path.relative_to(ROOT)) for path in files]
    assert "tests/cudascope/test_through_ptx.py" in names
    assert not [name for name in names if not any(name.startswith(target) for target in targets if "/" in target)]
