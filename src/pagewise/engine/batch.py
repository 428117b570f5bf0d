"""A step of the engine as one value: which tokens, where they stand, where their keys go and lie (lesson 9).

token_ids  positions  slots        of all chunks, end to end                [total_q]
cu_seqlens_q                       chunk b is rows cu[b] … cu[b + 1] − 1    [B + 1]
block_tables  seq_lens             of each chunk's sequence                 [B, M], [B]
logits_for                         the rows after which a token is wanted   [n]
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
    """The tokens of a step. Without the last four fields keys and values lie dense."""

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
        """The step that computes these chunks. manager: whose block tables are meant, or None."""
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
        """Where each chunk's tokens are."""
        ends = accumulate((chunk.stop - chunk.start for chunk in self.chunks), initial=0)
        return [(slice(*row), chunk) for row, chunk in zip(pairwise(ends), self.chunks, strict=True)]
