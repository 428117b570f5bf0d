"""Exercise of lesson 8: two buffers and a missing wait, in CUDA."""

import torch

from pagewise.exercises.code import edited, solution_text, variants
from pagewise.exercises.cuda import checked, cuda_exercise
from pagewise.exercises.exercise import Case
from pagewise.exercises.values import small_numbers

_WAIT = "        __pipeline_wait_prior(1);\n"
_BARRIER = "        __syncthreads();\n"
_SOLUTION = solution_text("double_buffer.cu")
_TASK = "a multiple of 4.\n"


def _sums(rows: int) -> Case:
    return checked(f"rows = {rows}", 1, 16, small_numbers(rows, 16), torch.Size([16]), rows)


DOUBLE_BUFFER = cuda_exercise(
    "double_buffer",
    [_sums(4), _sums(8), _sums(12)],
    variants(
        "double_buffer.cu",
        missing_wait=(
            "A copy is on its way until somebody waits for it: __pipeline_wait_prior(n) returns when all but the "
            "newest n batches of this thread have arrived. It stands before the barrier: each thread waits for its own "
            "copies, and the barrier tells the others.",
            (_WAIT, ""),
        ),
        missing_barrier_after_the_wait=(
            "The wait is for the thread's *own* copies. What others have copied is there once they have waited, too: a "
            "barrier must follow.",
            (_WAIT + _BARRIER, _WAIT),
        ),
        missing_barrier_at_the_end=(
            "The next copy goes into the buffer that is being read here: nobody may start it before all have read.",
            ("column[16 * row];\n" + _BARRIER, "column[16 * row];\n"),
        ),
        commit_only_with_a_copy=(
            "In the last turn there is no copy and so no batch: then the newest batch is the tile that is wanted, and "
            "it is the one not waited for. Commit in every turn.",
            ("if (next < rows / 4) __pipeline", "if (next < rows / 4) {\n            __pipeline"),
            (
                "        __pipeline_commit();  // also an empty batch: the wait counts batches\n",
                "            __pipeline_commit();\n        }\n",
            ),
        ),
        one_buffer=(
            "The next tile goes into the buffer of this one: there are two, and one fills while the other is read.",
            ("tiles[next % 2]", "tiles[tile % 2]"),
        ),
    ),
    "each tile has arrived, for all, before anybody reads it, and all have read it before the next takes its place.",
    stub=edited(
        _SOLUTION,
        (_WAIT, ""),
        (_TASK, f"{_TASK}// A line is missing, though the result may be right all the same. Find its place.\n"),
    ),
)

EXERCISES = [DOUBLE_BUFFER]
