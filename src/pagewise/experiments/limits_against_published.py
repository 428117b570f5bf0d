"""Published times of attention kernels, beside the lower bounds that `report.limits` gives (lessons 5 and 6).

    python -m pagewise.experiments.limits_against_published

The published shapes are too large for a CPU, so small launches are observed and their counts are scaled:

- **FlashAttention.** A program of `flash_forward_kernel` owns a tile of queries and visits J tiles of keys. Its counts
  are a + b · J exactly. Two launches of one program give a and b, and a third launch confirms them. A grid has the work
  of all its programs. DRAM is read once: Q for each program, K and V for each head.
- **Paged attention.** One sequence of the published length is observed, with all its heads. A batch of n sequences has
  n times its work, because each sequence has its own query and its own blocks.

Most of the published kernels are not ours, so their instructions are not ours either. Only the units whose work is that
of every kernel for the task count for their bounds: tensor cores and DRAM. The last column is the bound of our kernel,
with all its units. No published time may be below its bound. The bound of DRAM holds for an empty L2. vLLM's benchmark
repeats one launch, so L2 may hold a small cache from the launch before. Its times are far above the bound even so.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from cudascope import observe, triton_compiled
from cudascope.gpus import GPUS
from cudascope.watch.least_time import Work, times
from pagewise.flash_attention.tuning import Tiles
from pagewise.kernels.flash_attention import flash_forward_kernel
from pagewise.paged_attention.vllm import paged_attention_v1, paged_attention_v2
from pagewise.paged_blocks import to_vllm_layout
from pagewise.tools.launch import launch
from pagewise.tools.records import table
from pagewise.tools.sizes import cdiv

TILES = Tiles(128, 64, 8, 3)  # one of the choices of `flash_attention.tuning` for D = 128
BLOCK_SIZE = 16  # tokens in a block of the paged cache
SHARED_BY_ALL = ("tensor cores", "DRAM")


class Published(NamedTuple):
    """A published time in seconds. `tokens` are those of each sequence, `source` is where the time was published."""

    kernel: str
    gpu: str
    batch: int
    num_heads: int
    num_kv_heads: int
    tokens: int
    head_size: int
    seconds: float
    source: str
    decodes: bool = False

    @property
    def flops(self) -> int:
        """Two products of two FLOPs each for every score, without a causal mask."""
        return 4 * self.batch * self.num_heads * self.tokens**2 * self.head_size


def attention(kernel: str, gpu: str, shape: tuple[int, int, int, int], tflops: float, source: str) -> Published:
    """A forward pass of attention over sequences of (batch, heads, tokens, head size), published in TFLOP/s."""
    batch, heads, tokens, head_size = shape
    row = Published(kernel, gpu, batch, heads, heads, tokens, head_size, 1.0, source)
    return row._replace(seconds=row.flops / (tflops * 1e12))


def decode(kernel: str, gpu: str, batch: int, tokens: int, seconds: float, source: str) -> Published:
    """A decode step with 64 query heads and 8 KV heads of size 128, the default of vLLM's benchmark."""
    return Published(kernel, gpu, batch, 64, 8, tokens, 128, seconds, source, decodes=True)


PUBLISHED = (
    attention("Triton tutorial 06", "H100", (1, 16, 16384, 128), 476.753, "pytorch/benchmark #2391"),
    attention("Triton tutorial 06", "H100", (128, 8, 16384, 128), 420.122, "pytorch/benchmark #2296"),
    attention("FlashAttention-2 (SDPA)", "H100", (128, 8, 16384, 128), 304.199, "pytorch/benchmark #2296"),
    attention("cuDNN", "H100", (8, 16, 8192, 128), 581.868, "tritonbench #141"),
    attention("FlashAttention-3", "H100", (1, 16, 16384, 128), 620.73, "pytorch/benchmark #2391"),
    attention("FlashAttention-3", "H100", (4, 48, 8192, 128), 638.572, "tritonbench #1254"),
    attention("FlashAttention-3", "H100", (1, 8, 32768, 64), 514.2, "flash-attention #1438, 4.277 ms"),
    attention("FlashAttention-3", "H200", (1, 8, 32768, 64), 486.9, "flash-attention #1438, 4.517 ms"),
    attention("FlashAttention-2", "A100", (1, 16, 16384, 128), 0.73 * 312, "arXiv 2307.08691: up to 73 % of 312"),
    attention("FlashAttention-2", "B200", (8, 16, 8192, 128), 361.591, "tritonbench #171"),
    attention("FlashAttention-4", "B200", (4, 16, 8192, 128), 1534.8, "flash-attention #2280"),
    decode("vLLM paged_attention_v1", "A100", 1, 1024, 37.541e-6, "vllm #2744 (40 GB, PCIe)"),
    decode("vLLM paged_attention_v2", "A100", 1, 1024, 29.602e-6, "vllm #2744 (40 GB, PCIe)"),
    decode("vLLM paged_attention_v1", "A100", 4, 1024, 68.585e-6, "vllm #2744 (40 GB, PCIe)"),
    decode("vLLM paged_attention_v2", "A100", 4, 1024, 71.447e-6, "vllm #2744 (40 GB, PCIe)"),
    decode("FlashAttention-2, paged", "H100", 64, 256, 43.563e-6, "onnxruntime #21414"),
)

# ------------------------------------------------------------------------------------------------ small launches


