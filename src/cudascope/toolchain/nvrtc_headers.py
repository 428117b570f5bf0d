"""The headers that NVRTC lacks and nvcc has: the standard library's, and those of NVIDIA's that a kernel does not need.

CCCL has the standard library for a GPU, as cuda::std. The headers here make it std. A few have a text of their own in
the folder `include`.
"""

from functools import cache
from pathlib import Path

from cudascope.toolchain.headers import FOR_BOTH, FOR_NVRTC, folder_of, leading, name_of

ALWAYS = "cudascope_c.h"
"""The header that every source gets. CUDA's own headers include most of it, and the CPU runner's all of it."""
STANDARD = "cudascope_std.h"
"""The header for a source that uses namespace std."""

_OF_CCCL = (
    "array bit bitset chrono climits cmath complex concepts cstddef cstdint cstdlib cstring ctime functional "
    "initializer_list iterator limits memory numeric optional ratio span tuple type_traits utility variant"
)
_TEXTS = {name: f"#include <cuda/std/{name}>\n#include <{STANDARD}>\n" for name in _OF_CCCL.split()}
_TEXTS |= {
    "algorithm": f"#include <{STANDARD}>\n",
    "cfloat": "#include <float.h>\n",
    "cstdio": f"#include <{STANDARD}>\n",
}
_TEXTS |= leading(FOR_BOTH, "")
_TEXTS |= {"limits.h": "#include <cuda/std/climits>\n"}
_TEXTS |= {"string.h": "#include <cuda/std/cstring>\n", "stddef.h": "#include <cuda/std/cstddef>\n"}
# NVRTC has what kernels use of them built in: assert, printf, malloc, threadIdx, cudaError_t
_EMPTY = (
    "assert.h cassert cinttypes cuda_runtime.h cuda_runtime_api.h device_functions.h device_launch_parameters.h "
    "inttypes.h stdio.h stdlib.h time.h version"
)
_TEXTS |= dict.fromkeys(_EMPTY.split(), "")
_TEXTS |= {ALWAYS: "".join(f"#include <{name}.h>\n" for name in ("stddef", "stdint", "limits", "float", "math"))}
# The rest of CUB launches kernels.
_CUB = "adjacent_difference discontinuity exchange histogram load merge_sort radix_sort reduce scan store"
_CUB_FILES = [*(f"block/block_{name}" for name in _CUB.split()), "warp/warp_reduce", "warp/warp_scan"]
_TEXTS |= {"cub/cub.cuh": "".join(f"#include <cub/{name}.cuh>\n" for name in _CUB_FILES)}
_TEXTS |= {"cudaTypedefs.h": "#include <cuda.h>\n"}
# The headers of cuBLAS bring these two. The rest of them is for the host.
_CUBLAS = "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n"
_TEXTS |= dict.fromkeys(("cublas.h", "cublas_v2.h", "cublasLt.h", "cublasXt.h"), _CUBLAS)
# CCCL's own makes int64_t a long long for NVRTC, and nvcc's is a long.
_INTEGERS = [f"{u}int{kind}{bits}_t" for u in ("", "u") for kind in ("", "_fast", "_least") for bits in (8, 16, 32, 64)]
_INTEGERS += ["intptr_t", "uintptr_t", "intmax_t", "uintmax_t"]
_USING = "".join(f"using ::{name};\n" for name in _INTEGERS)
_TEXTS |= {
    "cuda/std/cstdint": (
        "#pragma once\n#include <cuda/std/version>\n#include <stdint.h>\n#include <cuda/std/climits>\n"
        f"_LIBCUDACXX_BEGIN_NAMESPACE_STD\n{_USING}using __cccl_intmax_t = intmax_t;\n"
        "using __cccl_uintmax_t = uintmax_t;\n_LIBCUDACXX_END_NAMESPACE_STD\n"
    )
}


@cache
def _headers() -> tuple[dict[str, str], str]:
    """The text of each header by the name in its #include, and the name of their folder."""
    texts = _TEXTS | {file.name: file.read_text(encoding="utf-8") for file in FOR_NVRTC.iterdir()}
    return texts, name_of(texts)


def folder() -> Path:
    """The folder of these headers, in the cache."""
    return folder_of(*_headers())
