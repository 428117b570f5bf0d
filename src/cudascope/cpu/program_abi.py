"""The structures that Python and cpu/api exchange, as cpu/api/state.h and cpu/include/simt/api.h declare them."""

import ctypes


class KernelRow(ctypes.Structure):
    """A kernel of a program: its function, how it is called, and its parameters."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("call", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("num_parameters", ctypes.c_uint32),
        ("sizes", ctypes.POINTER(ctypes.c_uint32)),
        ("granules", ctypes.POINTER(ctypes.c_uint32)),
    )


class AllocationRow(ctypes.Structure):
    """Memory that a program has allocated. `site` and `freed` are return addresses."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("start", "bytes", "site", "freed")),
        *((name, ctypes.c_uint32) for name in ("kind", "granule", "number", "is_pending")),
    )


class MarkRow(ctypes.Structure):
    """Memory that the host has filled."""

    _fields_ = (("start", ctypes.c_uint64), ("bytes", ctypes.c_uint64))


class LaunchRow(ctypes.Structure):
    """A launch as the program asks for it."""

    _fields_ = (
        ("kernel", ctypes.POINTER(KernelRow)),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint64),
        ("most_shared", ctypes.c_uint64),
        ("is_cooperative", ctypes.c_uint32),
        ("number", ctypes.c_uint32),
        ("file", ctypes.c_char_p),
        ("line", ctypes.c_uint64),
        ("site", ctypes.c_uint64),
        ("allocations", ctypes.POINTER(AllocationRow)),
        ("num_allocations", ctypes.c_uint64),
        ("marks", ctypes.POINTER(MarkRow)),
        ("num_marks", ctypes.c_uint64),
    )


LAUNCH_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(LaunchRow))
FIND_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64)
ATTRIBUTES_CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(KernelRow), ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int)
)


class Callbacks(ctypes.Structure):
    """The functions of Python that cpu/api calls."""

    _fields_ = (("launch", LAUNCH_CALLBACK), ("find", FIND_CALLBACK), ("kernel_attributes", ATTRIBUTES_CALLBACK))


class VariableRow(ctypes.Structure):
    """A variable of the device."""

    _fields_ = (("name", ctypes.c_char_p), ("address", ctypes.c_void_p), ("bytes", ctypes.c_uint64))
