"""The checkers of the exercises, `check.<name>`, and the solutions and mistakes by name."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from pagewise.exercises import (
    lesson_1,
    lesson_2,
    lesson_3,
    lesson_3_kernel,
    lesson_4,
    lesson_5,
    lesson_5_attention,
    lesson_5_kernel,
    lesson_6,
    lesson_6_kernel,
    lesson_7,
    lesson_7_kernel,
    lesson_7_schedules,
    lesson_8,
    lesson_8_products,
    lesson_9,
    lesson_9_batch,
)
from pagewise.exercises.exercise import Exercise, Verdict
from pagewise.exercises.python import listing

LESSONS: dict[int, list[Exercise]] = {
    1: lesson_1.EXERCISES,
    2: lesson_2.EXERCISES,
    3: [*lesson_3.EXERCISES, *lesson_3_kernel.EXERCISES],
    4: lesson_4.EXERCISES,
    5: [*lesson_5.EXERCISES, *lesson_5_attention.EXERCISES, *lesson_5_kernel.EXERCISES],
    6: [*lesson_6.EXERCISES, *lesson_6_kernel.EXERCISES],
    7: [*lesson_7.EXERCISES, *lesson_7_schedules.EXERCISES, *lesson_7_kernel.EXERCISES],
    8: [*lesson_8.EXERCISES, *lesson_8_products.EXERCISES],
    9: [*lesson_9.EXERCISES, *lesson_9_batch.EXERCISES],
}
BY_NAME = {exercise.name: exercise for exercises in LESSONS.values() for exercise in exercises}
_NOTHING = object()


class Checker:
    """Judge answers to one exercise. Called without an answer, print the task."""

    def __init__(self, exercise: Exercise, done: set[str]) -> None:
        self._exercise, self._done = exercise, done
        self.__name__, self.__doc__ = exercise.name, exercise.stub

    def __call__(self, theirs: object = _NOTHING) -> Verdict | None:
        if theirs is _NOTHING:
            print(self._exercise.stub)
            return None
        verdict = self._exercise(theirs)
        if verdict.right:
            self._done.add(self._exercise.name)
        return verdict

    def __repr__(self) -> str:
        return f"check.{self.__name__}(theirs); check.{self.__name__}() prints the task"


class Checkers:
    """One checker per exercise, as an attribute."""

    def __init__(self) -> None:
        self._done: set[str] = set()

    def __getattr__(self, name: str) -> Checker:
        if name not in BY_NAME:
            raise AttributeError(f"there is no exercise {name!r}: there are {', '.join(BY_NAME)}")
        return Checker(BY_NAME[name], self._done)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *BY_NAME]

    def names(self) -> list[str]:
        """Return the names of all exercises, in the order of the lessons."""
        return list(BY_NAME)

    def progress(self) -> "Progress":
        """Return the exercises that are done in this session."""
        lines = []
        for lesson, exercises in LESSONS.items():
            done = {exercise.name: exercise.name in self._done for exercise in exercises}
            names = "  ".join(f"{'✓' if is_done else '·'} {name}" for name, is_done in done.items())
            lines.append(f"lesson {lesson}   {sum(done.values())} of {len(done)}   {names}")
        return Progress("\n".join(lines))


class Progress(str):
    """A text that a notebook shows without quotes."""

    __repr__ = str.__str__


class Catalogue:
    """One property of every exercise, by the exercise's name. It is computed at each access."""

    def __init__(self, what: Callable[[Exercise], object]) -> None:
        self._what = what

    def __getitem__(self, name: str) -> object:
        return self._what(BY_NAME[name])


@dataclass(frozen=True)
class Code:
    """Source text that a notebook shows as a folded block of code, so that no reader sees it by accident."""

    language: str
    text: str

    def __repr__(self) -> str:
        return self.text

    def _repr_markdown_(self) -> str:
        block = f"```{self.language}\n{self.text}\n```"
        return f"<details><summary>A solution</summary>\n\n{block}\n\n</details>"


def show(name: str) -> Code:
    """Return the solution of an exercise, as a folded cell of the lesson shows it."""
    exercise = BY_NAME[name]
    if isinstance(exercise.solution, str):
        return Code("cpp" if "__global__" in exercise.solution else "python", exercise.solution)
    imports = re.match(r"((?:import|from) .*\n)*\n*", exercise.stub)[0]  # so that it can be pasted as it stands
    return Code("python", imports + listing(exercise.solution))
