"""The heuristic dataflow: which product suits how many rows, measured once and looked up at each product (lesson 8).

A decode step multiplies M rows, one per sequence, with weights [N, K]. Three products are there for it:

    M < M1         gemv        on CUDA cores: nothing is padded, but a weight is used for a few rows only
    M1 ≤ M < M2    flat_gemm   on tensor cores: rows are padded to a multiple of 8
    M2 ≤ M         matmul      torch's

Where one overtakes the other, at the inflection points M1 and M2, depends on [N, K] and on the device.
Hong et al. 2023, "FlashDecoding++", section 5.
"""

import contextlib
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
from torch.nn.functional import linear as matmul

from pagewise.flash_decoding_plus_plus.flat_gemm import on_cuda_cores, on_tensor_cores, tensor_cores_take
from pagewise.tools.checks import FLOATS, check_counts
from pagewise.tools.device import wants_gradient
from pagewise.tools.timing import measure


def _flat_gemm(x: Tensor, w: Tensor) -> Tensor:
    """Multiply on tensor cores where they take x, else on CUDA cores."""
    return (on_tensor_cores if tensor_cores_take(x) else on_cuda_cores)(x, w)


PRODUCTS: dict[str, Callable[..., Tensor]] = {"gemv": on_cuda_cores, "flat_gemm": _flat_gemm, "matmul": matmul}
MAX_ROWS = 64  # of gemv and flat_gemm
# Below 8 each number of rows is timed; then both ends of each step of 8, to which flat_gemm pads.
NUM_ROWS = (*range(1, 9), *(M for step in range(8, MAX_ROWS, 8) for M in (step + 1, step + 8)))
HOPELESS = 8.0  # times the fastest: not timed for more rows
VERSION = 1  # of the file

Shape = tuple[int, int]  # [N, K]
Times = Mapping[str, Mapping[int, float]]  # seconds of each product by its name and the number of rows


def product_for(M: int, M1: int, M2: int) -> str:
    """The rule: the name of the product for M rows."""
    return "gemv" if M < M1 else "flat_gemm" if M < M2 else "matmul"


def inflection_points(times: Times) -> tuple[int, int]:
    """(M1, M2), 1 ≤ M1 ≤ M2 ≤ 65, for which the rule loses least: of all pairs, the least product of the times.

    A product and not a sum, so that each number of rows weighs the same. All of the curves decide, not the first place
    where two of them cross, for noise makes them cross anywhere. Ties go to torch's matmul, then to flat_gemm.

    Args:
        times: of "matmul" at all numbers of rows; what another product lacks was too slow to be timed.
    """
    rows = sorted(times["matmul"])
    logs = {name: [math.log(times.get(name, {}).get(M, math.inf)) for M in rows] for name in PRODUCTS}
    points = [1, *rows[1:], MAX_ROWS + 1]

    def lost(pair: tuple[int, int]) -> float:
        return sum(logs[product_for(M, *pair)][i] for i, M in enumerate(rows))

    return min(((M1, M2) for M2 in points for M1 in points if M1 <= M2), key=lost)


