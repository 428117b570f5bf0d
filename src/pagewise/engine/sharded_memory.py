"""Context parallelism in the engine: a cache whose tokens are spread over processes (lesson 10).

Process r of n keeps the keys and values of the tokens at positions r, r + n, r + 2n, … of every sequence: the striped
order of `pagewise.distributed.sequence`. Process 0 counts blocks of n · block_size tokens. Such a block is the same
block of block_size tokens in every process, so scheduler, prefix cache and copies work as in one process.

A step has two kinds of tokens. Rows whose logits are wanted are the last tokens of prompts, decodes and drafts: every
process computes them, attends to its own keys, and `merge_over_processes` merges the results. The other rows are the
rest of prompts: each process computes those that it keeps, and keys travel around the ring.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pagewise import paged_attention_varlen
from pagewise.distributed import merge_over_processes
from pagewise.distributed.ring import Ring
from pagewise.engine.batch import Batch
from pagewise.engine.paged_memory import PagedMemory
from pagewise.models import Attend


class PromptRows(NamedTuple):
    """The rows of a process that are tokens of one prompt. Its cache has `num_keys` keys of the prompt."""

    rows: slice
    block_table: list[int]
    num_keys: int
    ring: Ring


class ShardedMemory(PagedMemory):
    """A `PagedMemory` in each process of a group."""

    def __init__(self, *arguments: Any, group: dist.ProcessGroup) -> None:
        super().__init__(*arguments)
        self.group, self.rank, self.count = group, group.rank(), group.size()
        self.block_size, self.num_tokens = self.block_size * self.count, self.num_tokens * self.count

    def part_of(self, batch: Batch) -> Batch:
        """Return this process's part of a step: B rows that all processes compute, and then rows of its own.

        In the result, `chunks` are `PromptRows`. `seq_lens` [B] counts the keys that this process has for the B rows.
        Slot −1 means that another process keeps the token.
        """
        n = self.count
        wanted = torch.zeros_like(batch.token_ids, dtype=torch.bool)
        wanted[batch.logits_for] = True
        mine = batch.positions % n == self.rank
        for_all, for_me = wanted.nonzero()[:, 0], (mine & ~wanted).nonzero()[:, 0]
        taken = torch.cat((for_all, for_me))
        sequence_of = torch.bucketize(for_all, batch.cu_seqlens_q[1:], right=True)
        places = batch.slots // self.block_size * self.cache.block_size + batch.slots % self.block_size // n
        chunks, at = [], len(for_all)
        for b, (start, stop) in enumerate(pairwise(batch.cu_seqlens_q.tolist())):
            stop -= int(wanted[start:stop].sum())
            if start == stop:
                continue
            length = int(batch.positions[stop - 1]) + 1
            queries = batch.positions[for_me[(for_me >= start) & (for_me < stop)]].cpu()
            ring = Ring(self.group, queries, length, "striped", self._options._replace(causal=True))
            rows = slice(at, at + len(queries))
            chunks.append(PromptRows(rows, batch.block_tables[b].tolist(), ring.key_lengths[self.rank], ring))
            at = rows.stop
        return Batch(
            chunks,
            token_ids=batch.token_ids[taken],
            positions=batch.positions[taken],
            logits_for=torch.arange(len(for_all), device=self.device),
            slots=torch.where(mine, places, -1)[taken],
            block_tables=batch.block_tables[sequence_of],
            seq_lens=((batch.positions[for_all] + n - self.rank) // n).to(torch.int32),
            cu_seqlens_q=torch.arange(len(for_all) + 1, dtype=torch.int32, device=self.device),
            copies=batch.copies,
        )

    def attention(self, batch: Batch) -> Attend:
        """Return a function that writes this process's keys and values, and then attends to those of all processes."""
        self.cache.copy_blocks(batch.copies)
        B = len(batch.seq_lens)
        step = paged_attention_varlen.Step(
            batch.block_tables,
            batch.seq_lens,
            batch.cu_seqlens_q,
            block_size=self.cache.block_size,
            decodes=True,
            options=self._options,
            v_scale=self.v_scale,
        )
        plan = paged_attention_varlen.plan(step, self.backend)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = (x[0].transpose(0, 1) for x in (k, v))  # [rows, Hkv, D]
            self.cache.write(layer, batch.slots, k, v, k_scale=self.k_scale, v_scale=self.v_scale, check=False)
            out = torch.empty_like(q)
            if B:
                queries = q[0, :, :B].transpose(0, 1)
                of_mine = plan.attend(queries, self.cache.k[layer], self.cache.v[layer], return_lse=True)
                merged, _ = merge_over_processes(*of_mine, group=self.group, check=False)
                out[0, :, :B] = merged.transpose(0, 1)
            for chunk in batch.chunks:
                k, v = self.cache.gather(layer, chunk.block_table, chunk.num_keys)
                k, v = (x.to(q.dtype).transpose(0, 1)[None].contiguous() for x in (k, v))
                v = v * self.v_scale if self.v_scale != 1.0 else v  # the scale of k is part of the options
                out[:, :, chunk.rows], _ = chunk.ring.attend(q[:, :, chunk.rows], k, v)
            return out

        return attend
