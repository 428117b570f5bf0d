"""The inputs of one step as one value: tokens, their positions, and the places of their keys (lesson 9).

- token_ids, positions, slots [total_q]: the numbers of all chunks, end to end.
- cu_seqlens_q [B + 1]: chunk b has the rows cu[b] … cu[b + 1] − 1.
- block_tables [B, M], seq_lens [B]: a row or a number for the sequence of each chunk.
- logits_for [n]: the rows whose next token is wanted.
"""

from collections.abc import Iterable
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import torch
from jaxtyping import Int32, Int64
from torch import Tensor

from pagewise.engine.profile import span
from pagewise.engine.request import Chunk


class Batch(NamedTuple):
    """The tokens of a step. A memory without block tables does not need the four fields after `logits_for`."""

    chunks: list[Chunk]
    token_ids: Int64[Tensor, " total_q"]
    positions: Int64[Tensor, " total_q"]
    logits_for: Int64[Tensor, " n"]
    slots: Int64[Tensor, " total_q"] | None = None
    block_tables: Int32[Tensor, "B M"] | None = None
    seq_lens: Int32[Tensor, " B"] | None = None
    cu_seqlens_q: Int32[Tensor, " B_and_1"] | None = None
    copies: Iterable[tuple[int, int]] = ()  # blocks (from, to) that are copied before the step writes

    @classmethod
    def of(cls, chunks: list[Chunk], device: torch.device, block_size: int | None = None) -> "Batch":
        """Return the step that computes these chunks, with block tables if there is a `block_size`."""
        token_ids = list(chain.from_iterable(chunk.token_ids for chunk in chunks))
        positions = list(chain.from_iterable(range(chunk.start, chunk.stop) for chunk in chunks))
        ends = list(accumulate((chunk.stop - chunk.start for chunk in chunks), initial=0))
        wanted = [range(end - chunk.num_logits, end) for chunk, end in zip(chunks, ends[1:], strict=True)]
        logits_for = list(chain.from_iterable(wanted))
        numbers = (token_ids, positions, logits_for)
        batch = cls(chunks, *(torch.tensor(one, dtype=torch.int64, device=device) for one in numbers))
        if block_size is None:
            return batch
        with span("block tables"):
            tables = [chunk.sequence.block_table for chunk in chunks]
            width = max(map(len, tables))
            slots = [
                table[i // block_size] * block_size + i % block_size
                for chunk, table in zip(chunks, tables, strict=True)
                for i in range(chunk.start, chunk.stop)
            ]
            padded = [table + [0] * (width - len(table)) for table in tables]
            return batch._replace(
                slots=torch.tensor(slots, dtype=torch.int64, device=device),
                block_tables=torch.tensor(padded, dtype=torch.int32, device=device),
                seq_lens=torch.tensor([chunk.stop for chunk in chunks], dtype=torch.int32, device=device),
                cu_seqlens_q=torch.tensor(ends, dtype=torch.int32, device=device),
            )

    @property
    def rows(self) -> list[tuple[slice, Chunk]]:
        """Each chunk with the rows of its tokens."""
        ends = accumulate((chunk.stop - chunk.start for chunk in self.chunks), initial=0)
        return [(slice(*row), chunk) for row, chunk in zip(pairwise(ends), self.chunks, strict=True)]
