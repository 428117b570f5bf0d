"""A few cases out of a large product of axes, such that every pair of values of two axes occurs in one of them.

Most bugs show in one value or in two that meet; all pairs of nine axes need some sixty cases, all combinations tens of
thousands.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]


def covering(axes: Mapping[str, Sequence], allowed: Callable[[Case], bool] | None = None) -> list[Case]:
    """Cases {axis: value} that together hold every pair of values of two axes which some allowed case holds.

    Greedy and deterministic: each case starts from the first pair still missing, and each further axis takes the value
    that brings the most missing pairs. A single axis gives its values one by one.
    """
    names = list(axes)
    if len(names) < 2:
        cases = [{name: value} for name in names for value in axes[name]]
        return [case for case in cases if allowed is None or allowed(case)]
    sizes = [len(axes[name]) for name in names]
    pairs = combinations(range(len(names)), 2)
    missing = {(i, a, j, b): None for i, j in pairs for a in range(sizes[i]) for b in range(sizes[j])}
    used = {(i, a): 0 for i, size in enumerate(sizes) for a in range(size)}

    def case_of(chosen: dict[int, int]) -> Case:
        return {name: axes[name][chosen[i]] for i, name in enumerate(names)}

    def gain(chosen: dict[int, int], i: int, a: int) -> int:
        return sum(((i, a, j, b) if i < j else (j, b, i, a)) in missing for j, b in chosen.items())

    def complete(chosen: dict[int, int]) -> dict[int, int] | None:
        i = next((i for i in range(len(names)) if i not in chosen), None)
        if i is None:
            return chosen if allowed is None or allowed(case_of(chosen)) else None
        for a in sorted(range(sizes[i]), key=lambda a: (-gain(chosen, i, a), used[i, a], a)):
            if done := complete(chosen | {i: a}):
                return done
        return None

    cases = []
    while missing:
        i, a, j, b = seed = next(iter(missing))
        chosen = complete({i: a, j: b})
        if chosen is None:  # no allowed case holds this pair
            del missing[seed]
            continue
        for i, j in combinations(range(len(names)), 2):
            missing.pop((i, chosen[i], j, chosen[j]), None)
        for place in chosen.items():
            used[place] += 1
        cases.append(case_of(chosen))
    return cases


def all_cases(axes: Mapping[str, Sequence], allowed: Callable[[Case], bool] | None = None) -> list[Case]:
    """Return every combination of values that is allowed."""
    cases = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    return [case for case in cases if allowed is None or allowed(case)]


def is_full() -> bool:
    """Return whether `make test-full` runs, which takes no selection."""
    return os.environ.get("PAGEWISE_FULL") == "1"


def covering_or_all(axes: Mapping[str, Sequence], allowed: Callable[[Case], bool] | None = None) -> list[Case]:
    """`covering` cases, or with PAGEWISE_FULL=1 the whole product, those that are not allowed included."""
    if not is_full():
        return covering(axes, allowed)
    return all_cases(axes)


def label(case: Case) -> str:
    """Return the name of a case in the id of its test: its values, those of a tuple or of a dict one by one."""
    values = (v.items() if isinstance(v, dict) else v if isinstance(v, tuple) else (v,) for v in case.values())
    parts = (part for value in values for each in value for part in (each if isinstance(each, tuple) else (each,)))
    return "-".join(str(part).removeprefix("torch.") for part in parts)


def one_in_three(cases: Sequence, number: int = 0) -> list:
    """Every third case, and all of them with PAGEWISE_FULL=1: for mistakes, which test the tests, and slow cases.

    Tests with successive numbers get different thirds.
    """
    return list(cases if is_full() else cases[number % 3 :: 3])


def in_turns(cases: Sequence, others: Sequence) -> list[tuple[Any, Any]]:
    """(case, other): each case with one of the others, which take turns; with PAGEWISE_FULL=1 with all of them."""
    if is_full():
        return list(product(cases, others))
    return [(case, others[number % len(others)]) for number, case in enumerate(cases)]
