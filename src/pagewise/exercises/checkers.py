"""The checkers of the exercises, `check.<name>`, and the solutions and mistakes by name."""

from collections.abc import Callable, Iterator, Mapping

from pagewise.exercises import (
    lesson_1,
    lesson_2,
    lesson_3,
    lesson_4,
    lesson_5,
    lesson_6,
    lesson_7,
    lesson_8,
    lesson_9,
    lesson_10,
    progress,
)
from pagewise.exercises.exercise import Exercise

LESSONS: dict[int, list[Exercise]] = {
    1: lesson_1.EXERCISES,
    2: lesson_2.EXERCISES,
    3: lesson_3.EXERCISES,
    4: lesson_4.EXERCISES,
    5: lesson_5.EXERCISES,
    6: lesson_6.EXERCISES,
    7: lesson_7.EXERCISES,
    8: lesson_8.EXERCISES,
    9: lesson_9.EXERCISES,
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

    def hint(self, name: str) -> "Text":
        """Return the hint for the last wrong answer to an exercise, or for the text that the reader starts from."""
        return Text(getattr(self, name).hint())

    def progress(self, lesson: int | None = None) -> "Text":
        """Return the exercises that are solved: now, or earlier in the folder that `make lab` made.

        Args:
            lesson: show the exercises of this lesson alone, 1 to 10. Default: of all lessons.

        Raises:
            ValueError: there is no such lesson.
        """
        if lesson is not None and lesson not in LESSONS:
            raise ValueError(f"there is no lesson {lesson!r}: there are lessons 1 to {max(LESSONS)}")
        shown = LESSONS if lesson is None else {lesson: LESSONS[lesson]}
        done = progress.solved()
        lines = []
        for number, exercises in shown.items():
            names = "  ".join(f"{'✓' if exercise.name in done else '·'} {exercise.name}" for exercise in exercises)
            count = sum(exercise.name in done for exercise in exercises)
            lines.append(f"lesson {number:2}   {count} of {len(exercises)}   {names}")
        if not progress.is_kept():
            lines.append(
                "The list counts the exercises in depth, too. A restart of the notebook empties it. In the lessons "
                "that `make lab` opens, it is kept on disk."
            )
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


class Catalogue(Mapping[str, object]):
    """One property of every exercise, by the exercise's name. It is computed at each access."""

    def __init__(self, what: Callable[[Exercise], object]) -> None:
        self._what = what

    def __getitem__(self, name: str) -> object:
        return self._what(BY_NAME[name])

    def __iter__(self) -> Iterator[str]:
        return iter(BY_NAME)

    def __len__(self) -> int:
        return len(BY_NAME)

    def __repr__(self) -> str:
        return f"{len(self)} exercises: {', '.join(self)}"
