"""The choice of the device that computes, and of the way in which Triton runs on it.

Triton reads `TRITON_INTERPRET` when it is imported and when a kernel is defined, so the choice falls once, when
`pagewise` is imported: with a GPU kernels are compiled for it; without one they run in Triton's interpreter on CPU
tensors. Setting `TRITON_INTERPRET` yourself (0 or 1) before importing pagewise overrides the choice.
"""

import contextlib
import importlib.metadata
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pagewise.tools.architecture import Architecture, architecture, compiled_for
from pagewise.tools.transforms import Derivative, has_values, lacks
from pagewise.tools.triton_interpreter import spare_the_interpreter

NO_TRITON = (
    "Triton exists for Linux only: run this lesson in the container, on Colab, in Codespaces or under WSL. "
    "README.md says how."
)
_interpreter = threading.RLock()
_triton_came_first = False
_TRITON_CAME_FIRST = (
    "triton was imported before pagewise on a machine without a GPU, so its kernels cannot be interpreted: "
    "import pagewise before triton, or set TRITON_INTERPRET=1 in the environment"
)


def best_device() -> torch.device:
    """The device to compute on: the current CUDA device if there is one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def choose_triton_mode() -> None:
    """Make Triton interpret its kernels if there is no GPU and the environment does not say. Called on import."""
    if "TRITON_INTERPRET" in os.environ or torch.cuda.is_available():
        return
    global _triton_came_first
    _triton_came_first = "triton" in sys.modules
    os.environ["TRITON_INTERPRET"] = "1"


def explain_missing_triton() -> None:
    """Add the remedy to the error of a notebook that imports Triton where Triton is not installed. Called on import."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = get_ipython() if get_ipython else None
    if not shell or triton_mode() != "unavailable":
        return

    def show(shell: Any, kind: type, error: ModuleNotFoundError, trace: Any, tb_offset: int | None = None) -> None:
        if (error.name or "").partition(".")[0] == "triton":
            error.add_note(NO_TRITON)
        shell.showtraceback((kind, error, trace), tb_offset=tb_offset)

    shell.set_custom_exc((ModuleNotFoundError,), show)


def triton_mode() -> str:
    """How Triton kernels run here: "compiled", "interpreted", or "unavailable"."""
    if compiled_for():
        return "compiled"
    if importlib.util.find_spec("triton") is None:
        return "unavailable"
    return "interpreted" if os.environ.get("TRITON_INTERPRET") == "1" else "compiled"


def check_triton_device(device: torch.device) -> None:
    """Raise unless Triton kernels can run on tensors of `device` in this process.

    Raises:
        ValueError: Triton is missing, or compiles for a GPU while the tensors are on the CPU.
        RuntimeError: triton was imported before pagewise could choose the interpreter, or that interpreter cannot
            work with the installed numpy.
    """
    if device.type == "cpu" and compiled_for():
        return
    mode = triton_mode()
    if mode == "unavailable":
        raise ValueError('backend="triton" needs the triton package: install it, or use backend="torch"')
    if mode == "compiled" and device.type != "cuda":
        raise ValueError(
            f"tensors are on {device}, but Triton compiles for the GPU in this process: move them to "
            f'{best_device()}, use backend="torch", or set TRITON_INTERPRET=1 before importing pagewise'
        )
    if _triton_came_first:
        raise RuntimeError(_TRITON_CAME_FIRST)
    if mode == "interpreted" and not _interpreter_takes_numpy():
        raise RuntimeError(
            f"the interpreter of triton {_version('triton')} fails with numpy {_version('numpy')}: "
            "install triton>=3.7, or numpy<2.4"
        )


def _interpreter_takes_numpy() -> bool:
    triton, numpy = (tuple(map(int, _version(name).split(".")[:2])) for name in ("triton", "numpy"))
    return triton >= (3, 7) or numpy < (2, 4)


def choose_backend(
    backend: str,
    device: torch.device,
    refusal: str | None = None,
    *,
    derivative: Derivative | None = None,
    has_backward: bool = False,
    others: tuple[str, ...] = (),
) -> str:
    """Return which backend computes on `device`. "auto" is triton on a GPU where triton can, else torch.

    On sm_75 (T4) "auto" is torch: Triton emits no tensor-core code there, and its kernels are many times slower.

    Args:
        backend: what the caller asked for.
        refusal: why the Triton kernel cannot take these tensors, to follow 'backend="triton"'; None: it can.
        derivative: what torch wants of the result, from `derivative_of`.
        has_backward: the Triton kernel has a backward. No kernel has another derivative.
        others: further backends of the caller, which checks itself whether they can. They are returned as they are.

    Raises:
        ValueError: `backend` is unknown, or "triton" and unable.
        RuntimeError: see `check_triton_device`, which is not asked under torch.compile.
    """
    if backend in others:
        return backend
    if backend not in ("auto", "torch", "triton"):
        *known, last = (f'"{name}"' for name in ("auto", "torch", "triton", *others))
        raise ValueError(f"backend must be {', '.join(known)} or {last}, got {backend!r}")
    if refusal is None and derivative is not None and not (has_backward and derivative == "backward"):
        refusal = lacks(derivative)
    if backend == "auto":
        takes = device.type == "cuda" and architecture(device).has_triton_tensor_cores
        backend = "triton" if takes and refusal is None else "torch"
    if backend == "triton":
        if refusal is not None:
            raise ValueError(f'backend="triton" {refusal}; backend="torch" takes it')
        if not torch.compiler.is_compiling():  # which does not see through a search for modules
            check_triton_device(device)
    return backend


def looks(check: bool | None, *tensors: Tensor) -> bool:
    """Return whether a public function looks at the numbers in these tensors, for an argument `check`.

    None means on the CPU only, because a look makes the host wait for a GPU. Traced, fake and batched tensors have no
    numbers to look at.
    """
    return (tensors[0].device.type == "cpu" if check is None else check) and has_values(*tensors)


def without_bfloat16(dtype: torch.dtype, gpu: Architecture) -> str | None:
    """Return why no kernel can take `dtype` if it is bfloat16 and `gpu` does not compute with bfloat16, else None."""
    if dtype == torch.bfloat16 and gpu.sm and not gpu.has_bfloat16:
        return f"cannot compute with bfloat16 on this GPU (sm_{gpu.sm}): use float16"
    return None


@contextlib.contextmanager
def triton_launch(device: torch.device) -> Iterator[None]:
    """Hold what a launch of Triton kernels on `device` needs. `tools.launch.launch` is the way to launch a kernel.

    On a GPU, `device` is made the current one, because Triton launches on that. In the interpreter, one thread at a
    time may launch. `cudascope.triton_compiled` needs nothing.
    """
    if compiled_for():
        yield
    elif triton_mode() == "interpreted":
        with _interpreter:
            spare_the_interpreter()
            yield
    else:
        with torch.cuda.device(device):
            yield


def banner() -> str:
    """One line for the top of a lesson: device, torch, triton, and whether Triton compiles or interprets."""
    device = best_device()
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else "CPU"
    mode = triton_mode()
    triton = "no triton" if mode == "unavailable" else f"triton {_version('triton')}, {mode}"
    return f"{name} · torch {torch.__version__} · {triton}"


def _version(package: str) -> str:
    return importlib.metadata.version(package)
