"""A stub of libcuda.so.1 that is written in Python: cuda-core and Triton's launcher call it as they call the driver.

It keeps contexts (one current per thread), loads machine code, and refuses what a driver refuses. A launch executes
nothing: it is handed to `on_launch` with its parameters as the bytes that the kernel would get.
"""

import atexit
import ctypes
import functools
import os
import struct
import subprocess
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from cudascope.gpus import BY_SM

NUM_DEVICES = 2
CAPABILITY = tuple(map(int, os.environ.get("STUB_CC", "9.0").split(".")))
GPU = BY_SM[10 * CAPABILITY[0] + CAPABILITY[1]]
NAME = f"NVIDIA {GPU.name}"
MOST_GRID, MOST_BLOCK, MOST_THREADS = (2**31 - 1, 65535, 65535), (1024, 1024, 64), 1024
WITHOUT_ASKING = 48 * 1024  # dynamic shared bytes
RESERVED = 1024  # shared bytes that the system takes from each thread block, counted in a cubin's section

# CUresult
SUCCESS, INVALID_VALUE, INVALID_DEVICE, INVALID_CONTEXT, NOT_FOUND = 0, 1, 101, 201, 500
ILLEGAL_ADDRESS, LAUNCH_FAILED, OUT_OF_RESOURCES, CAPTURE_UNSUPPORTED, NOT_SUPPORTED = 700, 719, 701, 900, 801

DEVICE_ATTRIBUTES = {
    1: MOST_THREADS, 2: MOST_BLOCK[0], 3: MOST_BLOCK[1], 4: MOST_BLOCK[2], 5: MOST_GRID[0], 6: MOST_GRID[1],
    7: MOST_GRID[2], 8: WITHOUT_ASKING, 10: 32, 12: 65536, 13: int(GPU.clock / 1000), 16: GPU.num_sms, 36: 3201000,
    37: 6016, 39: GPU.threads_per_sm, 75: CAPABILITY[0], 76: CAPABILITY[1], 81: GPU.shared_bytes_per_sm, 82: 65536,
    95: 1, 97: GPU.shared_bytes, 106: GPU.blocks_per_sm, 115: 1, 120: 1,
}  # fmt: skip


class Code(NamedTuple):
    """The resources of one kernel in a cubin, in bytes, and the registers of a thread."""

    parameters: list[tuple[int, int]]  # offset, size
    registers: int
    local: int  # a thread's stack: what was spilled, above all
    shared: int


class Kernel:
    """A loaded kernel."""

    def __init__(self, name: str, code: Code) -> None:
        self.name, self.code = name, code
        self.most_dynamic = WITHOUT_ASKING - code.shared
        self.loaded = False  # a library's kernels are loaded when they are first needed, which cannot be captured


class Launch(NamedTuple):
    """A launch that the driver received."""

    kernel: Kernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    stream: int
    device: int  # of the current context
    parameters: list[bytes]


class Refused(Exception):
    """Ends a call of the driver with a CUresult."""

    def __init__(self, status: int) -> None:
        self.status = status


on_launch: Callable[[Launch], None] = lambda launch: None  # noqa: E731  replaced by launches.py
is_capturing: Callable[[int], bool] = lambda stream: False  # noqa: E731
device_of_address: Callable[[int], int] = lambda address: -1  # noqa: E731

_objects: dict[int, Any] = {}  # by handle
_thread = threading.local()
_CONTEXTS = 0xC0000


def _handle(thing: Any) -> int:
    handle = 0x1000 + 16 * len(_objects)
    _objects[handle] = thing
    return handle


def _write(address: int, value: int, ctype: type = ctypes.c_uint64) -> None:
    if address:
        ctype.from_address(address).value = value


def _int(value: int) -> int:
    """An `int` argument: of its register, the upper half is undefined."""
    return ctypes.c_int(value).value


# ------------------------------------------------------------------------------------------------ reading a cubin

_FRAME, _PARAMETER, _REGISTERS = 0x11, 0x17, 0x2F  # attributes: of the first and last, the kernel's symbol is given


def read_cubin(address: int) -> dict[str, Code]:
    """The kernels of an ELF file in memory, by name."""
    header = ctypes.string_at(address, 64)
    table, _, _, _, _, size, count, names = struct.unpack_from("<QIHHHHHH", header, 0x28)
    rows = [struct.unpack_from("<IIQQQQIIQQ", ctypes.string_at(address + table + i * size, 64)) for i in range(count)]
    strings = ctypes.string_at(address + rows[names][4], rows[names][5])
    sections = {strings[row[0] : strings.index(b"\0", row[0])].decode(): row for row in rows}

    def content(section: str) -> bytes:
        return ctypes.string_at(address + sections[section][4], sections[section][5]) if section in sections else b""

    symbols = [struct.unpack("<IBBHQQ", entry) for entry in _pieces(content(".symtab"), 24)]
    symbol_names = content(".strtab")
    resources = {}
    for kind, value in _attributes(content(".nv.info")):
        if kind in (_FRAME, _REGISTERS):
            symbol, number = struct.unpack("<II", value)
            start = symbols[symbol][0]
            resources[kind, symbol_names[start : symbol_names.index(b"\0", start)].decode()] = number
    kernels = {}
    for name in (section[6:] for section in sections if section.startswith(".text.")):
        shared = sections.get(f".nv.shared.{name}")
        described = (value for kind, value in _attributes(content(f".nv.info.{name}")) if kind == _PARAMETER)
        parameters = sorted(
            (ordinal, offset, flags >> 18)
            for _, ordinal, offset, flags in (struct.unpack("<IHHI", value) for value in described)
        )
        kernels[name] = Code(
            [(offset, size) for _, offset, size in parameters],
            registers=resources[_REGISTERS, name],
            local=resources.get((_FRAME, name), 0),
            shared=max(0, shared[5] - RESERVED) if shared else 0,
        )
    return kernels


