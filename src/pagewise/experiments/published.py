"""Published times of attention kernels beside counted work: one model, one constant per kernel (lessons 2, 6, 7 and 8).

    python -m pagewise.experiments.published

    seconds = max(bytes / bandwidth, products of the fullest SM / peak of an SM) / constant + launches · LAUNCH

- **Bytes.** Q, K, V and O move once. What fits in L2 is taken from there, because a benchmark repeats its launch.
- **Products.** A program multiplies whole tiles: rows and keys beyond the end of a matrix are zeros that cost as much
  as others. The programs of a grid run on the SMs in waves, and a causal program visits the tiles that it can see.
  Each program also starts: START more tiles.
- **Constant.** The share of the bandwidth and of the peak that a kernel reaches. A family is one kernel for one head
  size on one GPU. Its constant is the median of the constants that fit its rows one by one.

LAUNCH, START, L2_SPEED and L2_SHARE are assumptions. Halved or doubled, each of them changes the number of rows that
fit by less than 3 % of all rows.

The null model is the roofline of the useful work over one constant: it knows no padding, waves, launches and L2. Long
prompts fit any model, so a share of rows that fit means nothing without the share of the null model beside it.

published_rows.csv has one measurement per line, as printed in its source, and published_tables.csv has the sources.
Tables were chosen before any fit, and they are whole, except for columns whose work is not counted here: kernels in
8 bits, batches of unequal lengths, backward passes, unfused decode. Some end where the copy that was read ends; their
line in published_tables.csv says so. `remark` says what is known about a row that the model misses by more than WITHIN.
Not in the model: the host, the power limit of a GPU, the clock of a benchmark.

measured_rows.csv has what we measured ourselves at such shapes, on an H200 (`measured`). This H200 tells three things
about the assumptions (lessons/measurements/constants.json). Its L2 was 1.5 times as fast as DRAM, not L2_SPEED times,
and held 40 of its 60 MiB, not L2_SHARE of them. LAUNCH is less the launch than the start of a kernel: an empty kernel
in a CUDA graph took 0.6 µs, and our smallest call, two kernels, 6.35 µs. The power limit counts: cuDNN's prompts of 1
to 20 ms took 1.03 to 1.18 times as long back to back as one by one. While all rows were measured, the GPU took up to
700 W and ran at 1485 to 1980 MHz.
"""

import csv
import functools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cudascope.gpus import GPUS, Gpu
from pagewise.experiments.decode_schedules import IN_FLIGHT, LATENCY, LAUNCH, START
from pagewise.tools.records import table
from pagewise.tools.schedule import schedule
from pagewise.tools.sizes import cdiv

WITHIN = 1.25  # a model that is right within this factor counts as right
LONG = 100e-6  # seconds from which launches, hosts and clocks matter little
ITEMSIZE = 2  # all rows have 16 bits
L2_SPEED = 3  # times as fast as DRAM, assumed for all GPUs
L2_SHARE = 0.8  # of L2 that inputs can fill and still be there when the launch is repeated
UNITS = {"us": 1e-6, "ms": 1e-3}  # others: TFLOP/s of the useful products
COLUMNS = ("table", "kernel", "gpu", "B", "H", "Hkv", "T", "S", "D", "causal", "value", "unit", "remark")


class Kernel(NamedTuple):
    """How a kernel cuts its work into programs.

    rows, keys: of a tile. A row is a query of one head.
    order: in which programs run: "launched", tile after tile of a head; "longest first"; "one per head", which visits
        all tiles of a head; "even", the keys cut so that all SMs have the same work; "even if idle", cut where programs
        would fill less than 0.8 of two slots per SM, as in FlashAttention-2; "streamed", a program reads its `keys` (0:
        all) and multiplies without tensor cores; "unfused", the scores go through memory.
    packs: heads that share a KV head share a tile.
    launches: of one call; a kernel that merges has one more, and "even if idle" has it only where it cuts.
    """

    rows: int
    keys: int
    order: str = "launched"
    packs: bool = False
    launches: int = 1
    values: int | None = None  # V is this part of K (MLA)


