"""Exercises whose answer is a Python function."""

import ast
import copy
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence

from pagewise.exercises.code import edited
from pagewise.exercises.exercise import Case, Exercise, Mistake
from pagewise.exercises.values import text


def python_exercise(
    solution: Callable,
    cases: Sequence[Case],
    mistakes: Mapping[str, Mistake | tuple],
    praise: str,
    *,
    name: str = "",
    imports: str = "",
    stub: str = "",
) -> Exercise:
    """Return an exercise around `solution`, whose docstring is the task.

    Args:
        mistakes: by title, a `Mistake`, or (hint, (old, new), …) for the solution after these edits.
        imports: lines above the stub.
        stub: a source with a mistake that the reader must find; by default the solution without its body.
    """
    stub = stub or _without_body(solution)
    stub = f"{imports}\n\n\n{stub}" if imports else stub
    cases = [case._replace(what=case.what.replace("{name}", solution.__name__)) for case in cases]
    wrong = {
        title: given if isinstance(given, Mistake) else Mistake(variant(solution, *given[1:]), given[0])
        for title, given in mistakes.items()
    }
    return Exercise(name or solution.__name__, cases, wrong, solution, stub, praise)


def variant(solution: Callable, *edits: tuple[str, str]) -> Callable:
    """Return the function that the solution's source defines after these edits, (old, new) each."""
    made: dict[str, Callable] = {}
    exec(edited(listing(solution), *edits), inspect.unwrap(solution).__globals__, made)
    return made[solution.__name__]


def call(*args: object, of: Callable[..., object] | None = None, **kwargs: object) -> Case:
    """Return the case of one call with fresh copies of these arguments.

    For a function that changes its arguments, pass `of`: the value of `of(result, *args)` after the call is compared.
    """

    def run(theirs: Callable) -> object:
        mine = copy.deepcopy(args)
        result = theirs(*mine, **kwargs)
        return of(result, *mine) if of else result

    words = [*map(text, args), *(f"{key}={text(value)}" for key, value in kwargs.items())]
    return Case(f"{{name}}({', '.join(words)})", run)


def listing(function: Callable) -> str:
    """Return the source of a function, without the indentation of its place."""
    return textwrap.dedent(inspect.getsource(function)).rstrip()


def _without_body(function: Callable) -> str:
    source = listing(function)
    docstring = ast.parse(source).body[0].body[0]
    return "\n".join([*source.splitlines()[: docstring.end_lineno], "    ..."])
