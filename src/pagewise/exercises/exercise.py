"""An exercise: a task, a solution, natural mistakes, and small cases that tell all of them apart."""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pagewise.exercises.attempts import attempt
from pagewise.exercises.code import edited
from pagewise.exercises.progress import keep
from pagewise.exercises.values import Raised, difference, text

NO_ANSWER = ("time", ("no answer",))  # kinds of Raised that say nothing about the mistake
_NOTHING = object()


class Mistake(NamedTuple):
    """A wrong answer that a reader is likely to write, as source text, and the hint that it gets."""

    source: str
    hint: str


class Case(NamedTuple):
    """One trial of an answer. The value of `run(theirs)` is compared with that of the solution."""

    what: str  # {name} in it stands for the name of the exercise
    run: Callable[[object], object]


@dataclass(frozen=True)
class Verdict:
    """The result of a checker. A notebook shows its message. In an `if` it counts as `right`."""

    right: bool
    message: str
    hint: str = ""  # what to look at in a wrong answer; the message has it too, unless the answer is the stub

    def __bool__(self) -> bool:
        return self.right

    def __repr__(self) -> str:
        return self.message

    def _repr_markdown_(self) -> str:
        first, _, rest = self.message.partition(":")
        return f"**{first}:**{rest}"


@dataclass(eq=False)
class Exercise:
    """Called with an answer, judge it. The verdict shows the first case that fails, which is the smallest.

    A known mistake explains a wrong answer if both give the same on every case so far. Among several such mistakes, the
    hint comes from the one that agrees with the answer on most of the remaining cases.
    """

    is_kernel = False  # whose solution raises in no case

    name: str
    solution: str  # source text
    stub: str  # the text that the reader starts from; it states the task
    cases: Sequence[Case]
    listed: Sequence[str | tuple[str, str]]  # per mistake: "title: hint", then the edits of the solution that make it
    praise: str  # the message for a right answer
    last: Verdict | None = None  # of the last answer

    def __call__(self, theirs: object = _NOTHING) -> Verdict | None:
        if theirs is _NOTHING:
            print(self.stub)
            return None
        self.last = self._judge(theirs)
        if self.last.right:
            keep(self.name)
        return self.last

    def hint(self) -> str:
        """Return the hint for the last answer if it was wrong. Without an answer, return the hint for the stub."""
        verdict = self._judge(self.answer(self.stub)) if self.last is None else self.last
        return verdict.hint or verdict.message

    def __repr__(self) -> str:
        return f"check.{self.name}(theirs); check.{self.name}() prints the task"

    def answer(self, source: str) -> object:
        """Return the answer that a source text makes, in the form in which a reader passes it."""
        raise NotImplementedError

    def refuses(self, theirs: object) -> str | None:
        """Return why this cannot be an answer at all, or None."""
        raise NotImplementedError

    def is_stub(self, theirs: object) -> bool:
        """Return whether this answer is still the stub."""
        raise NotImplementedError

    def outcome(self, case: Case, theirs: object) -> object:
        """Return the result of an answer on a case, or `Raised`."""
        return attempt(lambda: case.run(theirs), code=theirs)

    @cached_property
    def outcomes_of_solution(self) -> list[object]:
        solution = self.answer(self.solution)
        return [self.outcome(case, solution) for case in self.cases]

    @cached_property
    def mistakes(self) -> dict[str, Mistake]:
        """The mistakes by title."""
        found: dict[str, Mistake] = {}
        for each in self.listed:
            if isinstance(each, str):
                title, hint = each.split(": ", 1)
                found[title] = Mistake(self.solution, hint)
            else:
                found[title] = Mistake(edited(found[title].source, each), found[title].hint)
        return found

    def wrong_answers(self) -> list[object]:
        """Return the answer that `outcome` runs for each mistake."""
        return [self.answer(mistake.source) for mistake in self.mistakes.values()]

    def unnamed(self, got: object, found: str) -> str:
        """Return the hint for a wrong answer that matches no known mistake."""
        sentence = found.replace("the result", "The result", 1) if found.startswith("the result") else found
        return "" if isinstance(got, Raised) else f"{sentence}."

    def _judge(self, theirs: object) -> Verdict:
        if refusal := self.refuses(theirs):
            return Verdict(False, f"Not yet: {refusal}")
        if self.is_kernel and (broken := [each for each in self.outcomes_of_solution if isinstance(each, Raised)]):
            return Verdict(False, f"Not yet: no kernel can be judged here, the solution fails too. {broken[0].message}")
        outcomes: list[object] = []
        for case, must in zip(self.cases, self.outcomes_of_solution, strict=True):
            outcomes.append(self.outcome(case, theirs))
            if found := _differs(must, outcomes[-1]):
                hint = self._hint_of_a_mistake(theirs, outcomes) or self.unnamed(outcomes[-1], found)
                shown = _shown(case.what.replace("{name}", self.name), must, outcomes[-1])
                said = f'`check.hint("{self.name}")` gives a hint.' if self.is_stub(theirs) else hint
                message = f"the smallest case that fails\n\n{shown}\n\n{said}"
                return Verdict(False, f"Not yet: {message.rstrip()}", hint)
        return Verdict(True, f"Right: {self.praise}")

    def _hint_of_a_mistake(self, theirs: object, outcomes: list[object]) -> str | None:
        if isinstance(outcomes[-1], Raised) and outcomes[-1].kind in NO_ANSWER:
            return None

        def agrees(answer: object, i: int) -> bool:
            return _differs(self.outcome(self.cases[i], answer), outcomes[i]) is None

        failed, later = len(outcomes) - 1, range(len(outcomes), len(self.cases))
        order = [failed, *range(failed)]  # few mistakes agree on the case that failed, so it comes first
        wrong = zip(self.mistakes.values(), self.wrong_answers(), strict=True)
        known = [(mistake.hint, answer) for mistake, answer in wrong if all(agrees(answer, i) for i in order)]
        if len(known) > 1:
            outcomes = outcomes + [self.outcome(self.cases[i], theirs) for i in later]
            known.sort(key=lambda each: -sum(agrees(each[1], i) for i in later))
        return known[0][0] if known else None


def _differs(must: object, got: object) -> str | None:
    """Return `difference`. Comparing must not raise, even on objects that the reader made."""
    found = attempt(lambda: difference(must, got))
    return f"the result cannot be compared: {found.message}" if isinstance(found, Raised) else found


def _shown(what: str, must: object, got: object) -> str:
    """Return the case as an indented block, which Markdown shows verbatim."""
    is_text = attempt(lambda: text(got))
    rows = {"case": what, "must be": text(must), "is": is_text if isinstance(is_text, str) else "unprintable"}
    lines = (f"{key:<9}" + value.replace("\n", "\n" + " " * 9) for key, value in rows.items())
    return textwrap.indent("\n".join(lines), "    ")