# FlashAttention-2's tiles are in its flash_fwd_launch_template.h, FlashAttention-3's in hopper/tile_size.h, vLLM's in
# attention_kernels.cu, ours are those of the measurement. Those of the other kernels are assumed.
KERNELS = {
    ("FlashAttention", 64): Kernel(128, 128, "one per head"),
    ("PyTorch unfused", 64): Kernel(0, 0, "unfused", launches=4),
    ("FlashAttention-2", 64): Kernel(128, 128),
    ("FlashAttention-2", 128): Kernel(128, 64),
    ("FlashAttention-2, KV cache", 64): Kernel(64, 256, "even if idle", packs=True),
    ("FlashAttention-2, KV cache", 128): Kernel(64, 128, "even if idle", packs=True),
    ("FlashAttention-3", 64): Kernel(192, 128, "longest first"),
    ("FlashAttention-3", 128): Kernel(128, 128, "longest first"),
    ("FlashAttention-3, KV cache", 128): Kernel(128, 128, "even if idle", packs=True),
    ("FlashAttention-3, pages of 8", 128): Kernel(128, 128, "even if idle", packs=True),
    ("FlashAttention-4", 64): Kernel(256, 128, "longest first"),
    ("FlashAttention-4", 128): Kernel(256, 128, "longest first"),
    ("Triton tutorial, 2023", 64): Kernel(128, 64),
    ("Triton tutorial", 64): Kernel(128, 64),
    ("Triton tutorial", 128): Kernel(128, 64),
    ("cuDNN", 64): Kernel(128, 128),
    ("cuDNN", 128): Kernel(128, 128),
    ("TLX, warp-specialized", 128): Kernel(128, 128),
    ("TLX, pipelined", 128): Kernel(128, 128),
    ("TLX for Hopper", 128): Kernel(128, 128, "longest first"),
    ("ThunderKittens", 64): Kernel(192, 128),
    ("Flash-Decoding", 128): Kernel(64, 128, "even", packs=True, launches=2),
    ("FlagAttention", 64): Kernel(16, 128, "even", packs=True, launches=2),
    ("FlagAttention", 128): Kernel(16, 128, "even", packs=True, launches=2),
    ("FlexDecoding", 64): Kernel(16, 128, "even", packs=True, launches=2),
    ("FlashInfer", 128): Kernel(16, 128, "even", packs=True),
    ("trtllm-gen", 64): Kernel(64, 128, "even", packs=True),
    ("FlashMLA", 576): Kernel(64, 64, "even", packs=True, launches=2, values=512),
    ("paged_attention_v1", 128): Kernel(1, 0, "streamed"),
    ("paged_attention_v2", 128): Kernel(1, 512, "streamed", launches=2),
    ("pagewise", 64): Kernel(128, 128, "longest first"),
    ("pagewise", 128): Kernel(128, 128, "longest first"),
    ("pagewise, KV cache", 128): Kernel(16, 64, "even if idle", packs=True),
    ("pagewise, pages", 128): Kernel(16, 64, "even if idle", packs=True),
    ("pagewise, v1", 128): Kernel(1, 0, "streamed"),
    ("pagewise, v2", 128): Kernel(1, 512, "streamed", launches=2),
}


