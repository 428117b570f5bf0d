"""The checkers of the exercises, `check.<name>`, and the solutions and mistakes by name."""

from collections.abc import Callable

from pagewise.exercises import (
    lesson_1,
    lesson_2,
    lesson_3,
    lesson_4,
    lesson_5,
    lesson_5_attention,
    lesson_6,
    lesson_6_loops,
    lesson_7,
    lesson_8,
    lesson_8_products,
    lesson_9,
    lesson_9_batch,
    lesson_9_engine,
    lesson_10,
)
from pagewise.exercises.exercise import Exercise

LESSONS: dict[int, list[Exercise]] = {
    1: lesson_1.EXERCISES,
    2: lesson_2.EXERCISES,
    3: lesson_3.EXERCISES,
    4: lesson_4.EXERCISES,
    5: [*lesson_5.EXERCISES, *lesson_5_attention.EXERCISES],
    6: [*lesson_6.EXERCISES, *lesson_6_loops.EXERCISES],
    7: lesson_7.EXERCISES,
    8: [*lesson_8.EXERCISES, *lesson_8_products.EXERCISES],
    9: [*lesson_9.EXERCISES, *lesson_9_batch.EXERCISES, *lesson_9_engine.EXERCISES],
    10: lesson_10.EXERCISES,
}
BY_NAME = {exercise.name: exercise for exercises in LESSONS.values() for exercise in exercises}


class Checkers:
    """One checker per exercise, as an attribute."""

    def __getattr__(self, name: str) -> Exercise:
        if name not in BY_NAME:
            raise AttributeError(f"there is no exercise {name!r}: there are {', '.join(BY_NAME)}")
        return BY_NAME[name]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *BY_NAME]

    def names(self) -> list[str]:
        """Return the names of all exercises, in the order of the lessons."""
        return list(BY_NAME)

    def progress(self) -> "Text":
        """Return the exercises that are done in this session."""
        lines = []
        for lesson, exercises in LESSONS.items():
            names = "  ".join(f"{'✓' if exercise.done else '·'} {exercise.name}" for exercise in exercises)
            done = sum(exercise.done for exercise in exercises)
            lines.append(f"lesson {lesson}   {done} of {len(exercises)}   {names}")
        return Text("\n".join(lines))


class Text(str):
    """A text that a notebook shows without quotes."""

    __repr__ = str.__str__


class Folded(Text):
    """Source text that a notebook shows as a folded block of code, so that no reader sees it by accident."""

    def _repr_markdown_(self) -> str:
        block = f"```{'cpp' if '__global__' in self else 'python'}\n{self}\n```"
        return f"<details><summary>A solution</summary>\n\n{block}\n\n</details>"


def show(name: str) -> Folded:
    """Return the solution of an exercise, as a folded cell of the lesson shows it."""
    return Folded(BY_NAME[name].solution)


class Catalogue:
    """One property of every exercise, by the exercise's name. It is computed at each access."""

    def __init__(self, what: Callable[[Exercise], object]) -> None:
        self._what = what

    def __getitem__(self, name: str) -> object:
        return self._what(BY_NAME[name])
