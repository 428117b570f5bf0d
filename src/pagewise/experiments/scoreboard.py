"""The running scoreboard: every method of the course does one piece of work, and its operations and bytes are counted.

The work: one attention layer reads a prompt of 256 tokens and then 32 tokens one at a time, as a model that generates
text does. It has 8 query heads, 2 KV heads, head size 64 and float32. From lesson 6 on there is a second piece of work:
forward and backward over the prompt, as in a training step. `tools.work.count_work` has the counting rules.
"""

import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from cudascope import CompileError
from pagewise.flash_attention import flash_attention_1, flash_attention_2
from pagewise.flash_decoding import flash_decoding
from pagewise.kv_cache import KVCache
from pagewise.naive_attention import attention
from pagewise.online_softmax import online_attention
from pagewise.paged_attention import paged_attention_grouped
from pagewise.paged_attention.in_torch import streamed_attention
from pagewise.paged_attention.inputs import DECODING, PagedInputs
from pagewise.paged_blocks import BlockManager, PagedKVCache
from pagewise.tools.sizes import cdiv
from pagewise.tools.work import Work, count_work

PROMPT, NEW, HEADS, KV_HEADS, HEAD_SIZE = 256, 32, 8, 2, 64
TOTAL = PROMPT + NEW
BLOCK_SIZE = 16


class Row(NamedTuple):
    """One method: the lesson that introduced it, its name, and `run(q, k, v)`, which does the whole piece of work."""

    lesson: int
    method: str
    run: Callable[[Tensor, Tensor, Tensor], list[Tensor]]


