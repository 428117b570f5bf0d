"""How fast are products with few rows? gemv and flat_gemm against cuBLAS, for M = 1 … 64 rows (lesson 8).

    python -m pagewise.experiments.flat_gemm_speed --record lessons/measurements/flat_gemm.json

Reading the weights takes most of the time of such a product. The measure is therefore bytes over time, as a fraction
of the rate of a plain copy on the same machine. The L2 cache is cold, because it could hold the smallest weights. The
shapes are those of Llama-2-7B. The target, for M ≤ 8, is the speed of torch's matmul, which is cuBLAS. The same records
give the table of inflection points. `pagewise.experiments.speed` says which shapes are timed where.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pagewise.experiments import speed
from pagewise.experiments.speed import AGAIN
from pagewise.flash_decoding_plus_plus.dataflow import NUM_ROWS, PRODUCTS, Times, inflection_points
from pagewise.flash_decoding_plus_plus.flat_gemm import on_tensor_cores
from pagewise.tools.benchmark import Candidate
from pagewise.tools.records import Record

# [N, K] of Q, K and V together; of the output projection; of gate and up; of down.
LLAMA_2_7B = ((12288, 4096), (4096, 4096), (11008, 4096), (4096, 11008))
STAGES = (2, 4, 8)  # of the ring; two are the paper's double buffer


class Shape(NamedTuple):
    """x [M, K] times weights [N, K]."""

    M: int
    N: int
    K: int

    @property
    def flops(self) -> int:
        """A multiplication and an addition for each weight and row."""
        return 2 * self.M * self.N * self.K

    def bytes(self, itemsize: int) -> int:
        """The bytes of x, the weights and the result, each counted once."""
        return (self.M * self.K + self.N * self.K + self.M * self.N) * itemsize


# Targets are set for few rows: these come first.
_ROWS = list(dict.fromkeys((1, 2, 4, 8, *NUM_ROWS)))
SHAPES = [Shape(M, N, K) for M in _ROWS for N, K in LLAMA_2_7B]
SMALLEST = [Shape(M, 64, 128) for M in (1, 12)]
METHODS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **PRODUCTS,
    **{f"flat_gemm, {n} stages": partial(on_tensor_cores, num_stages=n) for n in STAGES},
}
METHODS[f"gemv{AGAIN}"] = METHODS["gemv"]


class Trials(speed.Trials):
    """The benchmark of this module."""

    title, dtype, shapes, smallest = "products with few rows", torch.float16, SHAPES, SMALLEST
    first = "16: M = 1, 2, 4 and 8"

    @classmethod
    def methods(cls, device: torch.device, shape: Shape) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
        return METHODS

    def build(self, shape: Shape) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor]]:
        generator = torch.Generator(device=self.device).manual_seed(0)
        x, w = (
            torch.randn(rows, shape.K, generator=generator, device=self.device, dtype=self.dtype)
            for rows in (shape.M, shape.N)
        )
        return [(x, w)], [x.double() @ w.double().T]

    def runs(self, method: str) -> list[Candidate]:
        return [partial(METHODS[method], x, w) for x, w in self.inputs]


def recorded_times(found: Sequence[Record]) -> dict[str, dict[tuple[int, int], Times]]:
    """Return the seconds of each product by device and [N, K], as `product_times` gives them."""
    times = {}
    for r in found:
        if r.what in PRODUCTS and r.seconds:
            of_shape = times.setdefault(r.device, {}).setdefault((r.shape["N"], r.shape["K"]), {})
            of_shape.setdefault(r.what, {})[r.shape["M"]] = r.seconds
    return times


def recorded_inflections(found: Sequence[Record]) -> dict[str, dict[tuple[int, int], tuple[int, int]]]:
    """Return (M1, M2) by device and [N, K], from the recorded times."""
    return {
        device: {shape: inflection_points(times) for shape, times in shapes.items() if "matmul" in times}
        for device, shapes in recorded_times(found).items()
    }


def draw(times: Times, *, title: str, caption: str | None = None) -> None:
    """Draw the seconds of each product over the number of rows, and the inflection points."""
    import matplotlib.pyplot as plt

    from pagewise import figures

    rows, (M1, M2) = sorted(times["matmul"]), inflection_points(times)
    _, ax = plt.subplots(figsize=(6.4, 3.6))
    figures.lines(
        rows,
        {name: [1e6 * taken.get(M, float("nan")) for M in rows] for name, taken in times.items() if taken},
        title=f"{title}: M1 = {M1}, M2 = {M2}",
        xlabel="rows M",
        ylabel="µs",
        logx=True,
        logy=True,
        caption=caption,
        ax=ax,
    )
    for M in {M1, M2}:
        ax.axvline(M, color="#8a8a99", lw=1, ls=":", zorder=0)
    figures.show()


def main() -> None:
    """Run the command line and print the inflection points."""
    found = speed.command(Trials)
    for device, shapes in recorded_inflections(found).items():
        for (N, K), (M1, M2) in shapes.items():
            print(f"{device}, weights [{N}, {K}]: M1 = {M1}, M2 = {M2}")


if __name__ == "__main__":
    main()
