"""CUDA C++ to machine code with NVRTC: no nvcc, no GPU and no driver needed, only NVIDIA's wheels (`pagewise[cuda]`).

One cubin per kernel instantiation, about 0.2 s each, kept on disk. The report of ptxas is kept with the cubin.
"""

import contextlib
import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from cudascope.build import STAND_INS, CompileError, Source, cache_dir, digest, nvidia_headers, publish
from cudascope.device_code import device_text
from cudascope.gpus import H100, thread_blocks_per_sm
from cudascope.signature import address_of
from cudascope.variables import plain_variables

# The headers that a .cu file includes for the host's compiler. NVRTC has their content built in, or lacks it.
_HEADERS = Path(__file__).parent / "headers"
_ALWAYS = ("stdint.h", "math.h")  # nvcc includes them by itself
# those of NVIDIA's headers that declare int64_t as long long, for NVRTC only
_LONG_LONG = re.compile(r'#[ \t]*include[ \t]*[<"](cooperative_groups|cuda/|cub/|cuda_(pipeline|awbarrier))')
_CURAND = re.compile(r'#[ \t]*include[ \t]*[<"]curand_')

_OPTIONS: dict[str, tuple[str, type]] = {
    "std": ("std", str),
    "maxrregcount": ("max_register_count", int),
    "use_fast_math": ("use_fast_math", bool),
    "ftz": ("ftz", bool),
    "prec-sqrt": ("prec_sqrt", bool),
    "prec-div": ("prec_div", bool),
    "fmad": ("fma", bool),
    "extra-device-vectorization": ("extra_device_vectorization", bool),
    "restrict": ("restrict", bool),
}


class Resources(NamedTuple):
    """The resources of one thread block of a compiled kernel, as ptxas reports them."""

    registers: int  # per thread
    shared_bytes: int  # static shared memory, per thread block
    spilled_bytes: int  # per thread: stores into local memory for want of registers

    def thread_blocks_per_sm(self, threads: int) -> int:
        """Thread blocks of `threads` that an SM of an H100 (or A100) holds by its registers and its threads."""
        fits = thread_blocks_per_sm(H100, threads, self.registers, 0)
        return min(fits["threads"], fits["registers"])


class Cubin(NamedTuple):
    """A compiled kernel: its machine code, its mangled name in there, and what it takes."""

    code: bytes
    symbol: str
    resources: Resources
    variables: dict[str, str]  # the mangled names of the source's variables, by their own


def compile_cubin(source: Source, name: str, arch: str) -> Cubin:
    """Kernel `name` of `source` for `arch` ("sm_90").

    Raises:
        CompileError: the source does not compile; the message is NVRTC's log.
        ValueError: an option that is not known here.
        RuntimeError: cuda-core or NVRTC is not installed.
    """
    settings = _settings(source.options)
    included = [part for path, text in source.included() for part in (str(path), text)]
    how = ("\0".join(source.defines), "\0".join(source.options), *_environment())
    key = digest(arch, name, source.filename, source.text, *how, *included)
    path = cache_dir() / "cubin" / f"{key}.cubin"
    try:
        header, code = path.read_bytes().split(b"\n", 1)
        about = json.loads(header)
        return Cubin(code, about["symbol"], Resources(*about["resources"]), about["variables"])
    except (FileNotFoundError, KeyError, ValueError):  # not built yet, not whole, or by an earlier version
        pass
    cubin = None
    with contextlib.suppress(CompileError):
        cubin = _compile(source, name, arch, settings)
    if cubin is None:  # because of its host code, perhaps
        try:
            device = source._replace(text=device_text(source, name, _folders()))
            cubin = _compile(device, name, arch, settings)
        except CompileError as error:
            raise CompileError(f"{error}{_lacking(source.text)}") from None
    about = {"kernel": name, "arch": arch, "symbol": cubin.symbol, "resources": cubin.resources}
    about["variables"] = cubin.variables
    publish(path, json.dumps(about).encode() + b"\n" + cubin.code)
    return cubin


def _lacking(text: str) -> str:
    """Say which wheels of NVIDIA's `text` needs, if they are not installed."""
    wheels = ((_LONG_LONG, "CCCL", "cccl", "nvidia-cuda-cccl"), (_CURAND, "cuRAND", "curand_kernel.h", "nvidia-curand"))
    return "".join(
        f"\nit includes headers of {name}, which are not there: pip install {wheel}"
        for includes, name, place, wheel in wheels
        if includes.search(text) and not (nvidia_headers() / place).exists()
    )


