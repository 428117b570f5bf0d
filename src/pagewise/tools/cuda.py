"""`CudaKernel`: one CUDA C++ source that runs on the device of its tensors.

    scale = CudaKernel("scale.cu", "scale<float, 128>")        # a file in kernels/, a path, or the source itself
    scale[grid, block, shared_bytes](x, n, 0.5)                # tensors, ints, floats, bools, None for a null pointer

On a GPU the source is compiled by NVRTC at the first launch and kept on disk (`PAGEWISE_CACHE` moves it); on the CPU
the same text is compiled by the host's C++ compiler and its threads run as fibers (`tools/simt.py`). On a GPU a launch
goes to torch's current stream, allocates nothing and waits for nothing, so it can be captured in a CUDA graph: capture
after one ordinary launch or `.compile(device)`, since the first one loads the code.

A kernel that is given no tensor at all runs on `best_device()`.
"""

import contextlib
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import pagewise.kernels
from pagewise.tools import simt
from pagewise.tools.cuda_arguments import Binder
from pagewise.tools.cuda_build import included_files
from pagewise.tools.cuda_gpu import GpuKernel
from pagewise.tools.cuda_signature import read_signature
from pagewise.tools.device import best_device
from pagewise.tools.nvrtc import Cubin, Resources, compile_cubin

Shape = tuple[int, int, int]

launched: Counter[str] = Counter()
"""How often each kernel ran in this process, on any device, by its function's name. The test suite reads it."""

MAX_GRID: Shape = (2**31 - 1, 65535, 65535)
MAX_BLOCK: Shape = (1024, 1024, 64)
MAX_THREADS = 1024
CPU_SHARED_BYTES = 227 * 1024
"""The most dynamic shared memory on the CPU: what a thread block can have on an H100. A GPU has its own limit."""


