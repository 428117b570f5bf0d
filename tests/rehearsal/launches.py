"""Launches that reach the stub driver: held against what the caller passed, then given their effect on the host.

A CUDA kernel runs as fibers on the CPU, with the very bytes that the driver got. A Triton kernel, compiled for the GPU
and launched by Triton's own launcher, runs in Triton's interpreter. With STUB_TRITON=compiled, cudascope executes the
PTX of the kernel instead, with the bytes that the driver got.
"""

import contextlib
import ctypes
import functools
import inspect
import os
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rehearsal import driver, machine

counted: Counter[str] = Counter()
"""Launches that were compared and run: "CUDA", "Triton", and of the latter "PTX", whose PTX was executed."""


EXECUTES_PTX = os.environ.get("STUB_TRITON") == "compiled"


class Built(NamedTuple):
    """The resources of a kernel that Triton compiled. Spills are bytes per thread; shared memory is per block."""

    registers: int
    spilled: int
    shared: int
    variant: str  # the types of its tensors and its constants


built: dict[tuple[str, str], Built] = {}
"""By the kernel's name and the hash of what it was compiled from."""

_thread = threading.local()


@contextlib.contextmanager
def _seen():
    """The launches of this thread that reach the driver inside."""
    outer, _thread.seen = getattr(_thread, "seen", None), []
    try:
        yield _thread.seen
    finally:
        _thread.seen = outer


def _note(launch: driver.Launch) -> None:
    if getattr(_thread, "seen", None) is not None:
        _thread.seen.append(launch)


def check(launch: driver.Launch, meant: list[tuple[str, Any, torch.dtype | None]]) -> None:
    """Hold what the driver got against what was meant: a name, a value and, of a fraction, its dtype, each."""
    name = launch.kernel.name
    current = torch._C._cuda_getCurrentRawStream(launch.device)
    assert launch.stream == current, f"{name}: launched on stream {launch.stream:#x}, current is {current:#x}"
    for (what, value, dtype), (_, size), got in zip(
        meant, launch.kernel.code.parameters, launch.parameters, strict=False
    ):
        want = _packed(value, dtype, size)
        assert got == want, f"{name}: {what} = {value!r} reached the driver as {got.hex()}, not {want.hex()}"
        if isinstance(value, Tensor) and value.numel():
            lies_on = driver.device_of_address(value.data_ptr())
            assert lies_on == launch.device, f"{name}: {what} is {value.device} memory, launched on GPU {launch.device}"


def _packed(value: Any, dtype: torch.dtype | None, size: int) -> bytes:
    """The bytes of a parameter, from nothing but the value and what the compiled kernel takes."""
    if isinstance(value, Tensor):
        value = value.data_ptr()
    if dtype is not None:
        return bytes(torch.tensor([value], dtype=dtype).view(torch.uint8).tolist())
    return int(value or 0).to_bytes(size, "little", signed=(value or 0) < 0)


# ------------------------------------------------------------------------------------------------ CUDA

_CARRIERS = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64}


def watch_cuda() -> None:
    """Compare and run what `CudaKernel` launches on a GPU. After pagewise's modules may be imported."""
    from cudascope import CudaKernel
    from cudascope.arguments.arrays import as_array
    from cudascope.cpp.types import FLOATS

    real = CudaKernel._launch

    def launch(self, shape, args):
        with _seen() as seen:
            real(self, shape, args)
        for got in seen:
            assert (got.grid, got.block, got.shared) == shape, f"launched as {got}, not as {shape}"
            meant = zip(self.parameters, args, strict=True)
            dtypes = {p.name: getattr(torch, FLOATS[p.ctype]) for p in self.parameters if p.ctype in FLOATS}
            check(got, [(p.name, arg, None if p.pointer else dtypes.get(p.name)) for p, arg in meant])
            given = [
                int.from_bytes(raw, "little") if p.pointer else _CARRIERS[len(raw)].from_buffer_copy(raw)
                for p, raw in zip(self.parameters, got.parameters, strict=True)
            ]
            named = zip(self.parameters, args, strict=True)
            arrays = {p.name: as_array(arg) for p, arg in named if isinstance(arg, Tensor)}
            machine.happens(got.stream, partial(self._on_cpu.launch, *shape, given, arrays=arrays))
            counted["CUDA"] += 1

    CudaKernel._launch = launch


# ------------------------------------------------------------------------------------------------ Triton


def watch_triton() -> None:
    """Compare, measure and interpret what Triton launches."""
    from triton.runtime.jit import JITFunction

    real = JITFunction.run

    def run(self, *args, grid, warmup, **kwargs):
        with _seen() as seen:
            compiled = real(self, *args, grid=grid, warmup=warmup, **kwargs)
        for got in seen:
            bound = inspect.signature(self.fn).bind(*args, **{k: v for k, v in kwargs.items() if k in self.arg_names})
            bound.apply_defaults()
            meant = list(_leaves(compiled.src.signature, bound.arguments))
            check(got, [(name, value, _FRACTIONS.get(kind)) for name, kind, value in meant if kind != "constexpr"])
            constants = {name: value for name, kind, value in meant if kind == "constexpr" and "." not in name}
            types = {name.removesuffix(".0"): kind for name, kind, _ in meant if kind.startswith("*")}
            built[self.fn.__name__, compiled.hash] = Built(
                got.kernel.code.registers,
                got.kernel.code.local,
                compiled.metadata.shared,
                " ".join(f"{n}={value}" for n, value in (types | constants).items()),
            )
            effect = partial(_execute, compiled, got) if EXECUTES_PTX else partial(_interpret, self, got.grid)
            machine.happens(got.stream, partial(effect, bound.arguments))
            counted["Triton"] += 1
        return compiled

    JITFunction.run = run
    JITFunction.__call__ = _call


