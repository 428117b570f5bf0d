"""The folders of C++ that come with cudascope, and the folder of NVIDIA's headers."""

import functools
import sysconfig
from pathlib import Path

from cudascope.cpp.source import CompileError

_HERE = Path(__file__).parent
STAND_INS = _HERE / "stand_ins"  # the device side of other libraries' headers
FOR_NVRTC = _HERE / "include"  # headers of the host's compiler, whose content NVRTC has built in or lacks
RUNTIME = _HERE.parent / "cpu" / "runtime"  # the C++ side of the runner
HEADERS = _HERE.parent / "cpu" / "include"  # what a kernel can include, simt.h among it


@functools.cache
def nvidia_headers() -> Path:
    """The folder of cuda_fp16.h and its like: in the nvidia-cuda-runtime wheel, or an installed toolkit's."""
    purelib = Path(sysconfig.get_paths()["purelib"])
    places = [purelib / "nvidia" / "cu13" / "include", purelib / "nvidia" / "cuda_runtime" / "include"]
    try:
        from cuda.pathfinder import find_nvidia_header_directory

        places.insert(0, Path(find_nvidia_header_directory("cudart") or purelib))
    except ImportError:
        pass
    found = next((place for place in places if (place / "cuda_fp16.h").is_file()), None)
    if found is None:
        raise CompileError(
            "compiling CUDA C++ needs NVIDIA's headers (cuda_fp16.h): "
            "pip install nvidia-cuda-runtime, or 'attention-page-by-page[cuda]'"
        )
    return found
