"""Matrix products that NaN in memory beside their rows cannot reach. `product` does not follow autocast, either."""

import torch
from jaxtyping import Float
from torch import Tensor

from pagewise.tools.transforms import derivative_of, is_forward_mode, wants_gradient


def product(a: Float[Tensor, "*#batch M K"], b: Float[Tensor, "*#batch K N"]) -> Float[Tensor, "*batch M N"]:
    """Return a @ b as a kernel computes it: summed in float32 (float64 for float64), rounded once to the dtype of a.

    Autocast has no effect, neither here nor in a backward of any order. On a CPU, 16-bit matrices are multiplied in
    float32: with AMX, torch's own 16-bit product reads beyond the end of a row, and NaN there reaches the result.
    """
    if torch.compiler.is_compiling():  # a Function in a graph has no vmap, and is needed under autocast only
        needs_function = _is_autocast(a.device.type) and wants_gradient(a, b)
    else:  # in forward mode torch's own operations are needed: inside a jvp of ours, torch drops an outer tangent
        needs_function = not is_forward_mode() and derivative_of(a, b) is not None
    return _Product.apply(a, b) if needs_function else _product(a, b)


def linear(
    x: Float[Tensor, "*rows K"], w: Float[Tensor, "N K"], bias: Float[Tensor, " N"] | None = None
) -> Float[Tensor, "*rows N"]:
    """Return torch's own linear layer, which follows autocast, whatever the memory between the rows of x holds.

    On a CPU with AMX, torch reads a row of a 16-bit x up to a multiple of 32 columns, and multiplies what follows the
    row by 0. NaN there would reach the result. So the rows of x are copied, with zeros after them. Weights are
    copied only if something lies between their rows.
    """
    K = x.shape[-1]
    if x.device.type == "cpu" and x.dtype.itemsize == 2:
        w = w if w.is_contiguous() or w.mT.is_contiguous() else w.contiguous()
        x = torch.nn.functional.pad(x, (0, 32 - K % 32))[..., :K]
    return torch.nn.functional.linear(x, w, bias)


def _is_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def _product(a: Tensor, b: Tensor) -> Tensor:
    on = a.device.type
    if _is_autocast(on):
        with torch.autocast(on, enabled=False):
            return _product(a, b)
    return (a.float() @ b.float()).to(a.dtype) if on == "cpu" and a.dtype.itemsize == 2 else a @ b


class _Product(torch.autograd.Function):
    """`product` whose derivatives are products, too: those of torch would follow an autocast around the backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return _product(a, b)

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        needs_a, needs_b = ctx.needs_input_grad
        d_a = product(grad, b.mT).sum_to_size(a.shape) if needs_a else None
        return d_a, product(a.mT, grad).sum_to_size(b.shape) if needs_b else None