def recompute(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Run attention over all tokens so far for every new token, without a cache, and keep the last row."""
    outs = [attention(q[:, :, :PROMPT], k[:, :, :PROMPT], v[:, :, :PROMPT], causal=True)]
    for n in range(PROMPT + 1, TOTAL + 1):
        outs.append(attention(q[:, :, :n], k[:, :, :n], v[:, :, :n], causal=True)[:, :, -1:].clone())
    return outs


def with_cache(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], *, chunk: int | None = None
) -> Callable[[Tensor, Tensor, Tensor], list[Tensor]]:
    """Use a contiguous cache: each step appends its K and V and attends with its own queries only.

    With `chunk`, the prompt comes in chunks of that many tokens, as in an engine where other requests decode meanwhile.
    """

    def run(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        cache = KVCache(1, KV_HEADS, TOTAL, HEAD_SIZE, dtype=q.dtype, device=q.device)
        begins = [*range(0, PROMPT, chunk or PROMPT), *range(PROMPT, TOTAL + 1)]
        outs = []
        for start, stop in pairwise(begins):
            k_all, v_all = cache.append(k[:, :, start:stop], v[:, :, start:stop])
            outs.append(attend(q[:, :, start:stop], k_all, v_all))
        return outs

    return run


def paged(
    read: Callable[..., Tensor], layout: str = "nhd", prompt: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
) -> Callable[[Tensor, Tensor, Tensor], list[Tensor]]:
    """Keep K and V in blocks. `prompt` attends over the prompt (default: lesson 3). Then each step writes one slot."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        manager = BlockManager(cdiv(TOTAL, BLOCK_SIZE), BLOCK_SIZE)
        sizes = (1, manager.num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
        cache = PagedKVCache(*sizes, dtype=q.dtype, device=q.device, layout=layout)

        def write(slots: list[int], start: int, stop: int) -> None:
            rows = (x[0, :, start:stop].transpose(0, 1) for x in (k, v))
            cache.write(0, torch.tensor(slots, device=q.device), *rows)

        outs = [(prompt or _online)(*(x[:, :, :PROMPT] for x in (q, k, v)))]
        manager.allocate(0, [0] * PROMPT)  # any token ids will do
        write(manager.slots(0, 0, PROMPT), 0, PROMPT)
        for n in range(PROMPT, TOTAL):
            write([manager.append(0, 0)], n, n + 1)
            table = torch.tensor([manager.block_table(0)], dtype=torch.int32, device=q.device)
            length = torch.tensor([n + 1], dtype=torch.int32, device=q.device)
            outs.append(read(q[:, :, n], cache.k[0], cache.v[0], table, length)[:, :, None])
        return outs

    return run


def _streamed(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, length: Tensor) -> Tensor:
    return streamed_attention(PagedInputs(q, k_cache, v_cache, table, length), DECODING)[0]


def _grouped(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, length: Tensor) -> Tensor:
    return paged_attention_grouped(q, k_cache, v_cache, table, length, check=False)  # of the kernel, not of the checks


def _split(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend over a prompt as in lesson 6, and with a single query over four splits of the keys."""
    return _flash_2(q, k, v) if q.shape[2] > 1 else flash_decoding(q, k, v, num_splits=4, backend="torch")


def training_step(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., list[Tensor]]:
    """Run forward and backward over the prompt. The loss ½ ‖out‖² makes out its own gradient."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        with torch.enable_grad():
            leaves = [x[:, :, :PROMPT].detach().requires_grad_() for x in (q, k, v)]
            out = attend(*leaves)
            return list(torch.autograd.grad(out, leaves, out.detach()))

    return run


_naive = partial(attention, causal=True)
_online = partial(online_attention, causal=True, tile_size=64)
_flash_1, _flash_2 = (
    partial(flash, causal=True, tile_rows=64, tile_cols=64) for flash in (flash_attention_1, flash_attention_2)
)

ROWS = [
    Row(1, "naive, everything recomputed", recompute),
    Row(2, "naive with a KV cache", with_cache(_naive)),
    Row(3, "online softmax, tiles of 64 keys", with_cache(_online)),
    Row(4, "paged, streamed in blocks of 16", paged(_streamed)),
    Row(5, "paged, CUDA kernel, grouped", paged(_grouped, layout="vllm")),
    Row(6, "FlashAttention-2, then paged", paged(_grouped, layout="vllm", prompt=_flash_2)),
    Row(7, "Flash-Decoding, 4 splits", with_cache(_split)),
    Row(9, "the same, prompt in chunks of 64", with_cache(_split, chunk=64)),
]
TRAINING = [
    Row(1, "naive", training_step(_naive)),
    Row(3, "online softmax, tiles of 64 keys", training_step(_online)),
    Row(6, "FlashAttention, tiles of 64 × 64", training_step(_flash_1)),
    Row(6, "FlashAttention-2, tiles of 64 × 64", training_step(_flash_2)),
]


def score(row: Row) -> Work:
    """Check that `row` computes naive attention, and count its work."""
    q, k, v = _random()
    out = torch.cat(row.run(q, k, v), dim=2)
    torch.testing.assert_close(out, attention(q, k, v, causal=True), atol=1e-5, rtol=1e-4)
    return count_work(lambda: row.run(q, k, v))


def score_training(row: Row) -> Work:
    """Check that a row of `TRAINING` computes the gradients of naive attention, and count its work."""
    q, k, v = _random()
    torch.testing.assert_close(row.run(q, k, v), training_step(_naive)(q, k, v), atol=1e-5, rtol=1e-4)
    return count_work(lambda: row.run(q, k, v))


def _random() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, h, TOTAL, HEAD_SIZE, generator=generator) for h in (HEADS, KV_HEADS, KV_HEADS))


def scoreboard(lesson: int) -> str:
    """Return the table with the rows of all lessons up to `lesson`."""
    return _table({row: _score_here(row) for row in ROWS if row.lesson <= lesson})


def _score_here(row: Row) -> Work | None:
    """Score a row. Return None if the row runs a CUDA kernel on the CPU, for which cudascope needs Linux."""
    try:
        return score(row)
    except CompileError:
        if sys.platform == "linux":
            raise
        return None


def training_scoreboard(lesson: int) -> str:
    """Return the same table for a training step, forward and backward over the prompt."""
    return _table({row: score_training(row) for row in TRAINING if row.lesson <= lesson})


def _table(works: dict[Row, Work | None]) -> str:
    head = f"{'lesson':6}  {'method':34}{'matmul':>9}{'other':>9}{'read':>9}{'written':>9}{'held':>9}"
    units = f"{'':6}  {'':34}{'MFLOP':>9}{'MFLOP':>9}{'MB':>9}{'MB':>9}{'MB':>9}"
    lines = [head, units]
    for row, w in works.items():
        if w is None:
            lines.append(f"{row.lesson:6}  {row.method:34}  runs on Linux only")
            continue
        counts = (w.matmul_flops, w.other_flops, w.bytes_read, w.bytes_written, w.peak_bytes)
        lines.append(f"{row.lesson:6}  {row.method:34}" + "".join(f"{c / 1e6:9.1f}" for c in counts))
    return "\n".join(lines)