def _execute(compiled: Any, launch: driver.Launch, _: dict[str, Any]) -> None:
    """Execute the PTX of a Triton kernel on the memory of its tensors, which are on the host in truth.

    A captured graph keeps the arguments, and with them this memory.
    """
    kernel = _ptx_kernel(compiled.asm["ptx"])
    given = [
        struct.unpack("f", raw)[0] if parameter.type == "f32" else int.from_bytes(raw, "little")
        for parameter, raw in zip(kernel.entry.parameters, launch.parameters, strict=True)
    ]
    kernel[launch.grid, launch.block, launch.shared](*given)
    counted["PTX"] += 1


@functools.cache
def _ptx_kernel(text: str) -> Any:
    from cudascope import PtxKernel  # not sooner: conftest.py first says how modules are to be imported

    return PtxKernel(text)


def _leaves(signature: dict[str, Any], arguments: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(name, type, value) of each parameter of the compiled kernel; a tuple's entries are named q.0, q.1, ..."""
    for name, kind in signature.items():
        yield from _leaves_of(name, kind, arguments[name])


def _leaves_of(name: str, kind: Any, value: Any) -> Iterator[tuple[str, str, Any]]:
    if isinstance(kind, tuple):
        for i, (one, part) in enumerate(zip(kind, value, strict=True)):
            yield from _leaves_of(f"{name}.{i}", one, part)
    else:
        yield name, kind, value


_FRACTIONS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
_WIDER = {torch.bfloat16: torch.float32, torch.float8_e4m3fn: torch.float16, torch.float8_e5m2: torch.float16}
_FEW_BYTES = 1 << 28
_interpreter = threading.RLock()


def _interpret(kernel: Any, grid: tuple[int, int, int], arguments: dict[str, Any]) -> None:
    """Run a Triton kernel in the interpreter, on the memory of its tensors.

    The interpreter rounds bfloat16 wrongly, so the kernel gets a float32 copy, whose changes are written back. The
    interpreter misreads the NaN of float8, which no kernel writes, so the kernel gets a float16 copy of small caches.
    """
    from triton.runtime.interpreter import GridExecutor, InterpretedFunction

    from pagewise.tools.triton_interpreter import spare_the_interpreter  # not sooner, as in _ptx_kernel

    spare_the_interpreter()
    flat, wide = {}, {}

    def on_host(value: Any) -> Any:
        if isinstance(value, tuple):
            fields = map(on_host, value)
            return type(value)._make(fields) if hasattr(value, "_make") else tuple(fields)
        if not isinstance(value, Tensor):
            return value
        storage = value.untyped_storage()
        key = storage.data_ptr(), value.dtype
        if key not in flat:
            size = storage.nbytes() // value.itemsize * value.itemsize
            memory = (ctypes.c_char * size).from_address(key[0]) if size else b""
            flat[key] = torch.frombuffer(memory, dtype=value.dtype) if size else torch.empty(0, dtype=value.dtype)
            if value.dtype in _WIDER and (size < _FEW_BYTES or value.dtype == torch.bfloat16):
                wide[key] = flat[key].to(_WIDER[value.dtype])
        return wide.get(key, flat[key]).as_strided(value.shape, value.stride(), value.storage_offset())

    with _interpreter:
        arguments = {name: on_host(value) for name, value in arguments.items()}
        before = {key: tensor.clone() for key, tensor in wide.items() if tensor.dtype == torch.float32}
        GridExecutor(InterpretedFunction(kernel.fn).rewrite(), kernel.arg_names, grid)(**arguments)
        for key, old in before.items():
            changed = wide[key].view(torch.int32) != old.view(torch.int32)
            flat[key][changed] = _narrow(wide[key][changed])


def _narrow(x: Tensor) -> Tensor:
    """As bfloat16; what was bfloat16 before keeps its bits, a NaN's too."""
    bits = x.view(torch.int32)
    return torch.where(bits & 0xFFFF == 0, (bits >> 16).short().view(torch.bfloat16), x.bfloat16())


def _call(self, *args, **kwargs):
    """A `@triton.jit` function called by one that is interpreted."""
    from triton.runtime.interpreter import InterpretedFunction, _patch_lang

    scope = _patch_lang(self.fn)
    try:
        return InterpretedFunction(self.fn).rewrite()(*args, **kwargs)
    finally:
        scope.restore()


def install() -> None:
    driver.on_launch = _note
    watch_triton()


def summary() -> str:
    """Summarise the launches of this process and of the processes that reported their counts."""
    major, minor = driver.CAPABILITY
    registers, spilled, shared = (max((b[i] for b in built.values()), default=0) for i in range(3))
    return (
        f"rehearsed for sm_{major}{minor}: {counted['CUDA']} CUDA and {counted['Triton']} Triton launches compared and "
        f"run, {counted['PTX']} of them executed as PTX; {len(built)} kernels built by Triton, at most {registers} "
        f"registers, {shared} shared and {spilled} spilled bytes"
    )
