"""An exercise: a task, a solution, natural mistakes, and small cases that tell all of them apart."""

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pagewise.exercises.attempts import attempt
from pagewise.exercises.values import Raised, difference, text

NO_ANSWER = ("time", ("no answer",))  # kinds of Raised that say nothing about the mistake


class Case(NamedTuple):
    """One trial of an answer. The value of `run(theirs)` is compared with that of the solution."""

    what: str
    run: Callable[[Callable], object]


class Mistake(NamedTuple):
    """An answer that a reader is likely to write, and the hint that it gets."""

    theirs: object
    hint: str


@dataclass(frozen=True)
class Verdict:
    """The result of a checker. A notebook shows its message. In an `if` it counts as `right`."""

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
    """Called with an answer, judge it. The verdict shows the first case that fails, which is the smallest.

    A known mistake explains a wrong answer if both give the same on every case so far. Among several such mistakes, the
    hint comes from the one that agrees with the answer on most of the remaining cases.
    """

    name: str
    cases: Sequence[Case]
    mistakes: Mapping[str, Mistake]
    solution: object
    stub: str  # the text that the reader starts from; it states the task
    praise: str  # the message for a right answer

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

    def refuses(self, theirs: object) -> str | None:
        """Return why this cannot be an answer at all, or None."""
        if callable(theirs):
            return None
        if theirs is None:
            return "the answer must be a function, got None."
        return f"the answer must be a function, got {type(theirs).__name__}: pass the function, not what it returns."

    def answer(self, theirs: object) -> object:
        """Return a solution or a mistake in the form in which a reader uses it."""
        return theirs

    def outcome(self, case: Case, theirs: object) -> object:
        """Return the result of an answer on a case, or `Raised`."""
        return attempt(lambda: case.run(theirs), code=theirs)

    @cached_property
    def outcomes_of_solution(self) -> list[object]:
        return [self.outcome(case, self.solution) for case in self.cases]

    def answers_of_mistakes(self) -> Iterator[tuple[Mistake, object]]:
        """Yield each mistake and the answer that `outcome` runs for it."""
        for mistake in self.mistakes.values():
            yield mistake, mistake.theirs

    def unnamed(self, got: object, found: str) -> str:
        """Return the hint for a wrong answer that matches no known mistake."""
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
    """Return `difference`. Comparing must not raise, even on objects that the reader made."""
    found = attempt(lambda: difference(must, got))
    return f"the result cannot be compared: {found.message}" if isinstance(found, Raised) else found


def not_yet(why: str) -> Verdict:
    """Return the verdict on a wrong answer."""
    return Verdict(False, f"Not yet: {why}")


def _shown(case: Case, must: object, got: object) -> str:
    """Return the case as an indented block, which Markdown shows verbatim."""
    is_text = attempt(lambda: text(got))
    rows = {"case": case.what, "must be": text(must), "is": is_text if isinstance(is_text, str) else "unprintable"}
    lines = (f"{key:<9}" + value.replace("\n", "\n" + " " * 9) for key, value in rows.items())
    return textwrap.indent("\n".join(lines), "    ")
