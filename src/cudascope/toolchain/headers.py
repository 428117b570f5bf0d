"""The folders of headers: those that come with cudascope, NVIDIA's, and those of the cache, written from tables."""

import contextlib
import functools
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath

from cudascope.cpp.source import CompileError, Included
from cudascope.toolchain.cache import UNFINISHED, cache_dir, digest, used

_HERE = Path(__file__).parent
STAND_INS = _HERE / "stand_ins"  # the device side of other libraries' headers
FOR_NVRTC = _HERE / "include"  # headers of the host's compiler, whose content NVRTC has built in or lacks
RUNTIME = _HERE.parent / "cpu" / "runtime"  # the C++ side of the runner
API = _HERE.parent / "cpu" / "api"  # the CUDA runtime API for programs
HEADERS = _HERE.parent / "cpu" / "include"  # what a kernel can include, simt.h among it
_OURS = (RUNTIME, HEADERS, FOR_NVRTC, STAND_INS)
_IN_CACHE = re.compile(r"(?:headers|precompiled)-[0-9a-f]{32}")


def _leading(others: Mapping[str, str], empty: str = "") -> dict[str, str]:
    """Return the text of each header."""
    return {name: f"#include <{other}>\n" for name, other in others.items()} | dict.fromkeys(empty.split(), "")


# Headers that are read as if they were others, or empty: a kernel has no use for them, simt.h has what they declare, or
# NVRTC has it built in.
_EMPTY_ON_CPU = (
    "common_functions.h crt/host_defines.h cuda_device_runtime_api.h cuda_gl_interop.h cuda_runtime.h "
    "cuda_profiler_api.h cuda_runtime_api.h device_atomic_functions.h device_functions.h device_launch_parameters.h "
    "math_functions.h sm_20_intrinsics.h sm_30_intrinsics.h sm_32_intrinsics.h sm_35_intrinsics.h "
    "sm_60_atomic_functions.h sm_61_intrinsics.h"
)
_FOR_BOTH = {"THC/THCAtomics.cuh": "ATen/cuda/Atomic.cuh", "THC/THCDeviceUtils.cuh": "ATen/cuda/DeviceUtils.cuh"}
_ON_CPU = {
    "cub/block/block_adjacent_difference.cuh": "cub/block/block_discontinuity.cuh",
    "cub/block/block_histogram.cuh": "cub/block/block_discontinuity.cuh",
    "cub/block/block_merge_sort.cuh": "cub/block/block_radix_sort.cuh",
    "cub/block/block_store.cuh": "cub/block/block_load.cuh",
    "cub/config.cuh": "cub/operators.cuh",
    "cub/util_ptx.cuh": "cub/operators.cuh",
    "cub/util_type.cuh": "cub/operators.cuh",
    "cub/warp/warp_scan.cuh": "cub/warp/warp_reduce.cuh",
    "cooperative_groups/functional.h": "cooperative_groups/scan.h",
    "cooperative_groups/reduce.h": "cooperative_groups/scan.h",
    "cuda/std/atomic": "cuda/atomic",
    "cuda_pipeline_primitives.h": "cuda_pipeline.h",
}
_CURAND = ("globals", "lognormal", "mrg32k3a", "normal", "philox4x32_x", "uniform")
_ON_CPU |= {f"curand_{name}.h": "curand_kernel.h" for name in _CURAND}

# The headers that NVRTC lacks and nvcc has. CCCL has the standard library for a GPU, as cuda::std, and these headers
# make it std. A few have a text of their own in the folder `include`.
ALWAYS = "cudascope_c.h"
"""The header that every source gets. CUDA's own headers include most of it, and the CPU runner's all of it."""
STANDARD = "cudascope_std.h"
"""The header for a source that uses namespace std."""

