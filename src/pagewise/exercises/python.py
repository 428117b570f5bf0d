"""Exercises whose answer is a Python function."""

import ast
import copy
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence

from pagewise.exercises.exercise import Case, Exercise, Mistake
from pagewise.exercises.values import text


def python_exercise(
    solution: Callable,
    cases: Sequence[Case],
    mistakes: Mapping[str, Mistake],
    praise: str,
    *,
    name: str = "",
    imports: str = "",
    stub: Callable | None = None,
) -> Exercise:
    """An exercise around `solution`, whose docstring is the task.

    Args:
        imports: lines above what the reader is shown.
        stub: a function with a mistake to be found; by default the solution without its body.
    """
    shown = listing(stub, solution.__name__) if stub else _without_body(solution)
    stub_text = f"{imports}\n\n\n{shown}" if imports else shown
    cases = [case._replace(what=case.what.replace("{name}", solution.__name__)) for case in cases]
    return Exercise(name or solution.__name__, cases, mistakes, solution, stub_text, praise)


def call(*args: object, of: Callable[..., object] | None = None, **kwargs: object) -> Case:
    """The case of one call with fresh copies of these arguments; `of(result, *args)` is compared instead of its result.

    `of` is for functions that change their arguments: it sees them after the call.
    """

    def run(theirs: Callable) -> object:
        mine = copy.deepcopy(args)
        result = theirs(*mine, **kwargs)
        return of(result, *mine) if of else result

    words = [*map(text, args), *(f"{key}={text(value)}" for key, value in kwargs.items())]
    return Case(f"{{name}}({', '.join(words)})", run)


def listing(function: Callable, name: str = "") -> str:
    """The source of a function, as if it had this name."""
    source = textwrap.dedent(inspect.getsource(getattr(function, "fn", function))).rstrip()
    return source.replace(f"def {function.__name__}(", f"def {name}(", 1) if name else source


def _without_body(function: Callable) -> str:
    source = listing(function)
    docstring = ast.parse(source).body[0].body[0]
    return "\n".join([*source.splitlines()[: docstring.end_lineno], "    ..."])