class Row(NamedTuple):
    """A measurement: who measured which kernel on which GPU, the shape in the letters of the course, and the seconds.

    `published` is the number as printed. `source`, `address` and `assumed` are those of its table.
    """

    table: str
    kernel: str
    gpu: str
    B: int
    H: int
    Hkv: int
    T: int
    S: int
    D: int
    causal: bool
    seconds: float
    published: str
    remark: str
    source: str
    address: str
    assumed: str

    @property
    def family(self) -> tuple[str, int, str]:
        """Rows that share one constant: kernel, head size, GPU."""
        return self.kernel, self.D, self.gpu

    @property
    def shape(self) -> str:
        """The sequences × the tokens of each, such as "256 × 65,536"."""
        return f"{self.B} × {self.S:,}"

    @property
    def flops(self) -> float:
        """The useful products. A causal mask leaves half of a prompt's, as all sources count."""
        share = 0.5 if self.causal and self.T == self.S else 1
        return share * 2 * self.B * self.H * self.T * self.S * (self.D + (self._cut.values or self.D))

    @property
    def bytes(self) -> int:
        """Q, K, V read and O written once. Keys that contain the values are read once."""
        values = self._cut.values or self.D
        queries = self.B * self.H * self.T * (self.D + values)
        keys = self.B * self.Hkv * self.S * (self.D + (0 if self._cut.values else values))
        return ITEMSIZE * (queries + keys)

    @property
    def in_l2(self) -> bool:
        """Whether the bytes stay in L2 between two launches of a benchmark."""
        return self.bytes < L2_SHARE * GPUS[self.gpu].l2_bytes

    @property
    def limits(self) -> dict[str, float]:
        """The seconds that each limit allows at constant 1, without launches. The largest counts."""
        return _limits(self)

    @property
    def limit(self) -> str:
        """The name of the largest limit."""
        return max(self.limits, key=self.limits.__getitem__)

    @property
    def launching(self) -> float:
        """The seconds of the launches."""
        split = self._cut.order == "even if idle" and _is_idle(len(programs(self)), GPUS[self.gpu].num_sms)
        return (2 if split else self._cut.launches) * LAUNCH

    def model(self, constant: float) -> float:
        """Return the modelled seconds of a kernel that reaches `constant` of its limit."""
        return max(self.limits.values()) / constant + self.launching

    def null(self, constant: float) -> float:
        """Return the null model's seconds: the roofline of the useful work."""
        gpu = GPUS[self.gpu]
        return max(self.flops / peak(gpu), self.bytes / gpu.stated_bandwidth) / constant

    @property
    def bound(self) -> float:
        """The seconds that no kernel can beat: the useful products at the highest clock, and what L2 cannot hold."""
        gpu = GPUS[self.gpu]
        fastest = gpu.tensor_rate("f16", "f32") * gpu.num_sms * gpu.clock
        return max(self.flops / fastest, (self.bytes - gpu.l2_bytes) / gpu.dram_bandwidth)

    @property
    def is_possible(self) -> bool:
        """Whether the GPU that the source names can be so fast."""
        return self.seconds >= self.bound

    def fits(self, modelled: float) -> bool:
        """Whether the measurement is possible, and within WITHIN of `modelled` seconds."""
        return self.is_possible and 1 / WITHIN <= self.seconds / modelled <= WITHIN

    @property
    def _cut(self) -> Kernel:
        return KERNELS[self.kernel, self.D]


# ------------------------------------------------------------------------------------------------ the work


def peak(gpu: Gpu) -> float:
    """Return the data sheet's FLOP/s of products in float16 whose sums are in float32."""
    return gpu.stated_flops * gpu.tensor_rate("f16", "f32") / gpu.tensor_rate("f16", "f16")


def programs(row: Row) -> list[int]:
    """Return the tiles that each program of the grid multiplies, in the order of their start."""
    rows, keys, order, packs, *_ = KERNELS[row.kernel, row.D]
    group = row.H // row.Hkv if packs else 1
    heads = row.B * row.H // group
    of_head = []
    for first in range(0, row.T * group, rows):
        last = min(row.T, cdiv(first + rows, group))  # queries up to this one are in the tile
        seen = row.S - row.T + last if row.causal else row.S
        of_head.append(cdiv(seen, keys))
    if order == "one per head":
        return [sum(of_head)] * heads
    if order == "longest first":
        return [tiles for tiles in reversed(of_head) for _ in range(heads)]
    return of_head * heads


def _is_idle(programs: int, num_sms: int) -> bool:
    return programs < 0.8 * 2 * num_sms


def fullest_sm(row: Row) -> float:
    """Return the tiles that the SM with the most work multiplies, with START tiles for each program."""
    num_sms, order, tiles = GPUS[row.gpu].num_sms, KERNELS[row.kernel, row.D].order, programs(row)
    if order == "even" or (order == "even if idle" and _is_idle(len(tiles), num_sms)):
        return sum(tiles) / num_sms + START
    if min(tiles) == max(tiles):  # the schedule below in one step
        return cdiv(len(tiles), num_sms) * (START + tiles[0])
    return max(run.stop for run in schedule([(i, START + n) for i, n in enumerate(tiles)], num_sms))


@functools.cache
def _limits(row: Row) -> dict[str, float]:
    gpu, kernel = GPUS[row.gpu], KERNELS[row.kernel, row.D]
    moved, num_sms = row.bytes, gpu.num_sms
    if kernel.order == "unfused":  # scores and weights are written and read
        moved += 4 * ITEMSIZE * row.B * row.H * row.T * row.S
    speed = gpu.stated_bandwidth * (L2_SPEED if row.in_l2 and kernel.order != "unfused" else 1)
    limits = {"L2" if speed > gpu.stated_bandwidth else "DRAM": moved / speed}
    if kernel.order == "unfused":
        return limits | {"products": row.flops / peak(gpu)}
    if kernel.order == "streamed":
        keys = min(kernel.keys or row.S, row.S)
        per_sm = max(1.0, row.B * row.H * cdiv(row.S, keys) / num_sms)
        return limits | {"stream": per_sm * keys * 2 * row.D * ITEMSIZE / (IN_FLIGHT / LATENCY)}
    tile = 2 * kernel.rows * kernel.keys * (row.D + (kernel.values or row.D))
    return limits | {"products": fullest_sm(row) * tile / (peak(gpu) / num_sms)}


