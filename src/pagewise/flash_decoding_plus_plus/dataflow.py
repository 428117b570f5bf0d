"""The heuristic dataflow: the best product for each number of rows is measured once and then looked up (lesson 8).

A decode step multiplies M rows, one per sequence, with weights [N, K]. There are three products for it.

    M < M1         gemv        on CUDA cores. Nothing is padded, but few rows share a weight.
    M1 ≤ M < M2    flat_gemm   on tensor cores. The rows are padded to a multiple of 8.
    M2 ≤ M         matmul      of torch.

The inflection points M1 and M2 depend on [N, K] and on the device. FlashDecoding++, Hong et al. 2023, section 5.
"""

import json
import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from pagewise.flash_decoding_plus_plus.flat_gemm import few_rows
from pagewise.tools.checks import FLOATS, check_counts
from pagewise.tools.products import linear as matmul
from pagewise.tools.timing import measure
from pagewise.tools.transforms import derivative_of

PRODUCTS: dict[str, Callable[..., Tensor]] = {
    "gemv": partial(few_rows, tensor_cores=False),
    "flat_gemm": partial(few_rows, tensor_cores=True),
    "matmul": matmul,
}
MAX_ROWS = 64  # of gemv and flat_gemm
# Every number of rows up to 8 is timed, then both ends of each step of 8, because flat_gemm pads to multiples of 8.
NUM_ROWS = (*range(1, 9), *(M for step in range(8, MAX_ROWS, 8) for M in (step + 1, step + 8)))
HOPELESS = 8.0  # a product that takes this many times as long as the fastest is not timed for more rows
VERSION = 1  # of the file

Shape = tuple[int, int]  # [N, K]
Times = Mapping[str, Mapping[int, float]]  # seconds of each product by its name and the number of rows


def product_for(M: int, M1: int, M2: int) -> str:
    """Return the name of the product that the rule chooses for M rows."""
    return "gemv" if M < M1 else "flat_gemm" if M < M2 else "matmul"


def inflection_points(times: Times) -> tuple[int, int]:
    """Return the pair (M1, M2), 1 ≤ M1 ≤ M2 ≤ 65, with the least product of the times that the rule leads to.

    In a product of times, unlike a sum, each number of rows has the same weight. The whole curves decide, because
    noise makes two curves cross in many places. Ties go to torch's matmul, then to flat_gemm.

    Args:
        times: "matmul" has a time for each number of rows. A time that another product lacks counts as infinite.
    """
    rows = sorted(times["matmul"])
    points = [1, *rows[1:], MAX_ROWS + 1]

    def lost(pair: tuple[int, int]) -> float:
        return sum(math.log(times.get(product_for(M, *pair), {}).get(M, math.inf)) for M in rows)

    return min(((M1, M2) for M2 in points for M1 in points if M1 <= M2), key=lost)


def product_times(N: int, K: int, *, device: torch.device, dtype: torch.dtype) -> dict[str, dict[int, float]]:
    """Return the seconds of each product with weights [N, K] for `NUM_ROWS`, measured in turns.

    On a GPU, the L2 cache is cold. On a CPU, gemv and flat_gemm are simulated and about a thousand times as slow as
    torch. In float32, flat_gemm is not timed, because it is gemv.
    """
    w = torch.randn(N, K, device=device).to(dtype)
    times = {name: {} for name in PRODUCTS}
    hopeful = [name for name in PRODUCTS if name != "flat_gemm" or dtype != torch.float32]
    for M in NUM_ROWS:
        x = torch.randn(M, K, device=device).to(dtype)
        calls = {name: partial(PRODUCTS[name], x, w) for name in hopeful}
        seconds = measure(calls, repeats=1, warmup=1, cold=True)
        limit = HOPELESS * min(seconds.values())
        hopeful = [name for name in hopeful if name == "matmul" or seconds[name] <= limit]
        seconds |= measure({name: calls[name] for name in hopeful}, cold=True)
        for name, taken in seconds.items():
            times[name][M] = taken
    return times


