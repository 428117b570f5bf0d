"""`CudaKernel`: one CUDA C++ source that runs on the device of its tensors.

    scale = CudaKernel("scale.cu", "scale<float, 128>")        # a path, or the source itself
    scale[grid, block, shared_bytes](x, n, 0.5)                # tensors, ints, floats, … (see arguments/binder.py)
    scale.variable("weights").copy_(w)                         # a __constant__ or __device__ variable

The source may have `main`, `<<<…>>>` and torch's headers. Host code is never compiled. A line that needs a missing
header stops the kernel at that line. On a GPU, NVRTC compiles the source at the first launch, and the result is kept on
disk. Such a launch uses torch's current stream, allocates no memory and does not synchronise, so a CUDA graph can
capture it after one ordinary launch, or after `.compile(device)`, has loaded the code.

A kernel without an array argument runs on the device of the memory that `reachable` names. If there is no such memory,
torch's current GPU runs the kernel. A machine without a GPU uses its CPU.
"""

import contextlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from cudascope.arguments.binder import Binder
from cudascope.arguments.launch_shape import LaunchShape, read_launch
from cudascope.arguments.reach import reached_device
from cudascope.arguments.values import is_understood
from cudascope.cpp.file import File, Kernel, read
from cudascope.cpp.signature import Parameter, Signature, base_name, read_signature, type_of
from cudascope.cpp.source import CompileError, Source, read_source, source_path
from cudascope.cpp.tokens import tokens_of
from cudascope.cpp.variables import as_declared
from cudascope.cpu.build import build, entry_symbol, own_text
from cudascope.cpu.executable import executable_of
from cudascope.cpu.library import ParameterType
from cudascope.kernels.on_cpu import CpuKernel
from cudascope.kernels.on_gpu import GpuKernel
from cudascope.kernels.ptx import executable_through_ptx
from cudascope.toolchain.nvrtc import Cubin, check_options, compile_cubin
from cudascope.toolchain.ptxas import Resources, check_arch
from cudascope.toolchain.sass import SassLoop, loops_of_cubin


def read_kernel(source: Source, name: str) -> tuple[Signature, File]:
    """The signature of kernel `name` of `source`, as far as the text tells, and the file that declares the kernel.

    The preprocessor shows a kernel that a macro makes, and one that is under a condition. Only the host's compiler
    knows the size of a struct and the meaning of a trait: `completed`. ValueError: the source has no such kernel, or
    several.
    """
    file = source.read()
    try:
        return read_signature(file, name), file
    except ValueError as unread:
        try:
            file = read(own_text(source), source.defines)
        except CompileError:  # no compiler, or one that refuses even this
            raise unread from None
        return read_signature(file, name), file


def completed(source: Source, name: str, parameters: Sequence[Parameter]) -> tuple[Parameter, ...]:
    """The `parameters` of kernel `name`, with sizes and types that only the host's compiler can tell (CompileError)."""
    if all(map(is_understood, parameters)):
        return tuple(parameters)
    types = build(source, name, instrumented=False).parameters(entry_symbol(name))
    return tuple(_completed(*both) for both in zip(parameters, types, strict=True))


def declared_kernels(source: Source) -> list[Kernel]:
    """The kernels that the text of `source` declares, and with them those that its macros make."""
    file = read(source.text, None)
    if file.kernels and not any("__global__" in macro.body for macro in file.macros):
        return file.kernels
    return read(own_text(source), None).kernels


def _completed(parameter: Parameter, known: ParameterType) -> Parameter:
    if is_understood(parameter):
        return parameter
    ctype, pointer, const = type_of(tokens_of(known.spelled))
    if pointer and not known.bytes:  # a handle, for example
        ctype = "void"
    plain = parameter._replace(ctype=ctype, pointer=pointer, const=const)
    return plain if is_understood(plain) else plain._replace(bytes=known.bytes, alignment=known.alignment)


_DEFINE = re.compile(r"[A-Za-z_]\w*(\([\w\s,.]*\))?(=.*)?", re.DOTALL)