def _compile(source: Source, name: str, arch: str, settings: dict[str, Any]) -> Cubin:
    core = cuda_core()
    folders = [*([source.folder] if source.folder else []), *source.include_path, *_folders()]
    texts = [source.text, *(text for _, text in source.included())]
    defines = [*source.defines, *(["CUDASCOPE_LONG_LONG"] if any(map(_LONG_LONG.search, texts)) else [])]
    program_options = core.ProgramOptions(
        name=source.filename,
        arch=arch,
        include_path=[str(place) for place in folders],
        pre_include=list(_ALWAYS),
        define_macro=[tuple(each.split("=", 1)) if "=" in each else each for each in defines] or None,
        ptxas_options=["-v"],
        lineinfo=True,  # costs nothing at run time, and profilers and compute-sanitizer then name the source line
        **{"std": "c++17", **settings},
    )
    log = _Log()
    expression = address_of(name)
    addresses = {f"&{each.name}": each.name for each in plain_variables(source.read())}
    try:
        program = core.Program(source.text, "c++", program_options)
        result = program.compile("cubin", name_expressions=(expression, *addresses), logs=log)
    except Exception as error:
        if type(error).__name__ != "NVRTCError":
            raise
        message = re.sub(r"^.*?compilation log:\s*", "", str(error), flags=re.DOTALL).strip()
        raise CompileError(f"{source.filename}: kernel {name} does not compile for {arch}\n{message}") from None
    symbols = {key: s.decode() if isinstance(s, bytes) else s for key, s in result.symbol_mapping.items()}
    variables = {variable: symbols[address] for address, variable in addresses.items()}
    return Cubin(bytes(result.code), symbols[expression], _read_resources(log.text, symbols[expression]), variables)


def _folders() -> list[Path]:
    """Where the headers are that are not the user's."""
    return [
        _HEADERS,
        STAND_INS,
        nvidia_headers(),
        nvidia_headers() / "cccl",
    ]  # cooperative groups include what lies in cccl


class _Log:
    text = ""

    def write(self, text: str | bytes) -> None:
        self.text += text.decode() if isinstance(text, bytes) else text


def _read_resources(log: str, symbol: str) -> Resources:
    """ptxas's report: a paragraph per kernel, that of `symbol` from its "Compiling entry function" to the next."""
    paragraph = next(part for part in log.split("Compiling entry function") if part.lstrip().startswith(f"'{symbol}'"))

    def count(pattern: str) -> int:
        match = re.search(pattern, paragraph)
        return int(match[1]) if match else 0

    return Resources(count(r"Used (\d+) registers"), count(r"(\d+) bytes smem"), count(r"(\d+) bytes spill stores"))


def check_options(options: Sequence[str]) -> None:
    """Raise ValueError for an option that is not known, on the CPU as well, and for a folder that is not there."""
    _settings(options)
    for option in options:
        if option.startswith("-I") and not Path(option[2:].strip()).is_dir():
            raise ValueError(
                f"options: {option!r} names no folder: a relative one is looked up from the current folder"
            )


def _settings(options: Sequence[str]) -> dict[str, Any]:
    """Command-line options other than -I, which `Source.include_path` reads, as cuda-core takes them."""
    settings = {}
    for option in options:
        if option.startswith("-I"):
            continue
        name, _, value = option.lstrip("-").partition("=")
        if name not in _OPTIONS or not option.startswith("-"):
            known = ", ".join(["-I<folder>", *(f"--{name}" for name in _OPTIONS)])
            raise ValueError(f"options: {option!r} is not known here; known are {known}")
        field, kind = _OPTIONS[name]
        if kind is not bool and (not value or (kind is int and not value.isdigit())):
            raise ValueError(f"options: {option!r} lacks its value, as in --{name}={'64' if kind is int else 'c++17'}")
        settings[field] = value != "false" if kind is bool else kind(value)
    return settings


# ------------------------------------------------------------------------------------------------ what is installed


def cuda_core() -> Any:
    """The cuda.core module, or a RuntimeError that says how to install it."""
    try:
        import cuda.core
    except ImportError as error:
        raise RuntimeError(
            f"compiling CUDA C++ for a GPU needs cuda-core and NVRTC ({error}): pip install 'pagewise[cuda]'"
        ) from error
    return cuda.core


@cache
def _environment() -> tuple[str, ...]:
    """Return the inputs besides the source: the versions of NVRTC and of NVIDIA's headers, and our headers."""
    cuda_core()
    from cuda.bindings import nvrtc

    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # cuda-pathfinder's own class, by which it says where it looked
        raise RuntimeError(
            f"NVRTC is not installed: pip install nvidia-cuda-nvrtc, or 'pagewise[cuda]' ({error})"
        ) from error
    header = (nvidia_headers() / "cuda_runtime_api.h").read_text(errors="replace")
    version = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", header)
    cccl = nvidia_headers() / "cccl" / "cuda" / "std" / "__cccl" / "version.h"  # a wheel of its own
    ours = [
        part
        for file in sorted([*_HEADERS.iterdir(), *STAND_INS.rglob("*.*")])
        for part in (file.name, file.read_text())
    ]
    theirs = (version[1] if version else digest(header), digest(cccl.read_text()) if cccl.exists() else "")
    return f"{major}.{minor}", *theirs, digest(*ours)
