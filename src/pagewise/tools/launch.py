"""One way to launch a Triton kernel: the tuples it takes, and the casts that Triton's interpreter needs."""

import contextvars
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pagewise.tools.device import triton_launch, triton_mode


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *arguments: Any,
    outputs: Sequence[Tensor] = (),
    stored: Sequence[str] = (),
    scratch: bool = False,
    **keywords: Any,
) -> None:
    """Launch a Triton kernel on the device of its first tensor, with its parameters as keywords.

    A matrix, or a tensor of more dimensions, reaches the kernel as the tuple (pointer, stride of each dimension). A
    vector reaches it as a pointer and is made contiguous. The fields of a tuple are passed in the same way, in a tuple
    of the same class. Everything else is passed as it is.

    Triton's interpreter multiplies bfloat16 wrongly and converts to it without rounding. There, bfloat16 tensors are
    passed as float32 copies, and what the kernel writes is rounded into the tensor afterwards.

    Args:
        grid: the number of programs along each axis.
        outputs: the results that the kernel writes, fully or in part. A vector must be contiguous.
        stored: names of parameters that the kernel converts itself before it computes, such as a cache. They are never
            copied.
        scratch: the kernel makes tensor descriptors, which a GPU keeps in memory that torch allocates for the launch.
        keywords: the kernel's parameters and the launch options, such as num_warps.
    """
    device = next(_tensors((*arguments, *keywords.values()))).device
    copies: list[tuple[Tensor, Tensor]] = []
    widens = triton_mode() == "interpreted"

    def passed(argument: Any, name: str = "") -> Any:
        if isinstance(argument, Tensor):
            tensor = argument
            if widens and tensor.dtype == torch.bfloat16 and name not in stored:
                tensor = tensor.float()
                if _among(argument, outputs):
                    copies.append((argument, tensor))
            if tensor.dim() >= 2:
                return tensor, *tensor.stride()
            if not argument.is_contiguous() and _among(argument, outputs):
                raise ValueError(f"an output of one dimension must be contiguous, got stride {argument.stride(0)}")
            return tensor.contiguous()
        if isinstance(argument, tuple):
            fields = map(passed, argument)
            return type(argument)._make(fields) if hasattr(argument, "_make") else tuple(fields)
        return argument

    with triton_launch(device):
        run = functools.partial(kernel[grid], *map(passed, arguments), **{n: passed(x, n) for n, x in keywords.items()})
        if scratch:  # Triton's allocator is a context variable: in a copy of the context, that of the caller stays
            context = contextvars.copy_context()
            context.run(_allocate_on, device)
            context.run(run)
        else:
            run()
        for output, written in copies:
            output.copy_(written)


def _allocate_on(device: torch.device) -> None:
    """Let torch allocate the scratch memory of Triton's launches in this context."""
    import triton

    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.uint8, device=device))


def _tensors(arguments: tuple[Any, ...]) -> Iterator[Tensor]:
    """Yield the tensors among the arguments and in their tuples."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, tuple):
            yield from _tensors(argument)


def _among(tensor: Tensor, tensors: Sequence[Tensor]) -> bool:
    return any(tensor is other for other in tensors)
