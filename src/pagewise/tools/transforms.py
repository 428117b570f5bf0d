"""Transforms of torch around an attention function: autograd, torch.func, tracing and torch.compile.

A kernel is a custom op. torch.func and forward-mode autograd do not see into it, and would silently give a derivative
of 0. A function that reads lengths, or loops over them, cannot become a graph for all lengths. The public functions ask
this module what torch wants of their tensors, and refuse what they cannot give. The names of torch with an underscore
exist in torch 2.11 to 2.13.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.autograd import forward_ad

Derivative = Literal["backward", "torch.func", "forward mode"]

_LACKS: dict[Derivative, str] = {
    "backward": "has no backward",
    "torch.func": "has no derivative in torch.func (grad, vjp, jacrev)",
    "forward mode": "has no derivative in forward mode (torch.func.jvp, jacfwd, dual tensors)",
}
_TRACING = tuple(getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL"))


def derivative_of(*tensors: Tensor | None) -> Derivative | None:
    """Return the kind of derivative that autograd or torch.func follows through these tensors, or None."""
    given = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
    if is_plain():
        return "backward" if wants_gradient(*given) else None
    found = [_derivative(tensor) for tensor in given]
    return next((kind for kind in ("forward mode", "torch.func", "backward") if kind in found), None)


def _derivative(tensor: Tensor) -> Derivative | None:
    if torch.compiler.is_compiling():  # it cannot trace the questions below: inside a dual level all tensors count
        return "forward mode" if is_forward_mode() else "backward" if wants_gradient(tensor) else None
    if not functorch.is_functorch_wrapped_tensor(tensor):
        if is_forward_mode() and _is_dual(tensor):
            return "forward mode"
        return "backward" if wants_gradient(tensor) else None
    if functorch.is_gradtrackingtensor(tensor):
        levels = {each.level(): each.key() for each in functorch.get_interpreter_stack() or ()}
        if levels.get(functorch.maybe_get_level(tensor)) == functorch.TransformType.Jvp:
            return "forward mode"
        if torch.is_grad_enabled():
            return "torch.func"
    return _derivative(functorch.get_unwrapped(tensor))


def is_plain() -> bool:
    """Whether no transform of torch is at work here: no torch.func, no forward mode, no tracing, no dispatch mode."""
    return not (
        torch.compiler.is_compiling()
        or forward_ad._current_level >= 0
        or functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack()
    )


def is_in_memory(x: Tensor) -> bool:
    """Whether the elements of a tensor are what lies at its address: no subclass, and no implied zeros or signs."""
    return type(x) is Tensor and not x.is_neg() and not x._is_zerotensor()


def apart_from(written: Sequence[Tensor], *read: Tensor) -> list[Tensor]:
    """Detach the tensors that are read, and copy each one that shares memory with a tensor that is written."""
    is_known = is_plain()  # else all operations are torch's, which read a tensor before they write
    shares = [is_known and any(torch._C._is_alias_of(x, each) for each in written) for x in read]
    return [x.detach().clone() if shared else x.detach() for x, shared in zip(read, shares, strict=True)]


def is_forward_mode() -> bool:
    """Whether a tensor can have a tangent here, in torch.func.jvp or in a dual level."""
    return forward_ad._current_level >= 0


def _is_dual(tensor: Tensor) -> bool:
    # torch cannot look for the tangent of a batch of gradients (torch.autograd.grad with is_grads_batched=True), so the
    # answer is yes inside a dual level
    return functorch.is_legacy_batchedtensor(tensor) or forward_ad.unpack_dual(tensor).tangent is not None


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd has to follow what is computed from these."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def check_derivative(function: str, *tensors: Tensor | None, remedy: str, has: tuple[Derivative, ...] = ()) -> None:
    """Raise ValueError if torch wants a derivative of `function` that is not among those that it has."""
    wanted = derivative_of(*tensors)
    if wanted is not None and wanted not in has:
        or_none = ", or torch.no_grad()" if wanted == "backward" else ""
        raise ValueError(f"{function} {lacks(wanted)}: use {remedy}{or_none}")


def lacks(derivative: Derivative) -> str:
    """Return a phrase which says that a function does not have this derivative."""
    return _LACKS[derivative]


def is_traced() -> bool:
    """Whether torch records what is computed now, by torch.compile, torch.export, make_fx or fake tensors."""
    return torch.compiler.is_compiling() or any(torch._C._get_dispatch_mode(key) is not None for key in _TRACING)


def has_values(*tensors: Tensor | None) -> bool:
    """Whether the numbers in these tensors can be read now. Traced, fake and batched (vmap) tensors have none."""
    return not is_traced() and not any(
        getattr(tensor, "fake_mode", None) is not None or is_batched(tensor) for tensor in tensors
    )


def is_batched(tensor: Tensor | None) -> bool:
    """Whether this tensor is a batch for vmap, or a batch of gradients."""
    return isinstance(tensor, Tensor) and (
        functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor)
    )


def check_values(function: str, *, remedy: str, **tensors: Tensor | None) -> None:
    """Raise ValueError unless `function` can read the numbers in these tensors."""
    if not has_values(*tensors.values()):
        raise ValueError(
            f"{function} reads the numbers in {' and '.join(tensors)}, which a traced, fake or batched tensor does not "
            f"have: use {remedy}"
        )


def outside_graphs(name: str, *, remedy: str) -> Callable[[Callable], Callable]:
    """Return a decorator for a function whose loops depend on lengths: a graph of it would hold for one length.

    torch.compile leaves the function out of its graphs. fullgraph=True forbids that, and then torch's message has name
    and remedy. torch.export and make_fx with symbolic sizes are refused by a ValueError. The function runs under all
    other transforms as it is.
    """
    why = f"the loops of {name} depend on lengths, and a graph would hold for one length only: use {remedy}"

    def decorate(function: Callable) -> Callable:
        @unseen_by_compiler
        def checked(*args, **kwargs):
            if is_traced() and any(_has_symbolic_sizes(each) for each in (*args, *kwargs.values())):
                raise ValueError(why)
            return function(*args, **kwargs)

        @functools.wraps(function)
        def call(*args, **kwargs):
            if torch.compiler.is_dynamo_compiling():  # torch.compile gives this frame up, and runs it as it is
                raise ValueError(why)
            return checked(*args, **kwargs)

        # These two attributes are what torch.compiler.disable sets. It imports the compiler, which takes seconds.
        call._torchdynamo_disable, call._torchdynamo_disable_msg = True, why
        return call

    return decorate


def _has_symbolic_sizes(value: object) -> bool:
    if isinstance(value, tuple):
        return any(map(_has_symbolic_sizes, value))
    return isinstance(value, Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)


def unseen_by_compiler(function: Callable) -> Callable:
    """Return `function` such that torch.compile does not look into it where it meets it outside of a graph.

    `torch.compiler.disable` does so. It imports the compiler, so it waits until somebody else has imported it.
    """
    unseen: Callable | None = None

    def call(*args, **kwargs):
        nonlocal unseen
        if unseen is None and "torch._dynamo" in sys.modules:
            unseen = torch.compiler.disable(function)
        return (unseen or function)(*args, **kwargs)

    return call
