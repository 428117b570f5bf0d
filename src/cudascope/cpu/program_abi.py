"""The structures that Python and the API of programs exchange, as cpu/api and simt/api.h declare them."""

import ctypes
from collections.abc import Callable

from cudascope.cpu.abi import structures
from cudascope.toolchain.headers import API, HEADERS

(KernelRow,) = structures(HEADERS / "simt" / "api.h", "KernelRow")
(VariableRow,) = structures(API / "copies.h", "Variable")
AllocationRow, _, LaunchRow, Callbacks = structures(API / "state.h", "AllocationRow|Mark|LaunchRow|Callbacks")

_INT, _KERNEL = ctypes.POINTER(ctypes.c_int), ctypes.POINTER(KernelRow)
_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(LaunchRow))
_FIND = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64)
_ATTRIBUTES = ctypes.CFUNCTYPE(ctypes.c_int, _KERNEL, _INT, _INT)


def callbacks(launch: Callable, find: Callable, kernel_attributes: Callable) -> Callbacks:
    """The functions of Python that the API calls, and that live as long as the structure."""
    functions = _LAUNCH(launch), _FIND(find), _ATTRIBUTES(kernel_attributes)
    made = Callbacks(*(ctypes.cast(each, ctypes.c_void_p) for each in functions))
    made.functions = functions
    return made