@dataclass(frozen=True)
class Dataflow:
    """The inflection points of weights [N, K] of one dtype on one device. `linear` chooses the product by them.

    Raises:
        ValueError, TypeError: this machine does not have the device, or a size or point is out of range or no int.
    """

    device: str  # the `device_label` of the device that was profiled
    dtype: torch.dtype  # of x and w
    table: dict[Shape, tuple[int, int]]  # (M1, M2) by (N, K)
    _devices: frozenset[torch.device] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        here = {device: device_label(device) for device in _devices_here()}
        object.__setattr__(self, "_devices", frozenset(one for one, label in here.items() if label == self.device))
        if not self._devices:
            has = " and ".join(dict.fromkeys(here.values()))
            raise ValueError(f"the table was profiled on {self.device}, this machine has {has}: profile here")
        for (N, K), (M1, M2) in self.table.items():
            check_counts(N=N, K=K, M1=M1, M2=M2)
            if not M1 <= M2 <= MAX_ROWS + 1:
                raise ValueError(f"weights [{N}, {K}] must have 1 <= M1 <= M2 <= {MAX_ROWS + 1}, got {M1} and {M2}")

    @classmethod
    def profile(
        cls, shapes: Sequence[Shape], device: torch.device | str, *, dtype: torch.dtype | None = None
    ) -> "Dataflow":
        """Time all products on `device` for weights of each of the `shapes`, and return their inflection points.

        Args:
            shapes: (N, K) of the linear layers of a model.
            dtype: the default is float32 on a CPU and float16 on a GPU.
        """
        device = torch.device(device)
        if device == torch.device("cuda") and torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        if device not in (here := _devices_here()):
            raise ValueError(f"device must be one of this machine's, {', '.join(map(str, here))}, got {device}")
        dtype = dtype or (torch.float16 if device.type == "cuda" else torch.float32)
        if dtype not in FLOATS:
            raise TypeError(f"dtype must be float32, float16 or bfloat16, got {dtype}")
        shapes = [*shapes]
        for N, K in shapes:
            check_counts(N=N, K=K)
        with torch.cuda.device(device if device.type == "cuda" else -1):  # −1: no GPU becomes the current one
            points = {
                (N, K): inflection_points(product_times(N, K, device=device, dtype=dtype))
                for N, K in dict.fromkeys(map(tuple, shapes))
            }
        return cls(device_label(device), dtype, points)

    def linear(
        self, x: Float[Tensor, "*rows K"], w: Float[Tensor, "N K"], bias: Float[Tensor, " N"] | None = None
    ) -> Float[Tensor, "*rows N"]:
        """Return x wᵀ + bias, computed by the product that the table has for the number of rows of x.

        matmul rounds once, after it has added the bias. gemv and flat_gemm round x wᵀ to its dtype before.

        torch's matmul takes every shape and dtype that was not profiled, tensors that need a derivative, an x without
        rows, and weights whose rows are not contiguous. Under autocast it takes all, so that the dtype of the result
        does not depend on the number of rows. Tensors that do not fit together raise torch's own error, and an x on
        another device than the table's a ValueError.
        """
        if x.device not in self._devices:
            raise ValueError(f"the table was profiled on {self.device}, x is on {device_label(x.device)}")
        M = x.shape[:-1].numel()
        M1, M2 = self.table.get(tuple(w.shape), (1, 1))
        fit = x.dtype == w.dtype == self.dtype and x.device == w.device and x.shape[-1] == w.shape[-1]
        if bias is not None:
            fit = fit and (bias.dtype, bias.device, bias.shape) == (x.dtype, x.device, w.shape[:1])
        autocast = torch.is_autocast_enabled(x.device.type)
        if not 0 < M < M2 or not fit or w.stride(-1) != 1 or autocast or derivative_of(x, w, bias):
            return matmul(x, w, bias)
        out = PRODUCTS[product_for(M, M1, M2)](x.reshape(M, -1), w).view(*x.shape[:-1], -1)
        return out if bias is None else out + bias

    def inflections(self, N: int, K: int) -> tuple[int, int]:
        """Return (M1, M2) of weights [N, K]. Raises ValueError if the shape was not profiled."""
        if (N, K) not in self.table:
            has = ", ".join(map(str, map(list, self.table))) or "nothing"
            raise ValueError(f"weights [{N}, {K}] were not profiled; the table has {has}")
        return self.table[N, K]

    def save(self, path: Path | str) -> None:
        """Write the table as JSON."""
        entries = [{"N": N, "K": K, "M1": M1, "M2": M2} for (N, K), (M1, M2) in self.table.items()]
        of_all = {"version": VERSION, "device": self.device, "dtype": str(self.dtype).removeprefix("torch.")}
        Path(path).write_text(json.dumps(of_all | {"inflections": entries}, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path | str) -> "Dataflow":
        """Read the table that `save` wrote. Raises ValueError if it is none, or was profiled on another device."""
        dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if content["version"] != VERSION:
                raise ValueError(f"version must be {VERSION}, got {content['version']}")
            table = {(entry["N"], entry["K"]): (entry["M1"], entry["M2"]) for entry in content["inflections"]}
            return cls(content["device"], dtypes[content["dtype"]], table)
        except (KeyError, TypeError) as error:  # a field is missing or has another type
            raise ValueError(f"{path}: not a saved Dataflow ({type(error).__name__}: {error})") from error
        except ValueError as error:  # the file is not JSON, or a value is out of range
            raise ValueError(f"{path}: {error}") from None


def device_label(device: torch.device) -> str:
    """Return the label of a device: name, architecture and SMs of a GPU, or architecture and cores of a CPU."""
    if device.type != "cuda":
        return f"{device.type.upper()} ({platform.machine()}, {os.cpu_count()} cores)"
    about = torch.cuda.get_device_properties(device)
    return f"{about.name} (sm_{about.major}{about.minor}, {about.multi_processor_count} SMs)"


def _devices_here() -> list[torch.device]:
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
