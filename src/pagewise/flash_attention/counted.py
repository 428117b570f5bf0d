"""The work of one call of the ops in `ops.py`, for `tools.work.count_work` (lesson 6).

The torch loops are counted as they run, one sequence after the other. The Triton kernels are not counted.
"""

from collections.abc import Callable

from pagewise.flash_attention.in_torch import backward_of_sequence, forward_of_sequence
from pagewise.flash_attention.ops import FlashInputs
from pagewise.tools.work import count_work, counts_as

Counts = tuple[int, int, int, int]


@counts_as("pagewise::flash_attention")
def _forward(*arguments) -> Counts:
    inputs = FlashInputs(*arguments[:-1])  # the last argument is requires_grad
    return _sum_over_sequences(inputs, lambda *sequence: forward_of_sequence(inputs, *sequence))


@counts_as("pagewise::flash_attention_backward")
def _backward(d_out, d_lse, out, lse, saved, *fields) -> Counts:
    inputs = FlashInputs(*fields)
    results = (d_out, d_lse, out, lse)
    return _sum_over_sequences(inputs, lambda *sequence: backward_of_sequence(inputs, results, *sequence))


def _sum_over_sequences(inputs: FlashInputs, run: Callable[[int, slice, slice], object]) -> Counts:
    if inputs.backend != "torch":
        raise ValueError(f'count_work counts flash_attention with backend="torch", got backend="{inputs.backend}"')
    works = [
        count_work(lambda b=b, rows=rows, cols=cols: run(b, rows, cols))
        for b, (rows, cols) in enumerate(inputs.sequences())
    ]
    names = ("matmul_flops", "other_flops", "bytes_read", "bytes_written")
    return tuple(sum(getattr(work, name) for work in works) for name in names)