# ------------------------------------------------------------------------------------------------ the rows


@functools.cache
def _read(name: str = "published_rows.csv") -> tuple[Row, ...]:
    folder = Path(__file__).parent
    with open(folder / "published_tables.csv", encoding="utf-8", newline="") as file:
        tables = {line["table"]: line for line in csv.DictReader(file)}
    with open(folder / name, encoding="utf-8", newline="") as file:
        return tuple(read_row(line, tables) for line in csv.DictReader(file))


def read_row(line: dict[str, str], tables: dict[str, dict[str, str]]) -> Row:
    """Return a line of published_rows.csv as a row, its time in seconds.

    Raises:
        ValueError: a field is missing, is no positive number, or names a kernel, GPU, table or unit that is not known.
    """
    if tuple(line) != COLUMNS or None in line.values():
        raise ValueError(f"a line must have the fields {', '.join(COLUMNS)}, got {line}")
    if line["table"] not in tables:
        raise ValueError(f"table must be one of published_tables.csv, got {line['table']!r} in {line}")
    try:
        sizes = {name: int(line[name]) for name in ("B", "H", "Hkv", "T", "S", "D")}
        causal, value = bool(("0", "1").index(line["causal"])), float(line["value"])
    except ValueError:
        raise ValueError(f"sizes must be integers, causal 0 or 1, and value a number: {line}") from None
    if (line["kernel"], sizes["D"]) not in KERNELS or line["gpu"] not in GPUS:
        raise ValueError(f"kernel and head size must be in KERNELS, and gpu in cudascope.gpus: {line}")
    if not (min(sizes.values()) > 0 < value < math.inf) or sizes["H"] % sizes["Hkv"] or sizes["T"] > sizes["S"]:
        raise ValueError(f"sizes and value must be positive, H a multiple of Hkv, and T at most S: {line}")
    if line["unit"] not in (*UNITS, "TFLOP/s"):
        raise ValueError(f"unit must be us, ms or TFLOP/s, got {line['unit']!r} in {line}")
    names = line["table"], line["kernel"], line["gpu"]
    published = f"{line['value']} {line['unit'].replace('us', 'µs')}"
    of_table = (tables[line["table"]][name] for name in ("source", "address", "assumed"))
    row = Row(*names, *sizes.values(), causal, value, published, line["remark"], *of_table)
    return row._replace(seconds=value * UNITS[line["unit"]] if line["unit"] in UNITS else row.flops / (value * 1e12))


def rows(**fields: object) -> list[Row]:
    """Return the published rows whose fields have these values, in the order of their tables; without any, all rows.

        rows(table="flash_decoding", kernel="FlashAttention-2")

    Raises:
        ValueError: there is no such field, or no row has these values.
    """
    for name in fields:
        if name not in Row._fields:
            raise ValueError(f"a row has no field {name!r}; its fields are {', '.join(Row._fields)}")
    found = [row for row in _read() if all(getattr(row, name) == value for name, value in fields.items())]
    if not found:
        known = {name: sorted({getattr(row, name) for row in _read()}) for name in fields}
        raise ValueError(f"no row has {fields}; the values of these fields are {known}")
    return found


def measured(table: str = "h200") -> list[Row]:
    """Return the rows that we measured: back to back in a CUDA graph, or ("h200_cold") one by one, from a cold L2.

    Raises:
        ValueError: there is no such table.
    """
    found = [row for row in _read("measured_rows.csv") if row.table == table]
    if not found:
        raise ValueError(f"table must be h200 or h200_cold, got {table!r}")
    return found


def constant(measured: Sequence[Row]) -> float:
    """Return the constant of a family: the median of the constants with which the model gives each row exactly.

    A row that its GPU cannot reach does not count. A row that its launches explain alone has an infinite constant.
    """
    fitting = [
        max(row.limits.values()) / (row.seconds - row.launching) if row.seconds > row.launching else math.inf
        for row in measured
        if row.is_possible
    ]
    if not fitting:
        raise ValueError("a constant needs at least one row that its GPU can reach")
    return statistics.median(fitting)


def null_constant(measured: Sequence[Row]) -> float:
    """Return the constant of the null model for a family, in the same way."""
    return statistics.median(row.null(1.0) / row.seconds for row in measured if row.is_possible)


