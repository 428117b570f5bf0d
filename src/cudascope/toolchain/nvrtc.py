"""CUDA C++ to machine code or PTX with NVRTC, without a GPU or a driver: `pip install 'cudascope[cuda]'` brings it.

One file per kernel instantiation, about 0.2 s each, kept on disk. The report of ptxas is kept with a cubin.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from cudascope.cpp.device_code import device_text
from cudascope.cpp.signature import address_of
from cudascope.cpp.source import CompileError, Included, Source
from cudascope.cpp.variables import plain_variables
from cudascope.toolchain.cache import cache_dir, code_of, digest, prune_at_times, publish, used
from cudascope.toolchain.headers import (
    ALWAYS,
    HOST_ONLY,
    STAND_INS,
    STANDARD,
    lenient_folders,
    nvidia_folders,
    nvidia_version,
    nvrtc_folder,
    our_headers,
)
from cudascope.toolchain.ptxas import Resources, read_resources

# those of NVIDIA's headers that declare uint64_t as unsigned long long, for NVRTC only
_LONG_LONG = re.compile(r'#[ \t]*include[ \t]*[<"](cooperative_groups/memcpy_async|cuda_(pipeline|awbarrier))')
_STD = re.compile(r"\bstd\b")
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)', re.MULTILINE)
_LACKS = re.compile(r'cannot open source file "([^"]+)"')
_APART = {"cccl": "cuda/|cub/|nv/|thrust/", "crt": "crt/"}
_APART = {f"nvidia-cuda-{wheel}": re.compile(names) for wheel, names in _APART.items()}
_APART["nvidia-curand"] = re.compile("curand_")

_SWITCHES = ("use_fast_math", "ftz", "prec-sqrt", "prec-div", "fmad", "extra-device-vectorization", "restrict")
_OPTIONS = {"std": str, "maxrregcount": int, **dict.fromkeys(_SWITCHES, bool)}
_WITHOUT_VALUE = ("use_fast_math", "extra-device-vectorization", "restrict")


class Cubin(NamedTuple):
    """A compiled kernel: its machine code, its mangled name in there, and what it takes."""

    code: bytes
    symbol: str
    resources: Resources
    variables: dict[str, str]  # the mangled names of the source's variables, by their own


class Ptx(NamedTuple):
    """A kernel as PTX: the text, the kernel's entry in the text, and the names of the variables as in a `Cubin`."""

    text: str
    symbol: str
    variables: dict[str, str]


def compile_cubin(source: Source, name: str, arch: str) -> Cubin:
    """Kernel `name` of `source` for `arch` ("sm_90").

    CompileError: the source does not compile; the message is NVRTC's log. ValueError: an option that is not known here.
    RuntimeError: cuda-bindings or NVRTC is not installed.
    """
    code, about = _compiled(source, name, arch, "cubin")
    return Cubin(code, about["symbol"], Resources(*about["resources"]), about["variables"])


def compile_ptx(source: Source, name: str, arch: str) -> Ptx:
    """The PTX of kernel `name` of `source` for `arch` ("sm_90"). Raises what `compile_cubin` raises."""
    code, about = _compiled(source, name, arch, "ptx")
    return Ptx(code.decode(), about["symbol"], about["variables"])


def _compiled(source: Source, name: str, arch: str, form: str) -> tuple[bytes, dict[str, Any]]:
    """Return a "cubin" or "ptx" from the cache or from NVRTC, and what is known about it."""
    settings = _settings(source.options)
    included = source.with_included()
    how = ("\0".join(source.defines), "\0".join(source.options), *_environment())
    key = digest(arch, name, source.filename, source.text, *how, *included.key(source.folder))
    path = cache_dir() / form / f"{key}.{form}"
    try:
        header, code = path.read_bytes().split(b"\n", 1)
        about = json.loads(header)
        if {"symbol", "resources", "variables"} <= about.keys() and not included.is_unread:
            used(path)
            return code, about
    except (FileNotFoundError, ValueError):  # not built yet, or not whole
        pass
    compiled = None
    with contextlib.suppress(CompileError):
        compiled = _compile(source, included, name, arch, settings, form, ())
    if compiled is None:  # because of its host code, perhaps
        try:
            device = source._replace(text=device_text(source, name, _folders()))
            # what is left runs on the device: constexpr functions and lambdas need not say so
            compiled = _compile(device, included, name, arch, settings, form, ("--device-as-default-execution-space",))
        except CompileError as error:
            raise CompileError(f"{error}{_lacking(str(error))}{_host_only(source.text, str(error))}") from None
    code, about = compiled
    # NVRTC does not tell which files it opened: what is kept must have been made of files that are known and unchanged
    if not included.is_unread and source.with_included() == included:
        publish(path, json.dumps({"kernel": name, "arch": arch, **about}).encode() + b"\n" + code)
        prune_at_times()
    return code, about


def _lacking(said: str) -> str:
    """Say which wheels of NVIDIA's have the headers that NVRTC `said` it cannot open."""
    lacks = _LACKS.findall(said)
    wheels = (wheel for wheel, names in _APART.items() if any(map(names.match, lacks)))
    return "".join(f"\nit needs headers of NVIDIA's that are not there: pip install {wheel}" for wheel in wheels)


def _host_only(text: str, said: str) -> str:
    """Say which includes of `text` are empty for NVRTC, if NVRTC `said` that it lacks a name of thrust or of cub."""
    included = [name for name in _INCLUDE.findall(text) if name in HOST_ONLY]
    if not included or not re.search(r'"(thrust|cub)(::|")|"::"', said):
        return ""
    headers = ", ".join(f"<{name}>" for name in included)
    return (
        f"\n{headers}: empty here, because NVRTC compiles no host code, and thrust's algorithms and CUB's launches "
        "bring some. Give the kernel a loop of its own, or cub's block and warp functions"
    )