def _pieces(data: bytes, size: int) -> list[bytes]:
    return [data[i : i + size] for i in range(0, len(data), size)]


def _attributes(data: bytes):
    """(kind, value) of the attributes of an .nv.info section that have a value of their own."""
    at = 0
    while at + 4 <= len(data):
        form, kind, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == 4:
            yield kind, data[at : at + size]
            at += size


# ------------------------------------------------------------------------------------------------ the calls

calls: dict[str, Callable[..., None]] = {}


def call(function: Callable[..., None]) -> Callable[..., None]:
    """Make `function` an entry point. It gets its arguments as ints, and raises `Refused`."""
    calls[function.__name__] = function
    return function


for _name in ("cuInit", "cuCtxSynchronize", "cuStreamSynchronize", "cuLibraryUnload", "cuModuleUnload",
              "cuFuncSetCacheConfig", "cuDevicePrimaryCtxRelease", "cuCtxGetLimit", "cuCtxSetLimit"):  # fmt: skip
    calls[_name] = lambda: None


@call
def cuGetExportTable(table, which):
    raise Refused(NOT_SUPPORTED)  # NVRTC asks for it, and takes no for an answer


@call
def cuDriverGetVersion(version):
    _write(version, 13000, ctypes.c_int)


@call
def cuGetErrorString(status, text):
    _write(text, ctypes.addressof(_error_text(_int(status))))


calls["cuGetErrorName"] = cuGetErrorString


@functools.cache
def _error_text(status: int) -> Any:  # kept: the caller gets its address
    return ctypes.create_string_buffer(f"STUB_ERROR_{status}".encode())


@call
def cuDeviceGetCount(count):
    _write(count, NUM_DEVICES, ctypes.c_int)


@call
def cuDeviceGet(device, ordinal):
    if not 0 <= _int(ordinal) < NUM_DEVICES:
        raise Refused(INVALID_DEVICE)
    _write(device, _int(ordinal), ctypes.c_int)


@call
def cuDeviceGetAttribute(value, attribute, device):
    _write(value, DEVICE_ATTRIBUTES.get(_int(attribute), 0), ctypes.c_int)


# ------------------------------------------------------------------------------------------------ contexts


def current_context() -> int:
    """This thread's context, or 0."""
    return getattr(_thread, "context", 0)


def current_device() -> int:
    """The device of this thread's context."""
    if not current_context():
        raise Refused(INVALID_CONTEXT)
    return (current_context() - _CONTEXTS) // 16


def set_current(device: int) -> None:
    """Make the device's context this thread's."""
    _thread.context = _CONTEXTS + 16 * device


@call
def cuDevicePrimaryCtxRetain(context, device):
    _write(context, _CONTEXTS + 16 * _int(device))


@call
def cuCtxGetCurrent(context):
    _write(context, current_context())


@call
def cuCtxSetCurrent(context):
    _thread.context = context


@call
def cuPointerGetAttribute(value, attribute, address):
    if device_of_address(address) < 0:
        raise Refused(INVALID_VALUE)
    _write(value, address)


# ------------------------------------------------------------------------------------------------ kernels


@call
def cuLibraryLoadData(library, image):
    current_device()  # needs a context
    _write(library, _handle({name: _handle(Kernel(name, code)) for name, code in read_cubin(image).items()}))


calls["cuModuleLoadData"] = cuLibraryLoadData


@call
def cuLibraryGetKernel(kernel, library, name):
    kernels = _objects[library]
    name = ctypes.string_at(name).decode()
    if name not in kernels:
        raise Refused(NOT_FOUND)
    _write(kernel, kernels[name])


calls["cuModuleGetFunction"] = cuLibraryGetKernel


@call
def cuKernelGetFunction(function, kernel):
    current_device()
    _write(function, kernel)


@call
def cuFuncLoad(function):
    current_device()
    _objects[function].loaded = True


@call
def cuKernelGetParamInfo(kernel, index, offset, size):
    parameters = _objects[kernel].code.parameters
    if index >= len(parameters):
        raise Refused(INVALID_VALUE)
    _write(offset, parameters[index][0])
    _write(size, parameters[index][1])


