"""The kernels in C++ for a CPU, compiled by g++ for the instructions that torch uses on this machine."""

import ctypes
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any

import torch

from cudascope import CompileError
from cudascope.toolchain.compiler import cached_library

MACHINES = {"AVX512": "x86-64-v4", "AVX2": "x86-64-v3"}  # by torch's name for the instructions that it uses
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}  # of the dtypes that kernels take
WIDTH = 16  # elements of a vector, of which the last axis of a tensor is a multiple


class CTensor(ctypes.Structure):
    """`struct Tensor` of kernels/vectors.h: an address, and the strides of three axes in elements."""

    _fields_ = (("data", ctypes.c_void_p), ("strides", ctypes.c_int64 * 3))


def functions(file: str, **argtypes: Sequence[Any]) -> dict[tuple[str, torch.dtype], Callable]:
    """Return the functions of a file of kernels/ by name and dtype: `attend_float32` is at ("attend", torch.float32).

    The file is compiled when it is first needed, and kept where cudascope keeps its kernels. A machine
    without g++, without the instructions or without torch's OpenMP has no functions.
    """
    machine = MACHINES.get(torch.backends.cpu.get_cpu_capability())
    if machine is None:
        return {}
    source = files("pagewise.kernels") / file
    try:
        # it is linked without OpenMP and finds torch's when it is loaded: a second one would have its own threads
        library = ctypes.CDLL(str(cached_library(source, ["-std=c++17", "-O3", f"-march={machine}", "-fopenmp"])))
    except (CompileError, OSError):
        return {}
    found = {(name, dtype): library[f"{name}_{NAMES[dtype]}"] for name in argtypes for dtype in NAMES}
    for (name, _), function in found.items():
        function.argtypes = argtypes[name]
    return found