def _compile(
    source: Source, included: Included, name: str, arch: str, settings: dict[str, Any], form: str, more: Sequence[str]
) -> tuple[bytes, dict[str, Any]]:
    nvrtc = _nvrtc()
    folders = [*source.include_path, *_folders(), *source.late_include_path, *lenient_folders(included)]
    texts = [source.text, *(text for _, text in included.files)]
    defines = [*source.defines, *["CUDASCOPE_LONG_LONG"] * any(map(_LONG_LONG.search, texts))]
    headers = [ALWAYS, *[STANDARD] * any(map(_STD.search, [name, *texts]))]
    options = [
        f"--gpu-architecture={arch if form == 'cubin' else arch.replace('sm_', 'compute_')}",
        "--generate-line-info",  # costs nothing at run time: profilers and findings then name the source line
        *(f"--include-path={place}" for place in folders),
        *(f"--pre-include={header}" for header in headers),
        "--device-int128",
        *more,
        *(f"--define-macro={each}" for each in defines),
        *(["--ptxas-options=-v"] if form == "cubin" else []),
        *(["--no-cache"] if _version() >= (12, 9) else []),  # from its cache, which a driver has, comes no log
        *_flags({"std": "c++17", **settings}),
    ]
    expression = address_of(name)
    addresses = {f"&{each.name}": each.name for each in plain_variables(source.read(included))}
    # by the path NVRTC finds what the source includes with quotes
    program = _done(nvrtc.nvrtcCreateProgram(source.text.encode(), str(source.path).encode(), 0, None, None))
    try:
        for each in (expression, *addresses):
            _done(nvrtc.nvrtcAddNameExpression(program, each.encode()))
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = _bytes(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode(errors="replace")
        if status:
            message = log.rstrip("\0").strip().replace(str(source.path), source.filename) or status.name
            raise CompileError(f"{source.filename}: kernel {name} does not compile for {arch}\n{message}")
        symbols = {each: _done(nvrtc.nvrtcGetLoweredName(program, each.encode())) for each in (expression, *addresses)}
        if form == "cubin":
            code = _bytes(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        else:
            code = _bytes(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program).rstrip(b"\0")
            code = code.replace(f'"{source.path}"'.encode(), f'"{source.filename}"'.encode())
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    symbol, *others = (each.decode() for each in symbols.values())
    about = {"symbol": symbol, "resources": read_resources(log, symbol) if form == "cubin" else None}
    about["variables"] = dict(zip(addresses.values(), others, strict=True))
    return code, about


def _done(answer: tuple) -> Any:
    """The value that a call of NVRTC returns. Raise CompileError if the call failed."""
    status, *values = answer
    if status:
        raise CompileError(f"NVRTC failed: {status.name}")
    return values[0] if values else None


def _bytes(size: Callable, read: Callable, program: Any) -> bytes:
    content = bytes(_done(size(program)))
    _done(read(program, content))
    return content


def _folders() -> list[Path]:
    """Where the headers are that are not the user's."""
    return [nvrtc_folder(), STAND_INS, *nvidia_folders()]


def check_options(options: Sequence[str]) -> None:
    """Raise ValueError for an option that is not known, on the CPU as well, and for a folder that is not there."""
    _settings(options)
    for option in options:
        if option.startswith("-I") and not Path(option[2:].strip()).is_dir():
            raise ValueError(f"options: {option!r} names no folder: a relative one begins at the current folder")


def _settings(options: Sequence[str]) -> dict[str, Any]:
    """Command-line options other than -I, which `Source.include_path` reads, by their names."""
    settings = {}
    for option in options:
        if option.startswith("-I"):
            continue
        name, _, value = option.lstrip("-").partition("=")
        if name not in _OPTIONS or not option.startswith("-"):
            known = ", ".join(["-I<folder>", *(f"--{name}" for name in _OPTIONS)])
            raise ValueError(f"options: {option!r} is not known here; known are {known}")
        kind = _OPTIONS[name]
        if kind is not bool and (not value or (kind is int and not value.isdigit())):
            raise ValueError(f"options: {option!r} lacks its value, as in --{name}={'64' if kind is int else 'c++17'}")
        settings[name] = value != "false" if kind is bool else kind(value)
    return settings


def _flags(settings: Mapping[str, Any]) -> Iterator[str]:
    """The options of a command line that have these settings."""
    for name, value in settings.items():
        if name not in _WITHOUT_VALUE:
            yield f"--{name}={str(value).lower()}"
        elif value:
            yield f"--{name}"


def _nvrtc() -> Any:
    """The bindings of NVRTC, or a RuntimeError that says how to install them."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        why = "compiling CUDA C++ with NVRTC needs cuda-bindings"
        raise RuntimeError(f"{why} ({error}): pip install 'cudascope[cuda]'") from error
    return nvrtc


@cache
def _version() -> tuple[int, int]:
    nvrtc = _nvrtc()
    try:
        _, *version = nvrtc.nvrtcVersion()
    except Exception as error:  # cuda-pathfinder's own class, by which it says where it looked
        raise RuntimeError(
            f"NVRTC is not installed: pip install nvidia-cuda-nvrtc, or 'cudascope[cuda]' ({error})"
        ) from error
    return tuple(version)


@cache
def _environment() -> tuple[str, ...]:
    """Return the inputs besides the source: NVRTC, NVIDIA's headers and ours, and our code."""
    version = ".".join(map(str, _version()))
    return version, nvidia_version(), our_headers(), nvrtc_folder().name, code_of(__name__)