def product_times(N: int, K: int, *, device: torch.device, dtype: torch.dtype) -> dict[str, dict[int, float]]:
    """Seconds of each product with weights [N, K], for `NUM_ROWS`; taken in turns, on a GPU from a cold L2 cache.

    On a CPU, gemv and flat_gemm run in the CPU runner, some thousand times as slow as torch: what takes more than
    `HOPELESS` times as long as the fastest is not timed for more rows. For float32 flat_gemm is gemv.
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
    """The inflection points of weights [N, K] of one dtype on one device, and `linear`, which chooses by them.

    Attributes:
        device: what it was profiled on, as `device_label` says it.
        dtype: of x and w.
        table: (M1, M2) by [N, K].

    Raises:
        ValueError: this machine has no such device; or a size or point is out of range.
    """

    device: str
    dtype: torch.dtype
    table: dict[Shape, tuple[int, int]]
    _devices: frozenset[torch.device] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        here = {device: device_label(device) for device in _devices_here()}
        object.__setattr__(self, "_devices", frozenset(one for one, label in here.items() if label == self.device))
        if not self._devices:
            has = " and ".join(dict.fromkeys(here.values()))
            raise ValueError(f"the table was profiled on {self.device}, this machine has {has}: profile here")
        for (N, K), (M1, M2) in self.table.items():
            if N < 1 or K < 1 or not 1 <= M1 <= M2 <= MAX_ROWS + 1:
                limits = f"N and K must be at least 1, and 1 <= M1 <= M2 <= {MAX_ROWS + 1}"
                raise ValueError(f"{limits}; got N = {N}, K = {K}, M1 = {M1}, M2 = {M2}")

    @classmethod
    def profile(
        cls, shapes: Sequence[Shape], device: torch.device | str, *, dtype: torch.dtype | None = None
    ) -> "Dataflow":
        """Time all products for weights [N, K] of each of `shapes` on `device`, and find their inflection points.

        Args:
            shapes: (N, K) of a model's linear layers: `linear_shapes` lists them.
            dtype: default float32 on a CPU, float16 on a GPU.

        On a CPU, where gemv and flat_gemm are simulated, nearly all becomes matmul: see `product_times`.
        """
        device = torch.device(device)
        if device == torch.device("cuda") and torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        if device not in (here := _devices_here()):
            raise ValueError(f"device must be one of this machine's, {', '.join(map(str, here))}, got {device}")
        dtype = dtype or (torch.float16 if device.type == "cuda" else torch.float32)
        if dtype not in FLOATS:
            raise TypeError(f"dtype must be float32, float16 or bfloat16, got {dtype}")
        for N, K in shapes:
            check_counts(N=N, K=K)
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            points = {
                (N, K): inflection_points(product_times(N, K, device=device, dtype=dtype))
                for N, K in dict.fromkeys(map(tuple, shapes))
            }
        return cls(device_label(device), dtype, points)

    def linear(self, x: Float[Tensor, "*rows K"], w: Float[Tensor, "N K"]) -> Float[Tensor, "*rows N"]:
        """x wᵀ, by the product that the table has for x's number of rows.

        A shape or dtype that was not profiled goes to torch's matmul; so does what needs a gradient, has no rows or
        whose weights have rows that are not whole. What does not fit together raises torch's own error.

        Raises:
            ValueError: x is on another device than the table's.
        """
        if x.device not in self._devices:
            raise ValueError(f"the table was profiled on {self.device}, x is on {device_label(x.device)}")
        M = x.shape[:-1].numel()
        M1, M2 = self.table.get(tuple(w.shape), (1, 1))
        if not 0 < M < M2 or not self._takes(x, w):
            return matmul(x, w)
        product = few_rows if torch.compiler.is_compiling() else _few_rows  # called as an op it costs some µs more
        return product(x.reshape(M, -1), w, product_for(M, M1, M2)).view(*x.shape[:-1], -1)

    def _takes(self, x: Tensor, w: Tensor) -> bool:
        """Whether gemv and flat_gemm can multiply these, of a shape that was profiled."""
        fit = x.dtype == w.dtype == self.dtype and x.device == w.device and x.shape[-1] == w.shape[-1]
        learns = wants_gradient(x, w)
        return fit and not learns and w.stride(-1) == 1

    def inflections(self, N: int, K: int) -> tuple[int, int]:
        """(M1, M2) of weights [N, K]. ValueError if they were not profiled."""
        if (N, K) not in self.table:
            has = ", ".join(map(str, map(list, self.table))) or "nothing"
            raise ValueError(f"weights [{N}, {K}] were not profiled; the table has {has}")
        return self.table[N, K]

    def save(self, path: Path | str) -> None:
        """Write the table as JSON."""
        entries = [{"N": N, "K": K, "M1": M1, "M2": M2} for (N, K), (M1, M2) in self.table.items()]
        dtype = str(self.dtype).removeprefix("torch.")
        content = {"version": VERSION, "device": self.device, "dtype": dtype, "inflections": entries}
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path | str) -> "Dataflow":
        """The table that `save` wrote.

        Raises:
            ValueError: it was profiled on a device that this machine does not have, both are named; or the file is
                damaged, and what is wrong is named.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            _check_fields("the file", content, {"version": int, "device": str, "dtype": str, "inflections": list})
            if content["version"] != VERSION:
                raise ValueError(f"version must be {VERSION}, got {content['version']}")
            dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}
            if content["dtype"] not in dtypes:
                raise ValueError(f"dtype must be one of {', '.join(dtypes)}, got {content['dtype']!r}")
            table = {}
            for number, entry in enumerate(content["inflections"], start=1):
                _check_fields(f"entry {number}", entry, dict.fromkeys(("N", "K", "M1", "M2"), int))
                table[entry["N"], entry["K"]] = entry["M1"], entry["M2"]
            return cls(content["device"], dtypes[content["dtype"]], table)
        except ValueError as error:  # what is not JSON raises one too
            raise ValueError(f"{path}: {error}") from None


def _few_rows(x: Tensor, w: Tensor, name: str) -> Tensor:
    return PRODUCTS[name](x, w)


few_rows = torch.library.custom_op("pagewise::few_rows", _few_rows, mutates_args=())  # for torch.compile


@few_rows.register_fake
def _(x, w, name):
    return x.new_empty(len(x), len(w))


def device_label(device: torch.device) -> str:
    """What times depend on: a GPU's name, architecture and SMs; of a CPU, its kind and cores."""
    if device.type != "cuda":
        return f"{device.type.upper()} ({platform.machine()}, {os.cpu_count()} cores)"
    about = torch.cuda.get_device_properties(device)
    return f"{about.name} (sm_{about.major}{about.minor}, {about.multi_processor_count} SMs)"


def _devices_here() -> list[torch.device]:
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]


def _check_fields(what: str, value: object, kinds: Mapping[str, type]) -> None:
    """`value` must be an object with these fields, of these types; a bool is no number."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be an object, got {type(value).__name__}")
    if missing := [name for name in kinds if name not in value]:
        raise ValueError(f"{what} lacks {', '.join(missing)}")
    for name, kind in kinds.items():
        if type(value[name]) is not kind:
            raise ValueError(f"{name} of {what} must be {kind.__name__}, got {value[name]!r}")