class CudaKernel:
    """A `__global__` function of a CUDA C++ source.

    Args:
        source: a file (a relative path is looked up from the current folder), or the source text itself.
        name: the function, an instantiation of its template, or one of several of its name: "scale",
            "softmax<float, 128>", "scale(float*, int)".
        defines: "NAME" or "NAME=VALUE", as after the compiler's -D.
        options: "-I<folder>", "--std=c++20"; and for NVRTC "--use_fast_math", "--maxrregcount=64", …
        through: what the CPU executes. "c++" is the host compiler's code for the source. "ptx" is NVRTC's PTX of the
            kernel, with its fused multiply-adds, approximate functions and order of accesses.
        arch: the GPU for which NVRTC compiles this PTX.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the source has no such kernel, a parameter has a type that cannot be passed, or an option or
            `through` is not known.
        CompileError: through="ptx", and NVRTC refuses the source, or the CPU runner does not execute an instruction.
        RuntimeError: through="ptx", and cuda-bindings or NVRTC is not installed.
    """

    def __init__(
        self,
        source: str | Path,
        name: str,
        *,
        defines: Sequence[str] = (),
        options: Sequence[str] = (),
        through: str = "c++",
        arch: str = "sm_80",
    ) -> None:
        _check_strings("defines", defines)
        if wrong := [define for define in defines if not _DEFINE.fullmatch(define)]:
            raise ValueError(f'defines: {wrong[0]!r} is neither "NAME" nor "NAME=VALUE"')
        _check_strings("options", options)
        check_options(options)
        if not isinstance(name, str):
            raise TypeError(f'name must be a string, as in "softmax<float, 128>", got {name!r}')
        check_arch(arch)
        if through not in ("c++", "ptx"):
            raise ValueError(f'through must be "c++" or "ptx", got {through!r}')
        path = source_path(source)
        text = read_source(path) if path else str(source).removeprefix("\ufeff")
        folder = path.parent if path else Path.cwd()
        self.name = name
        filename = str(path) if path else f"{base_name(name)}.cu"
        options = [f"-I{Path(each[2:].strip()).absolute()}" if each.startswith("-I") else each for each in options]
        source = Source(text, filename, folder, tuple(defines), tuple(options))
        self.source = source if path else _with_name_of_its_own(source)
        self._signature, self._file = read_kernel(self.source, name)
        self.function = self._signature.function
        self._on_gpu: dict[int, GpuKernel] = {}  # by the index of the GPU
        self._launches: dict[Any, Callable[..., None]] = {}
        self._through, self._arch = through, arch
        if through == "ptx":  # refuse now what cannot be executed
            _ = self._on_cpu

    def __repr__(self) -> str:
        return f"CudaKernel({self.source.filename!r}, {self.name!r})"

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """The kernel's parameters. Where the source does not tell a type, as of a struct, the compiler is asked once.

        Raises:
            CompileError: the compiler is asked, and it refuses the source.
        """
        return completed(self.source, self.name, self._signature.parameters)

    @cached_property
    def _binder(self) -> Binder:
        return Binder(self.function, self.parameters)

    def __getitem__(self, launch: Any) -> Callable[..., None]:
        """`kernel[grid, block]` or `kernel[grid, block, shared_bytes]`: a function of the kernel's arguments.

        `grid` and `block` are ints or tuples of up to three, x first; `shared_bytes` is dynamic shared memory.
        Arguments are passed by position; trailing ones that have a default in C++ may be left out.
        """
        key = _typed(launch)
        try:
            return self._launches[key]
        except (KeyError, TypeError):  # not launched so before, or a list where a tuple is meant
            pass
        shape = read_launch(self.function, launch, self._signature.max_threads)

        def run(*args: object) -> None:
            self._launch(shape, args)

        if len(self._launches) > 1000:  # grids that follow the input: forget the old ones
            self._launches.clear()
        with contextlib.suppress(TypeError):
            self._launches[key] = run
        return run

    def _launch(self, shape: LaunchShape, args: tuple[object, ...]) -> None:
        bound = self._binder.bind(args)
        device = bound.device or reached_device() or default_device()
        if device == "cpu":
            self._on_cpu.launch(*shape, bound.values, arrays=bound.arrays)
        else:
            self._load(device).launch(*shape, bound.values)

    def variable(self, name: str, device: Any = None) -> Any:
        """A `__constant__`, `__device__` or `__managed__` variable of the source ("w", "ns::w"), in place.

        What is written into it the next launch on `device` sees, and it shows what the last one wrote. Without `device`
        it is the current GPU's, or the CPU's if there is none. A struct comes as its bytes. Kernels of one source may
        or may not share their variables: set them for each. It is a torch tensor; without torch it is a numpy array.

        Raises:
            CompileError, RuntimeError: as `compile` does.
            ValueError: the source has no such variable, or it is const.
        """
        device = _device(default_device() if device is None else device)
        memory = self._on_cpu.variable(name) if device == "cpu" else self._load(device).variable(name)
        return as_declared(memory, name, self._file)

    def compile(self, device: Any = "cpu") -> None:
        """Build, and load, for `device` now: the first launch there then costs what every launch does.

        Raises:
            CompileError: the source does not compile; the message is the compiler's, with file and line.
            RuntimeError: there is no such device, or no compiler for it.
        """
        device = _device(device)
        if device == "cpu":
            self._on_cpu.compile()
        else:
            self._load(device)

    def resources(self, arch: str = "sm_90") -> Resources:
        """Registers, static shared bytes and spilled bytes when compiled for `arch`: needs NVRTC, but no GPU."""
        return self._cubin(arch).resources

    def loops(self, arch: str = "sm_90") -> tuple[SassLoop, ...]:
        """The loops of the machine code for `arch`, in the order of their addresses, with instructions by class.

        NVRTC compiles the kernel, and nvdisasm of Triton's wheel reads the machine code. No GPU is needed.

        Raises:
            CompileError: NVRTC refuses the source.
            RuntimeError: NVRTC or nvdisasm is not installed.
        """
        cubin = self._cubin(arch)
        return loops_of_cubin(cubin.code, cubin.symbol)

    def _cubin(self, arch: str) -> Cubin:
        check_arch(arch)
        return compile_cubin(self.source, self.name, arch)

    @cached_property
    def _on_cpu(self) -> CpuKernel:
        if self._through == "ptx":
            executable = executable_through_ptx(self.source, self.name, self.parameters, self._arch)
        else:
            executable = executable_of(self.source, self.name)
        return CpuKernel(executable, self.parameters)

    def _load(self, device: str) -> GpuKernel:
        index = int(device.partition(":")[2] or -1)
        if index in self._on_gpu:
            return self._on_gpu[index]
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available():
            raise RuntimeError(
                f"kernel {self.function}: asked to run on {device}, but torch finds no GPU on this machine: "
                f"pass CPU tensors to run it here, or compile without running it with .resources(arch)"
            )
        index = torch.cuda.current_device() if index < 0 else index
        if index not in self._on_gpu:
            cubin = self._cubin("sm_{}{}".format(*torch.cuda.get_device_capability(index)))
            self._on_gpu[index] = GpuKernel(self.function, cubin, self._binder, index)
        return self._on_gpu[index]