_OF_CCCL = (
    "array bit bitset chrono climits cmath complex concepts cstddef cstdint cstdlib cstring ctime functional "
    "initializer_list iterator limits memory numeric optional ratio span tuple type_traits utility variant"
)
# NVRTC has what kernels use of them built in: assert, printf, malloc, threadIdx, cudaError_t
_EMPTY_FOR_NVRTC = (
    "assert.h cassert cinttypes cuda_runtime.h cuda_runtime_api.h device_functions.h device_launch_parameters.h "
    "inttypes.h stdio.h stdlib.h time.h version"
)
_FOR_NVRTC = {name: f"#include <cuda/std/{name}>\n#include <{STANDARD}>\n" for name in _OF_CCCL.split()}
_FOR_NVRTC |= _leading(_FOR_BOTH, _EMPTY_FOR_NVRTC)
_FOR_NVRTC |= _leading({"algorithm": STANDARD, "cstdio": STANDARD, "cfloat": "float.h", "cudaTypedefs.h": "cuda.h"})
_FOR_NVRTC |= _leading({f"{name}.h": f"cuda/std/c{name}" for name in ("limits", "string", "stddef")})
_FOR_NVRTC |= {ALWAYS: "".join(f"#include <{name}.h>\n" for name in ("stddef", "stdint", "limits", "float", "math"))}
# The rest of CUB launches kernels.
_CUB = "adjacent_difference discontinuity exchange histogram load merge_sort radix_sort reduce scan store"
_CUB_FILES = [*(f"block/block_{name}" for name in _CUB.split()), "warp/warp_reduce", "warp/warp_scan"]
_FOR_NVRTC |= {"cub/cub.cuh": "".join(f"#include <cub/{name}.cuh>\n" for name in _CUB_FILES)}
# NVRTC refuses host code. Thrust's algorithms and containers, and CUB's launches, bring some: these headers are empty.
_THRUST = (
    "adjacent_difference advance binary_search copy count device_allocator device_delete device_free device_malloc "
    "device_malloc_allocator device_new device_new_allocator device_ptr device_reference device_vector distance equal "
    "execution_policy fill find for_each gather generate host_vector inner_product logical memory merge mismatch "
    "partition random reduce remove replace reverse scan scatter sequence set_operations shuffle sort system_error "
    "tabulate transform transform_reduce transform_scan uninitialized_copy uninitialized_fill unique universal_vector"
)
_CUB_DEVICE = (
    "adjacent_difference copy for histogram memcpy merge merge_sort partition radix_sort reduce run_length_encode scan "
    "segmented_radix_sort segmented_reduce segmented_sort select transform"
)
HOST_ONLY = {f"thrust/{name}.h" for name in _THRUST.split()}
HOST_ONLY |= {f"cub/device/device_{name}.cuh" for name in _CUB_DEVICE.split()}
"""Headers of CCCL that are empty for NVRTC, because NVRTC refuses their host code."""
_FOR_NVRTC |= dict.fromkeys(HOST_ONLY, "")
# These three have parts that need no host code.
_OF_COMPLEX = "abs arg complex conj cos cosh exp log log10 norm polar pow proj sin sinh sqrt tan tanh"
for _name, _header, _words in (
    ("complex", "complex", _OF_COMPLEX),
    ("extrema", "algorithm", "max min"),
    ("swap", "utility", "swap"),
):
    _lines = "".join(f"using ::cuda::std::{word};\n" for word in _words.split())
    _FOR_NVRTC[f"thrust/{_name}.h"] = f"#pragma once\n#include <{_header}>\nnamespace thrust {{\n{_lines}}}\n"
# The headers of cuBLAS bring these two. The rest of them is for the host.
_CUBLAS = "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n"
_FOR_NVRTC |= dict.fromkeys(("cublas.h", "cublas_v2.h", "cublasLt.h", "cublasXt.h"), _CUBLAS)
# CCCL's own makes int64_t a long long for NVRTC, and nvcc's is a long.
_INTEGERS = [f"{u}int{kind}{bits}_t" for u in ("", "u") for kind in ("", "_fast", "_least") for bits in (8, 16, 32, 64)]
_INTEGERS += ["intptr_t", "uintptr_t", "intmax_t", "uintmax_t"]
_USING = "".join(f"using ::{name};\n" for name in _INTEGERS)
_FOR_NVRTC |= {
    "cuda/std/cstdint": (
        "#pragma once\n#include <cuda/std/version>\n#include <stdint.h>\n#include <cuda/std/climits>\n"
        f"_LIBCUDACXX_BEGIN_NAMESPACE_STD\n{_USING}using __cccl_intmax_t = intmax_t;\n"
        "using __cccl_uintmax_t = uintmax_t;\n_LIBCUDACXX_END_NAMESPACE_STD\n"
    )
}