def forward_work(heads: int, tokens: tuple[int, int], head_size: int, tiles: Tiles, arch: str) -> Work:
    """Return the counted work of a launch of `flash_forward_kernel` with tokens[0] queries and tokens[1] keys."""
    T, S = tokens
    q, out = (torch.zeros(1, heads, T, head_size, dtype=torch.float16) for _ in range(2))
    k, v = (torch.randn(1, heads, S, head_size).half() for _ in range(2))
    lse = torch.empty(1, heads, T)
    sizes = {"D": head_size, "BLOCK_D": head_size, "ROWS": tiles.owned, "COLS": tiles.visited, "CAUSAL": False}
    sizes |= {"group": 1, "T": T, "S": S, "scale": head_size**-0.5}
    how = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "outputs": (out, lse)}
    grid = (cdiv(T, tiles.owned), heads, 1)
    with observe(trace_limit=0) as report, triton_compiled(arch):
        launch(flash_forward_kernel, grid, q=q, k=k, v=v, out=out, lse=lse, **sizes, **how)
    return report.launches[0].work


def on_line(first: Work, second: Work, x: tuple[int, int, int]) -> Work:
    """Return the work at x[2] on the line through `first` at x[0] and `second` at x[1]."""

    def at(a: int, b: int) -> int:
        return a + (b - a) * (x[2] - x[0]) // (x[1] - x[0])

    flops = {kinds: at(first.tensor_flops[kinds], second.tensor_flops[kinds]) for kinds in second.tensor_flops}
    return Work(at(first.thread_blocks, second.thread_blocks), flops, *map(at, first[2:], second[2:]))


class FlashWork:
    """The work of `flash_forward_kernel` at any size, from launches of one program."""

    def __init__(self, head_size: int, tiles: Tiles, arch: str) -> None:
        self.tiles = tiles
        self.two, self.three, five = (
            forward_work(1, (tiles.owned, n * tiles.visited), head_size, tiles, arch) for n in (2, 3, 5)
        )
        if on_line(self.two, self.three, (2, 3, 5)) != five:
            raise RuntimeError(f"the counts of a program are not linear in its tiles: {self.two}, {self.three}, {five}")

    def of(self, num_heads: int, tokens: int) -> Work:
        """Return the work for `num_heads` heads of all sequences. `tokens` must be a multiple of the tiles.

        L1 may keep keys for the next program, so L2 is counted as DRAM is.
        """
        without_keys, program = (on_line(self.two, self.three, (2, 3, n)) for n in (0, tokens // self.tiles.visited))
        programs = num_heads * tokens // self.tiles.owned
        grid = on_line(Work(0, dict.fromkeys(program.tensor_flops, 0), *[0] * 8), program, (0, 1, programs))
        keys_and_values = program.dram_read_bytes - without_keys.dram_read_bytes
        read = programs * without_keys.dram_read_bytes + num_heads * keys_and_values
        return grid._replace(dram_read_bytes=read, l2_bytes=read + grid.dram_written_bytes)


def decode_work(row: Published) -> Work:
    """Return the counted work of one sequence, times the batch. Version 2 has two kernels; the first is counted."""
    blocks = row.tokens // BLOCK_SIZE
    caches = torch.randn(2, blocks, BLOCK_SIZE, row.num_kv_heads, row.head_size).half()
    tables, lengths = torch.arange(blocks, dtype=torch.int32)[None], torch.tensor([row.tokens], dtype=torch.int32)
    run = paged_attention_v2 if row.kernel.endswith("v2") else paged_attention_v1
    with observe(trace_limit=0) as report:
        run(torch.randn(1, row.num_heads, row.head_size).half(), *to_vllm_layout(*caches), tables, lengths)
    work = report.launches[0].work
    counted = (None if each is None else row.batch * each for each in work)
    return Work(*counted)


# ------------------------------------------------------------------------------------------------ the comparison


class Compared(NamedTuple):
    """A published time, the bound of any kernel for the task, and the bound and the slowest unit of our kernel."""

    published: Published
    bound: float
    ours: float
    unit: str

    @property
    def ratio(self) -> float:
        return self.published.seconds / self.bound


def compared(rows: Sequence[Published], tiles: Tiles = TILES) -> list[Compared]:
    """Return each published time with its bounds."""
    flash: dict[tuple[int, str], FlashWork] = {}
    found = []
    for row in rows:
        if row.decodes:
            work = decode_work(row)
        else:
            key = row.head_size, "sm_90" if GPUS[row.gpu].sm == 90 else "sm_80"  # sm_90's code runs on Hopper alone
            if key not in flash:
                flash[key] = FlashWork(row.head_size, tiles, key[1])
            work = flash[key].of(row.batch * row.num_heads, row.tokens)
        seconds, _, _ = times(work, GPUS[row.gpu])
        unit = max(seconds, key=seconds.__getitem__)
        found.append(Compared(row, max(seconds.get(each, 0.0) for each in SHARED_BY_ALL), seconds[unit], unit))
    return found


def main() -> None:
    """Print the table."""
    lines = []
    for row, bound, ours, unit in compared(PUBLISHED):
        shape = f"{row.batch} × {row.num_heads} × {row.tokens} × {row.head_size}"
        in_us = (f"{1e6 * seconds:,.1f}" for seconds in (row.seconds, bound))
        least = f"{1e6 * ours:,.1f} ({unit})"
        lines.append((row.kernel, row.gpu, shape, *in_us, f"{row.seconds / bound:.2f}", least, row.source))
    header = ("kernel", "GPU", "batch × heads × tokens × D", "published (µs)", "bound (µs)", "ratio")
    print(table((*header, "our kernel's bound (µs)", "published in"), lines))


if __name__ == "__main__":
    main()