def default_device() -> str:
    """Where a kernel runs that is given no array."""
    torch = sys.modules.get("torch")
    return f"cuda:{torch.cuda.current_device()}" if torch is not None and torch.cuda.is_available() else "cpu"


def _device(device: object) -> str:
    """ "cpu", "cuda" or "cuda:0", for a string or a torch.device."""
    match = re.fullmatch(r"(cpu|cuda)(:\d+)?", str(device))
    if not match:
        raise ValueError(f'device must be "cpu", "cuda" or "cuda:0", got {device!r}')
    return "cpu" if match[1] == "cpu" else match[0]


def _typed(launch: object) -> object:
    """`launch` as a key that tells 1 from True and 1.0, which are equal and have the same hash."""
    if isinstance(launch, tuple):
        return tuple(map(_typed, launch))
    return launch if type(launch) is int else (type(launch), launch)


def _with_name_of_its_own(source: Source) -> Source:
    """`source`, a text, with another name if it includes a file that has its name."""
    if not source.path.exists() or source.path not in [path for path, _ in source.included()]:
        return source
    return source._replace(filename=source.filename.replace(".cu", ".text.cu"))


def _check_strings(argument: str, value: object) -> None:
    strings = isinstance(value, Sequence) and not isinstance(value, str)
    if not strings or not all(isinstance(item, str) for item in value):
        remedy = f": pass {[f'{key}={item}' for key, item in value.items()]}" if isinstance(value, Mapping) else ""
        raise TypeError(f'{argument} must be a sequence of strings, as in ["A=1", "B"], got {value!r}{remedy}')