calls["cuFuncGetParamInfo"] = cuKernelGetParamInfo


@call
def cuFuncGetAttribute(value, attribute, function):
    kernel = _objects[function]
    registers = max(1, kernel.code.registers)
    known = {0: min(MOST_THREADS, 65536 // registers // 32 * 32), 1: kernel.code.shared, 3: kernel.code.local,
             4: registers, 8: kernel.most_dynamic}  # fmt: skip
    _write(value, known.get(_int(attribute), 0), ctypes.c_int)


@call
def cuKernelGetAttribute(value, attribute, kernel, device):
    cuFuncGetAttribute(value, attribute, kernel)


@call
def cuFuncSetAttribute(function, attribute, value):
    kernel = _objects[function]
    if _int(attribute) == 8:
        if _int(value) + kernel.code.shared > GPU.shared_bytes:
            raise Refused(INVALID_VALUE)
        kernel.most_dynamic = _int(value)


@call
def cuKernelSetAttribute(attribute, value, kernel, device):
    cuFuncSetAttribute(kernel, attribute, value)


@call
def cuLaunchKernelEx(config, function, parameters, extra):
    numbers = struct.unpack("<7I4xQ", ctypes.string_at(config, 40))
    _launch(function, numbers[:3], numbers[3:6], *numbers[6:], parameters)


@call
def cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared, stream, parameters):
    gx, gy, gz, bx, by, bz, shared = (_int(x) for x in (gx, gy, gz, bx, by, bz, shared))
    _launch(function, (gx, gy, gz), (bx, by, bz), shared, stream, parameters)


def _launch(function: int, grid: tuple, block: tuple, shared: int, stream: int, parameters: int) -> None:
    device, kernel = current_device(), _objects[function]
    threads = block[0] * block[1] * block[2]
    fits = all(1 <= n <= most for n, most in zip(grid + block, MOST_GRID + MOST_BLOCK, strict=True))
    if not fits or threads > MOST_THREADS or shared > kernel.most_dynamic:
        raise Refused(INVALID_VALUE)
    if threads * kernel.code.registers > 65536:
        raise Refused(OUT_OF_RESOURCES)
    if is_capturing(stream) and not kernel.loaded:
        raise Refused(CAPTURE_UNSUPPORTED)
    kernel.loaded = True
    places = (ctypes.c_uint64 * len(kernel.code.parameters)).from_address(parameters) if parameters else []
    given = [ctypes.string_at(at, size) for at, (_, size) in zip(places, kernel.code.parameters, strict=True)]
    on_launch(Launch(kernel, grid, block, shared, stream, device, given))


# ------------------------------------------------------------------------------------------------ the shared library

_ARGUMENTS = 12
_SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
typedef unsigned long long U;
static int (*answer)(const char *, U *);
static int unknown() { return 801; }
void stub_answer(int (*f)(const char *, U *)) { answer = f; }
int cuGetProcAddress_v2(const char *name, void **found, int version, U flags, int *status) {
  Dl_info here;
  dladdr((void *)stub_answer, &here);
  *found = dlsym(dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD), name);
  if (!*found) *found = (void *)unknown;
  if (status) *status = 0;
  return 0;
}
int cuGetProcAddress(const char *name, void **found, int version, U flags) {
  return cuGetProcAddress_v2(name, found, version, flags, 0);
}
"""


def library_source() -> str:
    """The C of libcuda.so.1: each entry point, under each version's name, asks Python."""
    declared = ", ".join(f"U a{i}" for i in range(_ARGUMENTS))
    passed = ", ".join(f"a{i}" for i in range(_ARGUMENTS))
    entries = (
        f'int {name}{version}({declared}) {{ U a[] = {{{passed}}}; return answer ? answer("{name}", a) : 4; }}'
        for name in sorted(calls)
        for version in ("", "_v2", "_v3", "_ptsz")
    )
    return _SOURCE + "\n".join(entries)


_arity = {name: function.__code__.co_argcount for name, function in calls.items()}
LOG = os.environ.get("STUB_LOG")


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint64))
def _answer(name: bytes, arguments: Any) -> int:
    name = name.decode()
    try:
        calls[name](*arguments[: _arity[name]])
        status = SUCCESS
    except Refused as refused:
        status = refused.status
    except BaseException:  # nothing may be raised into the C that called
        traceback.print_exc()
        status = LAUNCH_FAILED
    if LOG:
        print(f"{name}({', '.join(map(hex, arguments[: _arity[name]]))}) -> {status}", flush=True)
    return status


def install(folder: Path) -> None:
    """Load the library, so that a later search for the driver finds it."""
    source, library = folder / "stub.c", folder / "libcuda.so.1"
    if not library.exists():
        source.write_text(library_source())
        subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", source, "-o", library, "-ldl"],
                       check=True)  # fmt: skip
        (folder / "libcuda.so").symlink_to(library.name)
    loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    loaded.stub_answer(_answer)
    atexit.register(loaded.stub_answer, None)  # cuda-core gives back its contexts when Python is gone
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
