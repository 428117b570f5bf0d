"""An exercise: a task, a solution, the mistakes that are natural, and small cases that tell them all apart."""

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pagewise.exercises.attempts import attempt
from pagewise.exercises.values import Raised, difference, text

NO_ANSWER = ("time", ("no answer",))  # kinds of Raised that say nothing about the mistake


class Case(NamedTuple):
    """One thing that an answer is tried on: `run(theirs)` gives what is held against the solution's."""

    what: str
    run: Callable[[Callable], object]


class Mistake(NamedTuple):
    """A natural wrong answer, and the hint that a reader gets for it."""

    theirs: object
    hint: str


@dataclass(frozen=True)
class Verdict:
    """A checker's answer. It shows itself in a notebook; in an `if` it counts as `right`."""

    right: bool
    message: str

    def __bool__(self) -> bool:
        return self.right

    def __repr__(self) -> str:
        return self.message

    def _repr_markdown_(self) -> str:
        first, _, rest = self.message.partition(":")
        return f"**{first}:**{rest}"


@dataclass(frozen=True)
class Exercise:
    """Called with an answer, it judges it: the first case that fails, the smallest, is the one shown.

    A failing answer is compared with the known mistakes. The hint is that of a mistake that gives the same results on
    all cases so far. If several mistakes do, it is the one that also agrees on most of the later cases.
    """

    name: str
    cases: Sequence[Case]
    mistakes: Mapping[str, Mistake]
    solution: object
    stub: str  # what the reader starts from; it states the task
    praise: str  # what a right answer has shown

    def __call__(self, theirs: object) -> Verdict:
        if refusal := self.refuses(theirs):
            return not_yet(refusal)
        outcomes: list[object] = []
        for case, must in zip(self.cases, self.outcomes_of_solution, strict=True):
            outcomes.append(self.outcome(case, theirs))
            if found := _differs(must, outcomes[-1]):
                hint = self._name_mistake(theirs, outcomes) or self.unnamed(outcomes[-1], found)
                return not_yet(f"the smallest case that fails\n\n{_shown(case, must, outcomes[-1])}\n\n{hint}".rstrip())
        return Verdict(True, f"Right: {self.praise}")

    # ------------------------------------------------------------------------ how answers of this kind are run

    def refuses(self, theirs: object) -> str | None:
        """Why this cannot be an answer at all, or None."""
        if callable(theirs):
            return None
        if theirs is None:
            return "the answer must be a function, got None."
        return f"the answer must be a function, got {type(theirs).__name__}: pass the function, not what it returns."

    def answer(self, theirs: object) -> object:
        """What the reader sees of a solution or a mistake of ours."""
        return theirs

    def outcome(self, case: Case, theirs: object) -> object:
        """What an answer gives on a case, or `Raised`."""
        return attempt(lambda: case.run(theirs), code=theirs)

    @cached_property
    def outcomes_of_solution(self) -> list[object]:
        return [self.outcome(case, self.solution) for case in self.cases]

    def answers_of_mistakes(self) -> Iterator[tuple[Mistake, object]]:
        """Yield each mistake and the answer that `outcome` runs for it."""
        for mistake in self.mistakes.values():
            yield mistake, mistake.theirs

    def unnamed(self, got: object, found: str) -> str:
        """What to say about an answer that is wrong in its own way."""
        return "" if isinstance(got, Raised) else f"{found[0].upper()}{found[1:]}."

    def _name_mistake(self, theirs: object, outcomes: list[object]) -> str | None:
        if isinstance(outcomes[-1], Raised) and outcomes[-1].kind in NO_ANSWER:
            return None

        def agrees(answer: object, i: int) -> bool:
            return _differs(self.outcome(self.cases[i], answer), outcomes[i]) is None

        failed, later = len(outcomes) - 1, range(len(outcomes), len(self.cases))
        order = [failed, *range(failed)]  # few mistakes agree on the case that failed, so it comes first
        known = [each for each in self.answers_of_mistakes() if all(agrees(each[1], i) for i in order)]
        if len(known) > 1:
            outcomes = outcomes + [self.outcome(self.cases[i], theirs) for i in later]
            known.sort(key=lambda each: -sum(agrees(each[1], i) for i in later))
        return known[0][0].hint if known else None


def _differs(must: object, got: object) -> str | None:
    """`difference`, whatever the reader's function returned."""
    found = attempt(lambda: difference(must, got))
    return f"the result cannot be compared: {found.message}" if isinstance(found, Raised) else found


def not_yet(why: str) -> Verdict:
    """The verdict on an answer that is not right, and why."""
    return Verdict(False, f"Not yet: {why}")


def _shown(case: Case, must: object, got: object) -> str:
    """The case as an indented block, which Markdown shows as it is."""
    is_text = attempt(lambda: text(got))
    rows = {"case": case.what, "must be": text(must), "is": is_text if isinstance(is_text, str) else "unprintable"}
    lines = (f"{key:<9}" + value.replace("\n", "\n" + " " * 9) for key, value in rows.items())
    return textwrap.indent("\n".join(lines), "    ")
