"""The properties of a GPU that a launch depends on: compute capability, shared memory, number of SMs."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from cudascope.gpus import BY_SM, SHARED_BYTES


class Architecture(NamedTuple):
    """The properties of a GPU that decide how kernels are launched on it."""

    sm: int  # compute capability · 10, such as 75, 80 or 120; 0 on a CPU, where kernels are interpreted
    shared_bytes: int  # of a thread block, at most (`shared_memory_per_block_optin`)
    num_sms: int

    @property
    def has_triton_tensor_cores(self) -> bool:
        """Whether Triton multiplies matrices on tensor cores. Triton 3.6 and 3.7 do not on sm_75 (T4)."""
        return self.sm >= 80

    @property
    def has_bfloat16(self) -> bool:
        """Whether the GPU computes with bfloat16."""
        return self.sm >= 80


CPU = Architecture(sm=0, shared_bytes=2**31 - 1, num_sms=1)


def architecture(device: torch.device) -> Architecture:
    """Return the architecture of `device`. On the CPU, `cudascope.triton_compiled` may name a GPU instead."""
    return _of_gpu(device) if device.type == "cuda" else compiled_for() or CPU


# torch.compile, which does not see through a cache, takes the architecture for a constant.
# `torch.compiler.assume_constant_result` does the same, but first imports torch._dynamo: that takes a second or two.
architecture._dynamo_marked_constant = True


def compiled_for() -> Architecture | None:
    """Return the GPU that `cudascope.triton_compiled` compiles Triton kernels for. Outside of it, return None."""
    if torch.compiler.is_dynamo_compiling():  # torch.compile cannot trace a context variable
        return None
    target = _triton_target()()
    return None if target is None else _of_target(target.sm)


@functools.cache
def _triton_target() -> Callable:
    from cudascope.triton.launches import triton_target  # not before it is needed: it imports what runs PTX

    return triton_target


@functools.cache
def _of_target(sm: int) -> Architecture:
    return Architecture(sm, SHARED_BYTES[sm], BY_SM[sm].num_sms)


@functools.cache
def _of_gpu(device: torch.device) -> Architecture:
    properties = torch.cuda.get_device_properties(device)
    sm = 10 * properties.major + properties.minor
    return Architecture(sm, properties.shared_memory_per_block_optin, properties.multi_processor_count)