def families(of: Sequence[Row] | None = None) -> dict[tuple[str, int, str], list[Row]]:
    """Return these rows, or all published ones, by (kernel, head size, GPU)."""
    found: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows() if of is None else of:
        found.setdefault(row.family, []).append(row)
    return found


class Judged(NamedTuple):
    """A row, its family's constant, and the seconds of the model and of the null model."""

    row: Row
    constant: float
    modelled: float
    null: float

    @property
    def fits(self) -> bool:
        """Whether the model is right within WITHIN."""
        return self.row.fits(self.modelled)


def judged(of: Sequence[Row] | None = None) -> list[Judged]:
    """Return these rows, or all published ones, with both models, family by family."""
    found = []
    for family in families(of).values():
        c, n = constant(family), null_constant(family)
        found += [Judged(row, c, row.model(c), row.null(n)) for row in family]
    return found


def foretold(table: str = "h200") -> list[Judged]:
    """Return our rows on an H200 of each kernel that others timed on an H100, with the constants of those H100s."""
    others, found = families(), []
    for (kernel, head_size, _), family in families(measured(table)).items():
        if of := others.get((kernel, head_size, "H100")):
            c, n = constant(of), null_constant(of)
            found += [Judged(row, c, row.model(c), row.null(n)) for row in family]
    return found


def predictions() -> dict[str, list[tuple[Row, float]]]:
    """Return rows with modelled seconds whose constant comes from other rows: another shape, GPU or kernel."""
    elsewhere = {
        "FlashAttention-2: constant of long prompts, decode": (
            rows(table="fa_307", kernel="FlashAttention-2", D=128),
            rows(table="flash_decoding", kernel="FlashAttention-2"),
        ),
        "FlashMLA: constant of an H100, on an H20": (rows(table="flashmla_h100"), rows(table="flashmla_h20")),
        "vLLM: constant of paged_attention_v1, v2": (
            rows(kernel="paged_attention_v1"),
            rows(kernel="paged_attention_v2"),
        ),
    }
    return {name: [(row, row.model(constant(of))) for row in asked] for name, (of, asked) in elsewhere.items()}


def summary(found: Sequence[Judged]) -> str:
    """Return one line: rows, families, sources, and the shares of rows within WITHIN."""

    def share(fits: Sequence[bool]) -> str:
        return f"{sum(fits)} of {len(fits)} ({sum(fits) / len(fits):.0%})"

    sources = len({each.row.source.split(",")[0] for each in found})
    constants = len({each.row.family for each in found})
    long = [each.fits for each in found if each.row.seconds >= LONG]
    null = [each.row.fits(each.null) for each in found]
    null_long = [each.row.fits(each.null) for each in found if each.row.seconds >= LONG]
    return (
        f"{len(found)} rows, {constants} constants, {sources} source{'s' * (sources > 1)}; within {WITHIN} ×: "
        f"{share([each.fits for each in found])}, of 100 µs or more {share(long)}; "
        f"null model {share(null)}, of 100 µs or more {share(null_long)}"
    )


def main() -> None:
    """Print the published rows and ours, the predictions, and the summaries."""
    found, ours = judged(), judged(measured())
    lines = []
    for row, c, modelled, _ in [*found, *ours]:
        shape = f"{row.B} × {row.H}/{row.Hkv} × {row.T:,}/{row.S:,}" + (" causal" if row.causal else "")
        times = f"{1e6 * row.seconds:,.1f}", f"{1e6 * modelled:,.1f}", f"{row.seconds / modelled:.2f}"
        lines.append((f"{row.kernel}, D {row.D}", row.gpu, shape, *times, f"{c:.3f}", row.limit, row.table, row.remark))
    header = ("kernel", "GPU", "B × H/Hkv × T/S", "measured (µs)", "model (µs)", "ratio", "constant")
    print(table((*header, "limit", "table", "remark"), lines))
    print()
    for name, pairs in predictions().items():
        ratios = [row.seconds / modelled for row, modelled in pairs]
        right = sum(row.fits(modelled) for row, modelled in pairs)
        print(f"{name}: {right} of {len(pairs)} within {WITHIN} ×, {min(ratios):.2f} to {max(ratios):.2f}")
    for name, of in {"ours: ": ours, "ours, with the constants of others' H100s: ": foretold(), "": found}.items():
        print(name + summary(of))


if __name__ == "__main__":
    main()
