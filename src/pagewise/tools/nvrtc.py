"""CUDA C++ to machine code with NVRTC: no nvcc, no GPU and no driver needed, only NVIDIA's wheels (`pagewise[cuda]`).

One cubin per kernel instantiation, about 0.2 s each, kept on disk. What ptxas says about it is kept with it.
"""

import json
import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pagewise.tools.cuda_build import CompileError, cache_dir, digest, included_files, nvidia_headers, publish

# What a plain .cu file includes for the host compiler's sake. NVRTC has the mathematics, printf and assert built in.
_HEADERS = {
    "stdint.h": "".join(
        f"typedef {sign} {kind} {prefix}int{bits}_t;\n"
        for bits, kind in ((8, "char"), (16, "short"), (32, "int"), (64, "long"))
        for sign, prefix in (("signed", ""), ("unsigned", "u"))
    )
    + "typedef long intptr_t, ptrdiff_t;\ntypedef unsigned long uintptr_t;\n"
    + "typedef unsigned short ushort;\ntypedef unsigned int uint;\ntypedef unsigned long ulong;\n",
    "float.h": """
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define DBL_MAX 1.7976931348623158e+308
""",
    "limits.h": """
#define INT_MAX 2147483647
#define INT_MIN (-INT_MAX - 1)
#define UINT_MAX 4294967295u
""",
    "math.h": """
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
#define M_PI 3.14159265358979323846
""",
    **dict.fromkeys(("stdio.h", "assert.h", "stddef.h", "stdlib.h", "cuda_runtime.h"), ""),
}
_HEADERS = {name: f"#pragma once\n{text}" for name, text in _HEADERS.items()}
_HEADERS |= {f"c{name[:-2]}": f"#include <{name}>\n" for name in _HEADERS if not name.startswith("c")}
_ALWAYS = ("stdint.h", "math.h")  # nvcc includes them by itself

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
    """What one thread block of a compiled kernel takes, as ptxas reports it."""

    registers: int  # per thread
    shared_bytes: int  # static shared memory, per thread block
    spilled_bytes: int  # per thread: stores into local memory for want of registers

    def thread_blocks_per_sm(self, threads: int) -> int:
        """Thread blocks of `threads` that an SM of 65536 registers and 2048 threads holds (A100, H100), by these two.

        Registers are given out by the warp, in units of 256.
        """
        per_warp = -(-self.registers * 32 // 256) * 256
        return min(2048 // threads, 65536 // (per_warp * -(-threads // 32)))


class Cubin(NamedTuple):
    """A compiled kernel: its machine code, its mangled name in there, and what it takes."""

    code: bytes
    symbol: str
    resources: Resources


def compile_cubin(
    source: str,
    filename: str,
    folder: Path | None,
    name: str,
    arch: str,
    defines: Sequence[str],
    options: Sequence[str],
) -> Cubin:
    """`name` of `source` for `arch` ("sm_90"). Messages call the source `filename`; it includes from `folder`.

    Raises:
        CompileError: the source does not compile; the message is NVRTC's log.
        ValueError: an option that is not known here.
        RuntimeError: cuda-core or NVRTC is not installed.
    """
    settings, include_path = _read_options(options)
    included = [part for path, text in included_files(source, folder, include_path) for part in (str(path), text)]
    how = ("\0".join(defines), "\0".join(options), "\0".join(_HEADERS.values()), *_versions())
    key = digest(arch, name, filename, source, *how, *included)
    path = cache_dir() / "cubin" / f"{key}.cubin"
    try:
        header, code = path.read_bytes().split(b"\n", 1)
        about = json.loads(header)
        return Cubin(code, about["symbol"], Resources(*about["resources"]))
    except (FileNotFoundError, ValueError):  # not built yet, or not whole
        pass
    cubin = _compile(source, filename, folder, name, arch, defines, settings, include_path)
    about = {"kernel": name, "arch": arch, "symbol": cubin.symbol, "resources": cubin.resources}
    publish(path, json.dumps(about).encode() + b"\n" + cubin.code)
    return cubin


def _compile(
    source: str, filename: str, folder: Path | None, name: str, arch: str, defines: Sequence[str],
    settings: dict[str, Any], include_path: list[Path],
) -> Cubin:  # fmt: skip
    core = cuda_core()
    folders = [*([folder] if folder else []), *include_path, _header_directory(), nvidia_headers()]
    program_options = core.ProgramOptions(
        name=filename,
        arch=arch,
        include_path=[str(place) for place in folders],
        pre_include=list(_ALWAYS),
        define_macro=[tuple(define.split("=", 1)) if "=" in define else define for define in defines] or None,
        ptxas_options=["-v"],
        lineinfo=True,  # costs nothing at run time, and profilers and compute-sanitizer then name the source line
        **{"std": "c++17", **settings},
    )
    log = _Log()
    try:
        program = core.Program(source, "c++", program_options)
        result = program.compile("cubin", name_expressions=(name,), logs=log)
    except Exception as error:
        if type(error).__name__ != "NVRTCError":
            raise
        message = re.sub(r"^.*?compilation log:\s*", "", str(error), flags=re.DOTALL).strip()
        raise CompileError(f"{filename}: kernel {name} does not compile for {arch}\n{message}") from None
    symbol = result.symbol_mapping[name]
    symbol = symbol.decode() if isinstance(symbol, bytes) else symbol
    return Cubin(bytes(result.code), symbol, _read_resources(log.text, symbol))


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


def _read_options(options: Sequence[str]) -> tuple[dict[str, Any], list[Path]]:
    """Command-line options as cuda-core takes them: `-I`, and those of `_OPTIONS`."""
    settings, include_path = {}, []
    for option in options:
        if option.startswith("-I"):
            include_path.append(Path(option[2:].strip()))
            continue
        name, _, value = option.lstrip("-").partition("=")
        if name not in _OPTIONS or not option.startswith("-"):
            known = ", ".join(["-I<folder>", *(f"--{name}" for name in _OPTIONS)])
            raise ValueError(f"options: {option!r} is not known here; known are {known}")
        field, kind = _OPTIONS[name]
        settings[field] = value != "false" if kind is bool else kind(value)
    return settings, include_path


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
def _versions() -> tuple[str, str]:
    """NVRTC's version and that of NVIDIA's headers: both decide what comes out."""
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
    return f"{major}.{minor}", version[1] if version else digest(header)


def _header_directory() -> Path:
    """A folder with `_HEADERS`."""
    folder = cache_dir() / "include" / digest(*_HEADERS, *_HEADERS.values())
    for name, text in _HEADERS.items():
        if not os.path.exists(folder / name):
            publish(folder / name, text.encode())
    return folder
