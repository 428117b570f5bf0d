"""A launch of a Triton kernel as Triton specialises it for a GPU, and its PTX. A second process compiles."""

import collections
import copy
import json
import math
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cudascope.arguments.arrays import as_array, bits_of
from cudascope.cpp.source import CompileError
from cudascope.kernels.ptx import PtxKernel
from cudascope.ptx.module import Parameter
from cudascope.toolchain.cache import cache_dir, digest, prune_at_times, publish, used
from cudascope.toolchain.ptxas import PtxText, Resources, resources_of
from cudascope.triton.source import Description

_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}


class Leaf(NamedTuple):
    """One parameter of a compiled kernel, for the argument `name` or for `name[i]` of a tuple."""

    name: str
    path: tuple[int, ...]
    type: str  # "*fp16", "i32", "fp32"
    part: str = ""  # of a tensor descriptor: "base", "shape", "strides", "padding", "round_f32_to_tf32"
    map: Mapping[str, Any] | None = None  # how a tensor descriptor becomes a tensor map

    def __str__(self) -> str:
        return self.name + "".join(f"[{i}]" for i in self.path)

    def of(self, arguments: Mapping[str, Any]) -> Any:
        """Return the argument."""
        value = arguments[self.name]
        descriptor_part = self.path
        if self.part:
            value, descriptor_part = getattr(value, self.part), self.path[-1:] * (self.part in ("shape", "strides"))
        for i in descriptor_part:
            value = value[i]
        return value == "nan" if self.part == "padding" else value


def leaves(signature: Mapping[str, Any], maps: Sequence[Mapping[str, Any]]) -> list[Leaf]:
    """Return the parameters of a kernel of this signature, as Triton's launcher passes them.

    Args:
        maps: how each tensor descriptor of the host becomes a tensor map; empty for a GPU without TMA.
    """
    left = iter(maps)
    return [leaf for name, kind in signature.items() for leaf in _leaves(name, (), kind, left)]


def _leaves(name: str, path: tuple[int, ...], kind: Any, maps: Iterator[Mapping[str, Any]]) -> Iterator[Leaf]:
    if isinstance(kind, tuple):
        for i, each in enumerate(kind):
            yield from _leaves(name, (*path, i), each, maps)
    elif kind.startswith("tensordesc"):
        yield from _descriptor(name, kind, next(maps, None))
    elif kind != "constexpr":
        yield Leaf(name, path, kind)


def _descriptor(name: str, kind: str, tensor_map: Mapping[str, Any] | None) -> Iterator[Leaf]:
    """A tensor descriptor of the host. A GPU without TMA gets its base and its sizes in the place of a tensor map."""
    dtype, sizes = re.match(r"tensordesc<([^\[>]*)\[([^\]]*)\]", kind).groups()
    rank = range(sizes.count(",") + 1)
    if tensor_map:
        yield Leaf(name, (), "tensor map", map=tensor_map)
    else:
        yield Leaf(name, (), f"*{dtype}", "base")
        yield from (Leaf(name, (i,), "i64", part) for part in ("shape", "strides") for i in rank)
        yield from (Leaf(name, (), "i1", part) for part in ("padding", "round_f32_to_tf32"))
    yield from (Leaf(name, (i,), kind, part) for part, kind in (("shape", "i32"), ("strides", "i64")) for i in rank)


def pointer_names(flat: Sequence[Leaf]) -> dict[int, str]:
    """Return a name for each parameter that is a pointer: that of its argument. Reports use these names."""
    found: dict[int, str] = {}
    arguments = {leaf.name for leaf in flat}
    for position, leaf in enumerate(flat):
        if leaf.type.startswith("*"):
            alone = sum(other.name == leaf.name and other.type.startswith("*") for other in flat) == 1
            name = leaf.name if alone else "_".join([leaf.name, *map(str, leaf.path)])
            while name in found.values() or (not alone and name in arguments):
                name += "_"
            found[position] = name
    return found


