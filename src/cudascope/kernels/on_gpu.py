"""A compiled kernel on one GPU: loaded and launched through cuda-core, on torch's current stream."""

import ctypes
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from cudascope.arguments.binder import Binder
from cudascope.arguments.launch_shape import MAX_STATIC_SHARED_BYTES, Shape
from cudascope.cpp.source import CompileError
from cudascope.toolchain.nvrtc import Cubin

_thread = threading.local()


class GpuKernel:
    """`cubin` on GPU number `device`, for the parameters of `binder`."""

    def __init__(self, function: str, cubin: Cubin, binder: Binder, device: int) -> None:
        import torch

        try:
            from cuda import core
            from cuda.bindings import driver
        except ImportError as error:
            raise RuntimeError(f"a launch on a GPU needs cuda-core ({error}): pip install 'cudascope[cuda]'") from error
        self._torch, self._driver, self._core = torch, driver, core
        self._function, self._index = function, device
        self._symbols, self._has_structs = cubin.variables, binder.has_structs
        self._static_bytes = cubin.resources.shared_bytes
        with torch.cuda.device(device):
            self._device = self._core.Device(device)
            self._device.set_current()
            self._code = self._core.ObjectCode.from_cubin(cubin.code, name=function)
            self._kernel = self._code.get_kernel(cubin.symbol)
            self._load()
        compiled = [size for _, size in self._kernel.arguments_info]
        if compiled != binder.sizes:
            raise CompileError(
                f"kernel {function}: its parameters were read from the source as {binder.sizes} bytes, but compiled to "
                f"{compiled}: spell their types plainly"
            )
        properties = torch.cuda.get_device_properties(device)
        self._most_bytes = properties.shared_memory_per_block_optin - self._static_bytes
        self._most_threads = self._attribute("CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK")
        self._registers = cubin.resources.registers
        # beyond that, static and dynamic together, shared memory must be opted into, kernel by kernel
        self._opted_bytes = MAX_STATIC_SHARED_BYTES - self._static_bytes
        self._streams: dict[int, Any] = {}
        self._configs: dict[tuple, Any] = {}

    def launch(self, grid: Shape, block: Shape, shared_bytes: int, args: Sequence[Any]) -> None:
        """Put the kernel on torch's current stream of the device. `args` as `Binder.bind` makes them.

        ValueError: more shared memory, or more threads with this kernel's registers, than the GPU has.
        """
        config = self._configs.get((grid, block, shared_bytes)) or self._prepare(grid, block, shared_bytes)
        if self._torch.cuda.current_device() != self._index:
            with self._torch.cuda.device(self._index):
                self._start(config, args)
            return
        if not hasattr(_thread, "has_context"):  # a new thread has no context before torch needs one
            self._device.set_current()
            _thread.has_context = True
        self._start(config, args)

    def _start(self, config: Any, args: Sequence[Any]) -> None:
        if not self._has_structs:
            self._core.launch(self._stream(), config, self._kernel, *args)
            return
        # cuda-core packs no structs; the driver takes every argument by its address
        values = [ctypes.c_void_p(arg) if isinstance(arg, int) else arg for arg in args]
        places = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        stream = self._torch._C._cuda_getCurrentRawStream(self._index)
        shape = (*config.grid, *config.block, config.shmem_size)
        answer = self._driver.cuLaunchKernel(self._handle, *shape, stream, ctypes.addressof(places), 0)
        self._done("launching it", answer)

    def variable(self, name: str) -> Any:
        """The bytes of variable `name`, in place. ValueError if the source has no such variable."""
        if name not in self._symbols:
            known = ", ".join(self._symbols) or "none"
            raise ValueError(f"kernel {self._function}: its file has no variable {name!r} that can be set: {known}")
        with self._torch.cuda.device(self._index):
            found = self._driver.cuLibraryGetGlobal(self._code.handle, self._symbols[name].encode())
        address, size = self._done(f"variable {name}", found)
        memory = {"shape": (size,), "typestr": "|u1", "data": (int(address), False), "version": 2}
        found = SimpleNamespace(__cuda_array_interface__=memory, code=self._code)
        return self._torch.as_tensor(found, device=self._torch.device("cuda", self._index))

    def _stream(self) -> Any:
        """torch's current stream as cuda-core's. Wrapped once each: torch keeps its streams for ever."""
        raw = self._torch._C._cuda_getCurrentRawStream(self._index)
        if raw not in self._streams:
            self._streams[raw] = self._device.create_stream(self._torch.cuda.current_stream(self._index))
        return self._streams[raw]

    def _prepare(self, grid: Shape, block: Shape, shared_bytes: int) -> Any:
        if shared_bytes > self._most_bytes:
            raise ValueError(
                f"kernel {self._function}: shared_bytes = {shared_bytes}, but a thread block of this kernel can have "
                f"at most {self._most_bytes} bytes of dynamic shared memory on "
                f"{self._torch.cuda.get_device_name(self._index)}, beside its own {self._static_bytes} bytes"
            )
        threads = block[0] * block[1] * block[2]
        if threads > self._most_threads:
            raise ValueError(
                f"kernel {self._function}: block {block} has {threads} threads, at most {self._most_threads} can run "
                f"with the {self._registers} registers that each takes"
            )
        if shared_bytes > self._opted_bytes:
            self._attribute("CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", shared_bytes)
            self._opted_bytes = shared_bytes
        if len(self._configs) > 1000:  # grids that follow the input: forget the old ones
            self._configs.clear()
        config = self._core.LaunchConfig(grid=grid, block=block, shmem_size=shared_bytes)
        self._configs[grid, block, shared_bytes] = config
        return config

    def _load(self) -> None:
        """Load the code now: the driver would wait for the first launch, and cannot load while a graph is captured."""
        (self._handle,) = self._done("loading it", self._driver.cuKernelGetFunction(self._kernel.handle))
        self._done("loading it", self._driver.cuFuncLoad(self._handle))

    def _done(self, what: str, answer: tuple) -> tuple:
        """What a function of the driver gives besides its status. RuntimeError if it has failed."""
        status, *values = answer
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"kernel {self._function}: {what} on GPU {self._index}: {status.name}")
        return tuple(values)

    def _attribute(self, name: str, value: int | None = None) -> int:
        """Read, or set to `value`, an attribute of the kernel on this device."""
        driver = self._driver
        which, of = getattr(driver.CUfunction_attribute, name), (self._kernel.handle, driver.CUdevice(self._index))
        if value is not None:
            self._done(name, driver.cuKernelSetAttribute(which, value, *of))
            return value
        return self._done(name, driver.cuKernelGetAttribute(which, *of))[0]
