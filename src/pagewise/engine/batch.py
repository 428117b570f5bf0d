"""The inputs of one step as one value: tokens, their positions, and the places of their keys (lesson 9).

- token_ids, positions, slots [total_q]: the numbers of all chunks, end to end.
- cu_seqlens_q [B + 1]: chunk b has the rows cu[b] … cu[b + 1] − 1.
- block_tables [B, M], seq_lens [B]: a row or a number for the sequence of each chunk.
- logits_for [n]: the rows whose next token is wanted.
"""

from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import torch
from jaxtyping import Int32, Int64
from torch import Tensor

from pagewise.engine.profile import span
from pagewise.engine.sequence import Chunk
from pagewise.paged_blocks import BlockManager


class Batch(NamedTuple):
    """The tokens of a step. Dense memory does not need the last four fields."""

    chunks: list[Chunk]
    token_ids: Int64[Tensor, " total_q"]
    positions: Int64[Tensor, " total_q"]
    logits_for: Int64[Tensor, " n"]
    slots: Int64[Tensor, " total_q"] | None = None
    block_tables: Int32[Tensor, "B M"] | None = None
    seq_lens: Int32[Tensor, " B"] | None = None
    cu_seqlens_q: Int32[Tensor, " B_and_1"] | None = None

    @classmethod
    def of(cls, chunks: list[Chunk], manager: BlockManager | None, device: torch.device) -> "Batch":
        """Return the step that computes these chunks. `manager` has their block tables; dense memory has no manager."""
        token_ids = list(chain.from_iterable(chunk.token_ids for chunk in chunks))
        positions = list(chain.from_iterable(range(chunk.start, chunk.stop) for chunk in chunks))
        ends = list(accumulate((chunk.stop - chunk.start for chunk in chunks), initial=0))
        wanted = [range(end - chunk.num_logits, end) for chunk, end in zip(chunks, ends[1:], strict=True)]
        logits_for = list(chain.from_iterable(wanted))
        numbers = (token_ids, positions, logits_for)
        batch = cls(chunks, *(torch.tensor(one, dtype=torch.int64, device=device) for one in numbers))
        if manager is None:
            return batch
        with span("block tables"):
            tables = [manager.block_table(chunk.sequence) for chunk in chunks]
            P, width = manager.block_size, max(map(len, tables))
            slots = [
                table[i // P] * P + i % P
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
