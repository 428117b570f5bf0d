"""Launches of Triton kernels: what a kernel's arguments become, and the memory that it asks for."""

import contextvars

import torch
import triton

from pagewise.tools.launch import launch


class Kernel:
    """Notes its launches, and asks Triton's allocator for memory as a kernel that makes tensor descriptors does."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        def run(**arguments):
            from triton.runtime import _allocation

            self.launches.append((grid, arguments, _allocation._allocator.get()(384, 128, None)))

        return run


def test_scratch_memory_is_torchs_and_the_allocator_of_the_caller_stays():
    def run():
        triton.set_allocator(of_caller)
        launch(kernel, (1,), x=torch.zeros(3), scratch=True)
        launch(kernel, (1,), x=torch.zeros(3))

    def of_caller(size, alignment, stream):
        return "memory of the caller"

    kernel = Kernel()
    contextvars.copy_context().run(run)
    with_scratch, without = (buffer for _, _, buffer in kernel.launches)
    assert with_scratch.shape == (384,)
    assert without == "memory of the caller"