def passed(
    kernel: str,
    flat: Sequence[Leaf],
    arguments: Mapping[str, Any],
    parameters: tuple[Parameter, ...],
    scratch: tuple[int, int],
    grid: tuple[int, int, int],
) -> list[Any]:
    """Return the arguments of the PTX, which a `PtxKernel` checks.

    `scratch` tells the bytes of scratch memory in global memory that each program gets, by kind. TypeError, ValueError:
    the base of a tensor descriptor has no memory, or is not on the CPU.
    """
    given = zip(flat, parameters, strict=False)
    values = [_value(kernel, leaf, leaf.of(arguments), parameter) for leaf, parameter in given]
    for size, _ in zip(scratch, parameters[len(flat) :], strict=False):
        values.append(_scratch(size * math.prod(grid)) if size else None)
    return values


def _scratch(size: int) -> np.ndarray:
    """Return zeros that start where Triton's allocators for a GPU let them start: tensor maps lie in this memory."""
    memory = np.zeros(size + 127, np.uint8)
    start = -memory.ctypes.data % 128
    return memory[start : start + size]


def behind_maps(flat: Sequence[Leaf], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors that only a tensor map leads to, by the name of the argument."""
    return {leaf.name: leaf.of(arguments).base for leaf in flat if leaf.map}


def _value(kernel: str, leaf: Leaf, value: Any, parameter: Parameter) -> Any:
    if leaf.map:
        array = as_array(value.base)
        if array is None or array.device != "cpu":
            raise ValueError(
                f"kernel {kernel}: {leaf} must describe a tensor on the CPU, where PTX is executed, "
                f"got {array.device if array else type(value.base).__name__}"
            )
        return _tensor_map(value, leaf.map)
    if leaf.type.startswith("*"):
        from triton.runtime.jit import TensorWrapper  # of triton.reinterpret(tensor, dtype)

        return value.base if isinstance(value, TensorWrapper) else value
    if leaf.type not in _DTYPES:
        return int(value)
    if parameter.type in ("f32", "f64"):
        return float(value)
    dtype = _DTYPES[leaf.type]
    with np.errstate(over="ignore"):
        bits = bits_of(np.array([value], np.float64), dtype) if leaf.type == "bf16" else np.array([value], dtype)
    return bits.tobytes() if parameter.count else int.from_bytes(bits.tobytes(), "little")


def _tensor_map(descriptor: Any, how: Mapping[str, Any]) -> bytes:
    """A tensor map as the CPU runner has it (cpu/runtime/kinds.h), of 128 bytes as a GPU's."""

    def reversed_to_5(sizes: Iterable[int]) -> list[int]:
        return ([*sizes][::-1] + [1] * 5)[:5]

    strides = [stride * how["elem_size"] for stride in reversed_to_5(descriptor.strides)[1:]]
    head = struct.pack("<5Q2I", descriptor.base.data_ptr(), *strides, len(descriptor.shape) - 1, how["elem_type"])
    sizes = [*reversed_to_5(descriptor.shape), *reversed_to_5(how["block_size"]), *[1] * 5]
    tail = struct.pack("<15I4B", *sizes, how["swizzle"], 0, descriptor.padding == "nan", 0)
    return (head + tail).ljust(128, b"\0")


WORKER = Path(__file__).with_name("worker.py")


class Launch(NamedTuple):
    """A launch as Triton specialises it: the type of each argument, the constants and the options of the compiler."""

    name: str
    sm: int
    arguments: Mapping[str, Any]  # with defaults
    signature: Mapping[str, Any]  # "*fp16", "i32", "constexpr", or a tuple of them
    request: str  # all that decides the result of the compilation, as JSON


class Compiled:
    """A kernel that Triton compiled.

    Attributes:
        ptx: its text, in which pointers have the names of the kernel's arguments.
        shared: bytes of shared memory of a thread block.
        asm: the text of each level of the compilation, "ttir", "ttgir", "llir" and "ptx", as Triton wrote it.
        metadata: what Triton tells of the kernel, as a named tuple: shared, num_warps, num_stages, target, …
        n_regs: registers per thread, from ptxas.
        n_spills: values of 32 bits that a thread stores for want of registers, from ptxas.
    """

    def __init__(self, launch: Launch, answer: Mapping[str, Any]) -> None:
        about = answer["metadata"]
        if about["num_ctas"] != 1:
            raise CompileError(f"kernel {launch.name}: num_ctas must be 1, got {about['num_ctas']}: no clusters here")
        self.name, self.shared, self.num_warps = about["name"], about.get("shared") or 0, about["num_warps"]
        self.scratch = tuple(about.get(f"{kind}_scratch_size") or 0 for kind in ("global", "profile"))
        self.leaves = leaves(launch.signature, about.get("tensordesc_meta") or ())
        self.asm, self._about, self._sm = answer["asm"], about, launch.sm
        self.ptx = without_unused_strings(self.asm["ptx"])
        for position, name in pointer_names(self.leaves).items():
            self.ptx = re.sub(rf"\b{self.name}_param_{position}\b", name, self.ptx)
        self._executables: dict[str, PtxKernel] = {}

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"kernel {self.name} was compiled by triton_compiled, which knows its asm, metadata, n_regs, n_spills, "
            f"ptx, shared memory (shared) and num_warps, but not {name}: launch the kernel itself"
        )

    @property
    def metadata(self) -> Any:
        from triton.backends.compiler import GPUTarget

        about = self._about | {"target": GPUTarget("cuda", self._sm, 32)}
        return collections.namedtuple("KernelMetadata", sorted(about))(**about)

    @property
    def n_regs(self) -> int:
        return self._resources.registers

    @property
    def n_spills(self) -> int:
        return self._resources.spilled_bytes // 4

    @property
    def _resources(self) -> Resources:
        target = re.search(r"^\.target\s+(\w+)", self.asm["ptx"], re.MULTILINE)[1]
        resources = resources_of(PtxText(self.asm["ptx"], self.name, target), self._sm)
        if resources is None:
            raise RuntimeError(f"kernel {self.name}: ptxas does not compile its PTX for {target}")
        return resources

    def _init_handles(self) -> None:
        """Do nothing: programs call this function of Triton's before they read n_regs."""

    def executable(self, edit: Callable[[str], str] | None) -> PtxKernel:
        """Return the kernel that executes the PTX, after `edit` if there is one."""
        ptx = self.ptx if edit is None else edit(self.ptx)
        if not isinstance(ptx, str):
            raise TypeError(f"kernel {self.name}: edit must return PTX as a string, got {type(ptx).__name__}")
        if ptx not in self._executables:
            self._executables[ptx] = PtxKernel(ptx, self.name)
        return self._executables[ptx]


