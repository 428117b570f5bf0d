"""Exercises whose answer is a Python function."""

import ast
import copy
import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pagewise.exercises.code import edited, same_function
from pagewise.exercises.exercise import Case, Exercise
from pagewise.exercises.values import text


@dataclass(eq=False, repr=False)
class PythonExercise(Exercise):
    """An exercise whose solution is a function of the module with these globals."""

    scope: dict[str, object] = field(default_factory=dict)

    def answer(self, source: str) -> Callable:
        names = dict(self.scope)
        exec(source, names)
        return names[ast.parse(source).body[-1].name]

    def refuses(self, theirs: object) -> str | None:
        if callable(theirs):
            return None
        if theirs is None:
            return "the answer must be a function, got None."
        return f"the answer must be a function, got {type(theirs).__name__}: pass the function, not what it returns."

    def is_stub(self, theirs: object) -> bool:
        return same_function(theirs, self.stub)


def python_exercise(
    solution: Callable,
    cases: Sequence[Case],
    mistakes: Sequence[str | tuple[str, str]],
    praise: str,
    *,
    name: str = "",
    imports: str = "",
    start: str = "...",
    bug: Sequence[tuple[str, str]] = (),
    kind: type | None = None,
) -> Exercise:
    """Return an exercise around `solution`, whose docstring is the task.

    `mistakes` has the form of `Exercise.listed`. The stub and the solution begin with the lines of `imports`. The stub
    is the solution with the lines of `start` as its body. For a reader who looks for a mistake, it is the solution
    after the edits of `bug`. `kind` is a subclass of PythonExercise.
    """
    source = textwrap.dedent(inspect.getsource(solution)).rstrip()
    docstring = ast.parse(source).body[0].body[0]
    head = "\n".join(source.splitlines()[: docstring.end_lineno])
    stub = edited(source, *bug) if bug else f"{head}\n{textwrap.indent(start, '    ')}"
    above = f"{imports}\n\n\n" if imports else ""
    scope = inspect.unwrap(solution).__globals__
    name = name or solution.__name__
    return (kind or PythonExercise)(name, above + source, above + stub, cases, mistakes, praise, scope=scope)


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