# Headers of CCCL for which simt/cuda_std.h is the stand-in.
_OF_STD = {*_OF_CCCL.split(), "algorithm", "cassert", "cfloat", "string_view", "version"} - {"ctime", "memory"}
_IN_STD = [f"cuda/std/{name}" for name in sorted(_OF_STD)] + ["cuda/cmath", "cuda/utility", "cuda/type_traits"]
_IN_STD += [f"thrust/{name}.h" for name in ("complex", "extrema", "functional", "pair", "swap", "tuple")]

# On the host their half2 and bfloat162 are copied one half at a time; a GPU moves the 4 bytes at once, and so do we.
_COPY_IN_HALVES = re.compile(
    r"NV_IF_ELSE_TARGET\(NV_IS_DEVICE,\s*(__(?:HALF2|BFLOAT162)_TO_UI\(\*this\) =[^;]*;)\s*,.*?\n\)", re.S
)

# With it `h = {}` has two meanings for g++, and without it no less: a raw one is converted first.
_ASSIGN_RAW = re.compile(
    r"__CUDA_HOSTDEVICE__ (?:__CUDA_\w+_INLINE__ )?(__half2|__nv_bfloat162) &(?:\1::)?operator=\(const \1_raw &h2r\)\s*"
    r"(?:;|\{.*?\n\})",
    re.S,
)


def _folders_of_nvidia() -> Iterator[Path]:
    """The folders that may hold NVIDIA's headers: of wheels, wherever Python looks for packages, and of toolkits."""
    with contextlib.suppress(ImportError):
        from cuda.pathfinder import find_nvidia_header_directory

        if found := find_nvidia_header_directory("cudart"):
            yield Path(found)
    for packages in (sysconfig.get_paths()["purelib"], *sys.path):
        yield Path(packages, "nvidia", "cu13", "include")
        yield Path(packages, "nvidia", "cuda_runtime", "include")
    for toolkit in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if toolkit:
            yield Path(toolkit, "include")


@functools.cache
def nvidia_folders() -> list[Path]:
    """All folders of NVIDIA's headers, the first with cuda_fp16.h and its like.

    Some headers come in wheels of their own: CCCL's, cuRAND's and those of the folder crt. They may be in another
    folder of Python's packages than the runtime's, or in a toolkit alone. Since CUDA 13 CCCL's are in a subfolder.
    """
    folders = [folder for place in _folders_of_nvidia() for folder in (place, place / "cccl") if folder.is_dir()]
    found = next((folder for folder in folders if (folder / "cuda_fp16.h").is_file()), None)
    if found is None:
        raise CompileError(
            "compiling CUDA C++ needs NVIDIA's headers (cuda_fp16.h): "
            "pip install nvidia-cuda-runtime, or 'cudascope[cuda]'"
        )
    return [*dict.fromkeys((found, *folders))]


def nvidia_headers() -> Path:
    """The folder of cuda_fp16.h and its like: in the nvidia-cuda-runtime wheel, or an installed toolkit's.

    cuda-pathfinder finds both. Without it, $CUDA_HOME, $CUDA_PATH and /usr/local/cuda name the toolkit.
    """
    return nvidia_folders()[0]


_HALVES = ("half", "half2", "__half", "__half2", "__half_raw", "__half2_raw")
_BFLOATS = [f"{name}{x}" for name in ("nv_bfloat16", "__nv_bfloat16") for x in ("", "2")]
_BFLOATS += ["__nv_bfloat16_raw", "__nv_bfloat162_raw"]
_FP8 = [f"__nv_fp8{x}_{name}" for x in ("", "x2", "x4") for name in ("e4m3", "e5m2")]
DECLARED_IN = {"cuda_fp16.h": _HALVES, "cuda_bf16.h": _BFLOATS, "cuda_fp8.h": _FP8}
"""Types that a source has only if it includes NVIDIA's header, by the header. A header includes those before
it. simt.h includes them for its own use."""


def shown(header: str) -> str:
    """Return C++ that gives the types of a header and of the headers before it their names."""
    headers = list(DECLARED_IN)
    included = headers[: headers.index(header) + 1]
    return "".join(f"#undef {name}\n" for each in included for name in DECLARED_IN[each])


def hidden() -> str:
    """Return C++ that takes these names away. A compiler's message then names the header to include."""
    names = [(name, header.replace(".", "_")) for header, names in DECLARED_IN.items() for name in names]
    return "".join(f"#define {name} {name}_needs_include_{header}\n" for name, header in names)


