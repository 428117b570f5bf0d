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


class Solutions(tuple[str, ...]):
    """Names of exercises. A notebook shows their solutions folded, so that no reader sees one by accident."""

    def __repr__(self) -> str:
        return "\n\n\n".join(BY_NAME[name].solution for name in self)

    def _repr_markdown_(self) -> str:
        return "\n\n".join(map(self._folded, self))

    def _folded(self, name: str) -> str:
        solution = BY_NAME[name].solution
        title = "A solution" if len(self) == 1 else f"A solution of {name}"
        block = f"```{'cpp' if '__global__' in solution else 'python'}\n{solution}\n```"
        return f"<details><summary>{title}</summary>\n\n{block}\n\n</details>"


def show(*names: str) -> Solutions:
    """Return the solutions of exercises, which show themselves folded as the last expression of a cell.

    Raises:
        ValueError: there is no name, or no exercise has this name.
    """
    unknown = ", ".join(name for name in names if name not in BY_NAME)
    if unknown or not names:
        problem = f"there is no exercise {unknown}" if unknown else "give at least one name"
        raise ValueError(f"{problem}: there are {', '.join(BY_NAME)}")
    return Solutions(names)


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
