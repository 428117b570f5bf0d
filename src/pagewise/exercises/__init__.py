"""What the reader writes, and the checkers that judge it.

    check.causal_mask()                   # prints the task
    check.causal_mask(theirs)             # Verdict(right, message): right, or the smallest failing case and a hint
    check.progress()                      # what is done in this session
    show("causal_mask")                   # the solution, as a block of code

`stubs`, `solutions` and `mistakes` hold by name what a reader starts from, a right answer, and the natural wrong ones.
"""

from pagewise.exercises.checkers import Catalogue, Checkers, show

__all__ = ["check", "mistakes", "show", "solutions", "stubs"]

check = Checkers()
solutions = Catalogue(lambda exercise: exercise.answer(exercise.solution))
stubs = Catalogue(lambda exercise: exercise.stub)
mistakes = Catalogue(
    lambda exercise: {key: (exercise.answer(m.theirs), m.hint) for key, m in exercise.mistakes.items()}
)