def header_folder() -> Path:
    """A folder for the CPU: those of NVIDIA's headers that need a word changed, and headers that lead to others."""
    return folder_of(*_headers_on_cpu())


@functools.cache
def _headers_on_cpu() -> tuple[dict[str, str], str]:
    """These headers by their names, and the name of their folder."""
    names = ("cuda_fp16.h", "cuda_fp16.hpp", "cuda_bf16.h", "cuda_bf16.hpp", "cuda_fp8.h")
    texts = {name: (nvidia_headers() / name).read_text(encoding="utf-8", errors="surrogateescape") for name in names}
    changed = {name: _ASSIGN_RAW.sub("", _COPY_IN_HALVES.sub(r"\1", text)) for name, text in texts.items()}
    changed |= {name: shown(name) + changed[name] for name in DECLARED_IN} | {"simt/hidden.h": hidden()}
    others = _FOR_BOTH | _ON_CPU | dict.fromkeys(_IN_STD, "simt/cuda_std.h")
    headers = changed | _leading(others, _EMPTY_ON_CPU)
    return headers, name_of(headers)


@functools.cache
def _headers_for_nvrtc() -> tuple[dict[str, str], str]:
    texts = _FOR_NVRTC | {file.name: file.read_text(encoding="utf-8") for file in FOR_NVRTC.iterdir()}
    return texts, name_of(texts)


def nvrtc_folder() -> Path:
    """The folder of the headers for NVRTC, in the cache."""
    return folder_of(*_headers_for_nvrtc())


def folder_of(headers: Mapping[str, str], name: str = "") -> Path:
    """Return a folder in the cache with headers of these names and texts. Its own `name` follows from them."""
    folder = cache_dir() / (name or name_of(headers))
    if not folder.exists():
        made = Path(tempfile.mkdtemp(dir=cache_dir(), prefix=UNFINISHED))
        for header, text in headers.items():
            (made / header).parent.mkdir(parents=True, exist_ok=True)
            (made / header).write_text(text, encoding="utf-8", errors="surrogateescape")
        try:
            made.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(made)
            if not folder.exists():
                raise
    return used(folder)


def name_of(headers: Mapping[str, str]) -> str:
    """Return the name of the folder that has headers of these names and texts, in any order.

    Names that come from a set have another order in each process, and NVRTC's results are kept under this name.
    """
    return f"headers-{digest(*(part for header in sorted(headers.items()) for part in header))}"


@functools.cache
def our_headers() -> str:
    """Return a digest of the C++ of cudascope: the runtime, its headers and the stand-ins."""
    return content_of(*_OURS)


def content_of(*folders: Path) -> str:
    """Return a digest of all files in folders of cudascope."""
    files = sorted(f"{place}/{file}" for folder in folders for place, _, files in os.walk(folder) for file in files)
    start = len(str(_HERE.parent))
    return digest(*(part for file in files for part in (file[start:], _start_of(file, None))))


@functools.cache
def nvidia_version() -> str:
    """Return what identifies NVIDIA's headers, and those of CCCL, which come in a wheel of their own."""
    names = ("cuda_runtime_api.h", "cuda/std/__cccl/version.h")
    found = [folder / name for folder in nvidia_folders() for name in names if (folder / name).is_file()]
    return digest(*(part for file in found for part in (str(file.stat().st_size), _start_of(file, 1 << 14))))


def lenient_folders(included: Included) -> list[Path]:
    """The folder by which a compiler finds the headers beside the source that it would not find, if there are any.

    The source's folder itself would hide the system's headers of the same names.
    """
    forwarders = {name: f'#include "{path}"\n' for name, path in included.lenient.items()}
    return [folder_of(forwarders)] if forwarders else []


def _start_of(file: str | Path, num_bytes: int | None) -> bytes:
    with open(file, "rb") as opened:
        return opened.read(num_bytes)


@functools.lru_cache(maxsize=10_000)
def is_foreign(file: str) -> bool:
    """Whether `file`, as a compiler names it, is a header of cudascope or of NVIDIA, or stands for no file."""
    path, kept = PurePath(file), cache_dir()
    if file.startswith("<") or any(path.is_relative_to(folder) for folder in _OURS):
        return True
    if path.is_relative_to(kept) and any(map(_IN_CACHE.fullmatch, path.relative_to(kept).parts[:1])):
        return True
    try:
        return any(path.is_relative_to(folder) for folder in nvidia_folders())
    except CompileError:  # they are not installed
        return False