class CudaKernel:
    """A `__global__` function of a CUDA C++ source.

    Args:
        source: a file in `kernels/` ("paged_attention.cu"), any other path, or the source text itself.
        name: the function, or an instantiation of its template: "scale", "softmax<float, 128>".
        defines: "NAME" or "NAME=VALUE", as after the compiler's -D.
        options: "-I<folder>", "--std=c++20"; and for the GPU "--use_fast_math", "--maxrregcount=64", …

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the source has no such kernel, or a parameter of a type that cannot be passed.
    """

    def __init__(
        self, source: str | Path, name: str, *, defines: Sequence[str] = (), options: Sequence[str] = ()
    ) -> None:
        for argument, value in (("defines", defines), ("options", options)):
            if (
                isinstance(value, str)
                or not isinstance(value, Sequence)
                or not all(isinstance(item, str) for item in value)
            ):
                remedy = (
                    f": pass {[f'{key}={item}' for key, item in value.items()]}" if isinstance(value, Mapping) else ""
                )
                raise TypeError(f'{argument} must be a sequence of strings, as in ["A=1", "B"], got {value!r}{remedy}')
        if not isinstance(name, str):
            raise TypeError(f'name must be a string, as in "softmax<float, 128>", got {name!r}')
        self.name, self.defines, self.options = name, tuple(defines), tuple(options)
        path = _find(source)
        self.source = path.read_text() if path else str(source)
        self._include_path = [Path(option[2:].strip()) for option in options if option.startswith("-I")]
        self._folder = path.parent if path else None
        included = included_files(self.source, self._folder, self._include_path)
        everything = "\n".join([*(text for _, text in included), self.source])
        self.function, self.parameters, self._max_threads = read_signature(everything, name, defines)
        self.filename = str(path) if path else f"{self.function}.cu"
        self._binder = Binder(self.function, self.parameters)
        self._on_gpu: dict[int, GpuKernel] = {}
        self._launches: dict[Any, Callable[..., None]] = {}

    def __repr__(self) -> str:
        return f"CudaKernel({self.filename!r}, {self.name!r})"

    # -------------------------------------------------------------------------------------------- launching

    def __getitem__(self, launch: Any) -> Callable[..., None]:
        """`kernel[grid, block]` or `kernel[grid, block, shared_bytes]`: a function of the kernel's arguments.

        `grid` and `block` are ints or tuples of up to three, x first; `shared_bytes` is dynamic shared memory.
        All arguments are passed, by position: C++'s default arguments are not applied.
        """
        key = _typed(launch)
        try:
            return self._launches[key]
        except (KeyError, TypeError):  # not launched so before, or a list where a tuple is meant
            pass
        if not isinstance(launch, tuple) or len(launch) not in (2, 3):
            raise TypeError(
                f"kernel {self.function}: launch as kernel[grid, block] or kernel[grid, block, shared_bytes]"
            )
        grid = self._shape("grid", launch[0], MAX_GRID)
        block = self._shape("block", launch[1], MAX_BLOCK)
        shared_bytes = self._count("shared_bytes", launch[2]) if len(launch) == 3 else 0
        threads, most = block[0] * block[1] * block[2], min(MAX_THREADS, self._max_threads or MAX_THREADS)
        if threads > most:
            why = "its __launch_bounds__" if most < MAX_THREADS else "CUDA's limit"
            raise ValueError(f"kernel {self.function}: block {block} has {threads} threads, at most {most} ({why})")

        def run(*args: object) -> None:
            self._launch(grid, block, shared_bytes, args)

        if len(self._launches) > 1000:  # grids that follow the input: forget the old ones
            self._launches.clear()
        with contextlib.suppress(TypeError):
            self._launches[key] = run
        return run

    def _launch(self, grid: Shape, block: Shape, shared_bytes: int, args: tuple[object, ...]) -> None:
        bound = self._binder.bind(args)
        device = bound.device or best_device()
        if device.type == "cuda":
            kernel = self._on_gpu.get(device.index) or self._load(device)
            kernel.launch(grid, block, shared_bytes, self._binder.carried(bound.values))
        else:
            if shared_bytes > CPU_SHARED_BYTES:
                raise ValueError(
                    f"kernel {self.function}: shared_bytes = {shared_bytes}, but a thread block can have at most "
                    f"{CPU_SHARED_BYTES} bytes of shared memory (an H100's limit, kept on the CPU too)"
                )
            self._on_cpu.launch(grid, block, shared_bytes, self._binder.carried(bound.values), tensors=bound.tensors)
        launched[self.function] += 1

    # -------------------------------------------------------------------------------------------- compiling

    def compile(self, device: torch.device | str = "cpu") -> None:
        """Build, and load, for `device` now: the first launch there then costs what every launch does.

        Raises:
            CompileError: the source does not compile; the message is the compiler's, with file and line.
            RuntimeError: there is no such device, or no compiler for it.
        """
        device = torch.device(device)
        if device.type == "cuda":
            self._load(device)
        elif device.type == "cpu":
            _ = self._on_cpu
        else:
            raise ValueError(f"device must be the CPU or a CUDA GPU, got {device}")

    def resources(self, arch: str = "sm_90") -> Resources:
        """Registers, static shared bytes and spilled bytes when compiled for `arch`: needs NVRTC, but no GPU."""
        return self._cubin(arch).resources

    def _cubin(self, arch: str) -> Cubin:
        return compile_cubin(self.source, self.filename, self._folder, self.name, arch, self.defines, self.options)

    @cached_property
    def _on_cpu(self) -> "simt.CpuKernel":
        # of the options, the host's compiler has a use for the language's version
        options = tuple(re.sub("^--", "-", option) for option in self.options if re.match("--?std=", option))
        include_dirs = tuple(map(str, self._include_path))
        return simt.compile(
            self.source, self.filename, self.name, self.parameters,
            defines=self.defines, options=options, include_dirs=include_dirs,
        )  # fmt: skip

    def _load(self, device: torch.device) -> GpuKernel:
        if not torch.cuda.is_available():
            raise RuntimeError(
                f"kernel {self.function}: asked to run on {device}, but torch finds no GPU on this machine: "
                f"pass CPU tensors to run it here, or compile without running it with .resources(arch)"
            )
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        if device.index not in self._on_gpu:
            major, minor = torch.cuda.get_device_capability(device)
            cubin = self._cubin(f"sm_{major}{minor}")
            self._on_gpu[device.index] = GpuKernel(self.function, cubin, self._binder.sizes, device)
        return self._on_gpu[device.index]

    # -------------------------------------------------------------------------------------------- checks

    def _shape(self, name: str, value: object, limits: Shape) -> Shape:
        sizes = list(value) if isinstance(value, tuple | list) else [value]
        if not 1 <= len(sizes) <= 3:
            raise ValueError(f"kernel {self.function}: {name} must be an int or a tuple of 1 to 3, got {value!r}")
        shape = tuple(self._count(name, size) for size in sizes) + (1,) * (3 - len(sizes))
        if 0 in shape:
            raise ValueError(
                f"kernel {self.function}: {name} must be at least 1 everywhere, got {value!r}: launch nothing"
            )
        if any(size > limit for size, limit in zip(shape, limits, strict=True)):
            raise ValueError(f"kernel {self.function}: {name} must be at most {limits}, got {shape}")
        return shape

    def _count(self, name: str, value: object) -> int:
        try:
            if isinstance(value, bool | torch.Tensor):
                raise TypeError
            count = operator.index(value)
        except TypeError:
            raise TypeError(f"kernel {self.function}: {name} must be made of ints, got {value!r}") from None
        if count < 0:
            raise ValueError(f"kernel {self.function}: {name} must not be negative, got {value!r}")
        return count


def _typed(launch: object) -> object:
    """`launch` as a key that tells 1 from True and 1.0, which are equal and have the same hash."""
    if isinstance(launch, tuple):
        return tuple(map(_typed, launch))
    return launch if type(launch) is int else (type(launch), launch)


def _find(source: str | Path) -> Path | None:
    """The file that `source` names, in kernels/ or anywhere; None if it is the source text itself."""
    if not isinstance(source, str | Path):
        raise TypeError(f"source must be a path or CUDA C++ text, got {type(source).__name__}")
    if isinstance(source, str) and ("\n" in source or "__global__" in source):
        return None
    places = [Path(pagewise.kernels.__file__).parent / source, Path(source)]
    for place in places:
        if place.is_file():
            return place.resolve()
    raise FileNotFoundError(f"source: no file {source} in {places[0].parent} or {Path.cwd()}")