_STRING = re.compile(r"^\.global \.align 1 \.b8 ([\w$]+)\[\d+\] = \{[^}]*\};$", re.MULTILINE)


def without_unused_strings(ptx: str) -> str:
    """Return the PTX without the strings that nothing in it names, each replaced by an empty line.

    Functions of libdevice, such as exp, leave the string "__CUDA_FTZ". A kernel without variables needs one build to be
    checked. A kernel with variables needs two builds: one of them keeps the values of the variables.
    """
    for string in _STRING.finditer(ptx):
        if len(re.findall(rf"(?<![\w$]){re.escape(string[1])}(?![\w$])", ptx)) == 1:
            ptx = ptx.replace(string[0], "", 1)
    return ptx


class _View:
    """A `@triton.jit` function as the one that Triton compiles."""

    def __init__(self, kernel: Any) -> None:
        from triton.runtime.jit import JITFunction

        self.kernel = kernel  # kept, so that its id stays its own
        self.function = kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **kernel.kwargs)
        if self.function.is_gluon():
            raise TypeError(f"kernel {kernel.fn.__name__} is written in Gluon, which triton_compiled does not compile")
        self._binders: dict[int, tuple[Any, Callable]] = {}
        self._described: tuple[Description, str] | None = None

    def described(self) -> tuple[Description, str]:
        """The kernel with all that it uses, as it is now, and these functions as JSON."""
        if self._described is None or not self._described[0].is_current():
            description = Description()
            description.value(self.kernel)
            self._described = description, json.dumps(description.functions)
        return self._described

    def binder(self, sm: int) -> tuple[Any, Callable]:
        """Return Triton's compiler for `sm`, and the function that binds and specialises arguments for it."""
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend
        from triton.runtime.jit import create_function_from_signature

        if sm not in self._binders:
            backend, function = make_backend(GPUTarget("cuda", sm, 32)), self.function
            bind = create_function_from_signature(function.signature, function.params, backend)
            self._binders[sm] = backend, bind
        return self._binders[sm]


