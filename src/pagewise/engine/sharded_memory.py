"""Context parallelism in the engine: a cache whose tokens are spread over processes (lesson 10).

Process r of n keeps the keys and values of the tokens at positions r, r + n, r + 2n, … of every sequence: the striped
order of `pagewise.distributed.sequence`. Process 0 counts blocks of n · block_size tokens. Such a block is the same
block of block_size tokens in every process, so scheduler, prefix cache and copies work as in one process.

A step has two kinds of tokens. Rows whose logits are wanted are the last tokens of prompts, decodes and drafts: every
process computes them, attends to its own keys, and `merge_over_processes` merges the results. The other rows are the
rest of prompts: each process computes those that it keeps, and keys travel around the ring.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from pagewise import paged_attention_varlen
from pagewise.distributed import merge_over_processes
from pagewise.distributed.blocks import blocks
from pagewise.distributed.communication import Group, rank_and_size
from pagewise.distributed.ring import Ring
from pagewise.distributed.sequence import positions, share_lengths
from pagewise.engine.batch import Batch
from pagewise.engine.config import EngineConfig, KVSizes
from pagewise.engine.paged_memory import PagedMemory
from pagewise.models import Attend


class PromptRows(NamedTuple):
    """Rows `rows` of this process are its tokens of one prompt, which attend to `lengths[r]` keys of each process r."""

    rows: slice
    block_table: list[int]
    lengths: list[int]
    ring: Ring


class Share(NamedTuple):
    """What one process computes of a step. The first B rows are the rows that all processes compute."""

    token_ids: Int64[Tensor, " rows"]
    positions: Int64[Tensor, " rows"]
    logits_for: Int64[Tensor, " n"]
    slots: Int64[Tensor, " rows"]  # of this process's cache; −1: another process keeps the token
    block_tables: Int32[Tensor, "B M"]
    seq_lens: Int32[Tensor, " B"]  # keys that this process has for each of the first B rows
    chunks: list[PromptRows]
    copies: list[tuple[int, int]]


class ShardedMemory(PagedMemory):
    """Blocks of a `PagedKVCache` in each process of a group."""

    def __init__(
        self,
        config: EngineConfig,
        sizes: KVSizes,
        device: torch.device,
        dtype: torch.dtype,
        *,
        group: Group,
        wants_logits: bool,
    ) -> None:
        super().__init__(config, sizes, device, dtype)
        self.group, (self.rank, self.count), self.wants_logits = group, rank_and_size(group), wants_logits
        self.block_size, self.num_tokens = self.block_size * self.count, self.num_tokens * self.count

    def part_of(self, batch: Batch) -> Share:
        """Return what this process computes of a step."""
        n, ends = self.count, batch.cu_seqlens_q.tolist()
        wanted = torch.zeros_like(batch.token_ids, dtype=torch.bool)
        wanted[batch.logits_for] = True
        mine = batch.positions % n == self.rank
        for_all, for_me = wanted.nonzero()[:, 0], (mine & ~wanted).nonzero()[:, 0]
        rows = torch.cat((for_all, for_me))
        sequence_of = torch.bucketize(for_all, batch.cu_seqlens_q[1:], right=True)
        places = batch.slots // self.block_size * self.cache.block_size + batch.slots % self.block_size // n
        return Share(
            batch.token_ids[rows],
            batch.positions[rows],
            torch.arange(len(for_all) if self.wants_logits else 0, device=self.device),
            torch.where(mine, places, -1)[rows],
            batch.block_tables[sequence_of],
            ((batch.positions[for_all] + n - self.rank) // n).to(torch.int32),
            self._chunks(batch, ends, wanted, len(for_all), for_me),
            list(batch.copies),
        )

    def _chunks(self, batch: Batch, ends: list[int], wanted: Tensor, first: int, for_me: Tensor) -> list[PromptRows]:
        found, at = [], first
        for b, (start, stop) in enumerate(pairwise(ends)):
            stop -= int(wanted[start:stop].sum())
            if start == stop:
                continue
            length = int(batch.positions[stop - 1]) + 1
            queries = batch.positions[for_me[(for_me >= start) & (for_me < stop)]].cpu()
            of_each = [
                blocks(queries, positions(length, self.count, r, "striped"), causal=True) for r in range(self.count)
            ]
            lengths = share_lengths(length, self.count, "striped")
            ring = Ring(self.group, lengths, of_each, self._options.scale)
            found.append(PromptRows(slice(at, at + len(queries)), batch.block_tables[b].tolist(), lengths, ring))
            at += len(queries)
        return found

    def attention(self, batch: Share) -> Attend:
        """Return a function that writes this process's keys and values, and then attends to those of all processes."""
        self.cache.copy_blocks(batch.copies)
        B = len(batch.seq_lens)
        plan = paged_attention_varlen.plan(
            batch.block_tables,
            batch.seq_lens,
            torch.arange(B + 1, dtype=torch.int32, device=self.device),
            block_size=self.cache.block_size,
            backend=self.backend,
            decodes=True,
            options=self._options,
            v_scale=self.v_scale,
        )

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = (x[0].transpose(0, 1) for x in (k, v))  # [rows, Hkv, D]
            self.cache.write(layer, batch.slots, k, v, k_scale=self.k_scale, v_scale=self.v_scale, check=False)
            out = torch.empty_like(q)
            if B:
                queries = q[0, :, :B].transpose(0, 1)
                of_mine = plan.attend_with_lse(queries, self.cache.k[layer], self.cache.v[layer])
                merged, _ = merge_over_processes(*of_mine, group=self.group, check=False)
                out[0, :, :B] = merged.transpose(0, 1)
            for chunk in batch.chunks:
                keys = self._keys(layer, chunk, q.dtype)
                out[:, :, chunk.rows], _ = chunk.ring.attend(q[:, :, chunk.rows], *keys)
            return out

        return attend

    def _keys(
        self, layer: int, chunk: PromptRows, dtype: torch.dtype
    ) -> tuple[Float[Tensor, "1 Hkv S D"], Float[Tensor, "1 Hkv S D"]]:
        """Return k and v of this process's tokens of a sequence. The scale of k is part of the options."""
        k, v = self.cache.gather(layer, chunk.block_table, chunk.lengths[self.rank])
        k, v = (x.to(dtype).transpose(0, 1)[None].contiguous() for x in (k, v))
        return k, v * self.v_scale if self.v_scale != 1.0 else v
