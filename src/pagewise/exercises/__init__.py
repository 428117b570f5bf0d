"""The exercises of the lessons, and the checkers that judge what a reader writes.

    check.causal_mask()                   # prints the task
    check.causal_mask(theirs)             # Verdict(right, message): right, or the smallest failing case and a hint
    check.hint("causal_mask")             # the hint for the last answer, or for the text to start from
    check.progress(3)                     # what is solved in lesson 3; check.progress(): in all lessons
    show("causal_mask", "safe_softmax")   # the solutions, each as a folded block of code

`solutions` and `mistakes` are mappings: name → a right answer, and name → the natural wrong ones, each with its hint.
"""

from pagewise.exercises.checkers import Catalogue, Checkers, show

__all__ = ["check", "mistakes", "show", "solutions"]

check = Checkers()
solutions = Catalogue(lambda exercise: exercise.answer(exercise.solution))
mistakes = Catalogue(
    lambda exercise: {title: (exercise.answer(m.source), m.hint) for title, m in exercise.mistakes.items()}
)
