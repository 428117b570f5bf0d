"""Kernels with a mistake that an argument switches on: what a checked launch says of it, and what its twin computes.

In the .cu file the lines in which the mistake shows end in `// BUG <kernel>`; the kernel's last parameter is `planted`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import cudascope
from cudascope import CudaKernel

SCHEDULES = (None, *range(20))


class Planted(NamedTuple):
    """A kernel of `file`: `make()` gives its arguments but the last, and which of them shall become what."""

    what: str  # Finding.what
    launch: tuple
    make: Callable[[], tuple[tuple, Tensor, Tensor]]
    tensor: str | None = None


def marked_lines(file: Path, name: str) -> list[int]:
    lines = file.read_text().splitlines()
    return [number for number, line in enumerate(lines, 1) if line.endswith(f"// BUG {name}")]


def assert_found(file: Path, name: str, bug: Planted, seed: int | None) -> None:
    args, _, _ = bug.make()
    with pytest.raises(cudascope.Finding) as caught, cudascope.check(schedule=seed):
        CudaKernel(file, name)[bug.launch](*args, True)
    error = caught.value
    assert error.what == bug.what, str(error)
    assert error.line in marked_lines(file, name), str(error)
    assert error.tensor == bug.tensor, str(error)


def assert_twin_is_clean(file: Path, name: str, bug: Planted) -> None:
    """Under every schedule, and in a plain launch."""
    kernel = CudaKernel(file, name)
    for seed in SCHEDULES:
        args, out, expected = bug.make()
        with cudascope.check(schedule=seed):
            kernel[bug.launch](*args, False)
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
    args, out, expected = bug.make()
    kernel[bug.launch](*args, False)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