_views: dict[int, _View] = {}
_options: dict[str, Any] = {}  # described, by what Python writes for them: they are numbers, strings and tuples


def specialised(kernel: Any, sm: int, args: tuple[Any, ...], options: Mapping[str, Any]) -> Launch:
    """Specialise a launch as Triton does on a GPU of capability `sm`: types, divisibility by 16, ones, constants."""
    import triton
    from triton import knobs
    from triton._C.libtriton import get_cache_invalidating_env_vars

    if id(kernel) not in _views:
        _views[id(kernel)] = _View(kernel)
    view = _views[id(kernel)]
    backend, bind = view.binder(sm)
    options = dict(options)
    options["debug"] = options.get("debug", view.function.debug) or knobs.runtime.debug
    options["instrumentation_mode"] = knobs.compilation.instrumentation_mode
    args, options = _as_compiled(args), {name: _as_compiled(value) for name, value in options.items()}
    arguments, specialisation, own = bind(*args, **options)
    parsed, *kinds = view.function._pack_args(backend, options, arguments, specialisation, own)
    described, functions = view.described()
    description = copy.copy(described)
    if (written := repr(parsed)) not in _options:
        _options[written] = Description().value(vars(parsed))
    request = {
        "kernel": [["function", 0], *map(description.value, kinds), _options[written]],
        "sm": sm,
        "triton": triton.__version__,
        "environment": sorted(get_cache_invalidating_env_vars().items()),
    }
    if len(description.functions) > len(described.functions):  # an argument is a function
        functions = json.dumps(description.functions)
    request = f'{json.dumps(request)[:-1]}, "functions": {functions}}}'
    return Launch(view.function.__name__, sm, arguments, kinds[0], request)


def _as_compiled(value: Any) -> Any:
    """The value with each function of the interpreter as a constant that Triton's specialisation knows."""
    from triton.language import constexpr
    from triton.runtime.interpreter import InterpretedFunction

    if isinstance(value, InterpretedFunction):
        return constexpr(value)
    if type(value) is tuple:
        return tuple(map(_as_compiled, value))
    return value


def compiled_kernel(launch: Launch) -> Compiled:
    """Return the kernel, from memory, from the cache on disk, or compiled by a second process (CompileError)."""
    if launch.request not in _compiled:
        path = cache_dir() / f"{launch.name}-{digest(launch.request, WORKER.read_text(encoding='utf-8'))}.triton.json"
        try:
            answer = json.loads(used(path).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):  # not compiled yet, or not whole
            answer = _ask(launch.name, launch.request)
            publish(path, json.dumps(answer).encode())
            prune_at_times()
        _compiled[launch.request] = Compiled(launch, answer)
    return _compiled[launch.request]


_compiled: dict[str, Compiled] = {}


def _ask(name: str, request: str) -> dict[str, Any]:
    """Compile in a second process, where Triton is not interpreted."""
    asked = json.loads(request)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        done = subprocess.run(
            [sys.executable, "-P", WORKER, answer],
            input=json.dumps(asked | {"path": sys.path}),
            env=os.environ | {"TRITON_INTERPRET": "0"},
            capture_output=True,
            text=True,
            check=False,
        )
        sys.stdout.write(done.stdout)  # of tl.static_print
        found = {"error": f"the compiler ended with {done.returncode}"}
        if answer.exists():
            found = json.loads(answer.read_text(encoding="utf-8"))
    if "error" in found:
        sm, said = asked["sm"], done.stderr.strip()
        raise CompileError(f"kernel {name} does not compile for sm_{sm}:\n{found['error']}" + f"\n{said}" * bool(said))
    return found
