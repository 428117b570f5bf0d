"""Custom ops: kernels as single calls that torch.compile, torch.export and make_fx do not look into.

`torch.library.custom_op` makes such ops too. It imports torch's compiler at the first call, which takes seconds, and
spends four times the host time of these on each call.
"""

from collections.abc import Callable

import torch

from pagewise.tools.transforms import unseen_by_compiler


def custom_op(name: str, *, schema: str | None = None, fake: Callable) -> Callable[[Callable], torch._ops.OpOverload]:
    """Return a decorator that makes a function the op torch.ops.pagewise.<name>, on all devices.

    Args:
        schema: of the op. Default: what the annotations of the function say. The op writes to none of its arguments.
        fake: takes the arguments of the op, and returns empty tensors like its results, for tensors without numbers.
    """
    qualified = f"pagewise::{name}"

    def decorate(function: Callable) -> torch._ops.OpOverload:
        of_op = schema or torch.library.infer_schema(function, mutates_args=())
        torch.library.define(qualified, of_op, tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(qualified, "CompositeExplicitAutograd", unseen_by_compiler(function))
        torch.library.register_fake(qualified, fake)
        return getattr(torch.ops.pagewise, name).default

    return decorate
