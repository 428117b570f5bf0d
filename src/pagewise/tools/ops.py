"""Custom ops: kernels as single calls that torch.compile, torch.export and make_fx do not look into.

`torch.library.custom_op` makes such ops too. It imports torch's compiler at the first call, which takes seconds, and
spends four times the host time of these on each call. The names of torch with an underscore exist in torch 2.11 to
2.13.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from pagewise.tools.transforms import is_plain, unseen_by_compiler

NUMBERS = (type(None), bool, int, float, str)


def custom_op(name: str, *, schema: str | None = None, fake: Callable) -> Callable[[Callable], Callable]:
    """Return a decorator that makes a function the op torch.ops.pagewise.<name>, on all devices.

    The decorated function calls the op. Where nothing of torch would see that call, it calls the function itself, which
    saves the host a few microseconds.

    Args:
        schema: of the op. Default: what the annotations of the function say. The op writes to none of its arguments.
        fake: takes the arguments of the op, and returns empty tensors like its results, for tensors without numbers.
    """
    qualified = f"pagewise::{name}"

    def decorate(function: Callable) -> Callable:
        of_op = schema or torch.library.infer_schema(function, mutates_args=())
        unseen = unseen_by_compiler(function)
        torch.library.define(qualified, of_op, tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(qualified, "CompositeExplicitAutograd", unseen)
        torch.library.register_fake(qualified, fake)
        op = getattr(torch.ops.pagewise, name).default

        @functools.wraps(function)
        def call(*arguments, **named):
            return op(*arguments, **named) if named or is_seen(arguments) else unseen(*arguments)

        return call

    return decorate


def is_seen(arguments: tuple) -> bool:
    """Whether something of torch sees the call of an op with these arguments.

    It may be a transform or a mode, a subclass of Tensor, autograd, in a backward too, the profiler or torch.jit.trace.
    """
    if (
        not is_plain()
        or torch._C._current_graph_task_id() != -1
        or torch._C._len_torch_function_stack() > 0
        or torch._C._autograd._profiler_enabled()
        or torch._C._get_tracing_state() is not None
    ):
        return True
    enabled = torch.is_grad_enabled()
    for argument in arguments:
        kind = type(argument)
        if kind is Tensor:
            if (enabled and argument.requires_grad) or argument.is_neg() or argument._is_zerotensor():
                return True
        elif kind not in NUMBERS:
            return True
    return False
