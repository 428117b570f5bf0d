"""The inputs of one step as one value: tokens, their positions, and the places of their keys (lesson 9)."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int32, Int64
from torch import Tensor

from pagewise.engine.request import Chunk


class Batch(NamedTuple):
    """The tokens of a step. A memory without block tables does not need the four fields after `logits_for`."""

    chunks: list[Chunk]
    token_ids: Int64[Tensor, " total_q"]  # those of all chunks, end to end, like positions and slots
    positions: Int64[Tensor, " total_q"]
    logits_for: Int64[Tensor, " n"]  # the rows whose next token is wanted
    slots: Int64[Tensor, " total_q"] | None = None
    block_tables: Int32[Tensor, "B M"] | None = None  # of the sequence of each chunk
    seq_lens: Int32[Tensor, " B"] | None = None
    cu_seqlens_q: Int32[Tensor, " B_and_1"] | None = None  # chunk b has the rows cu[b] … cu[b + 1] − 1
    copies: Iterable[tuple[int, int]] = ()  # blocks (from, to) that are copied before the step writes

    @classmethod
    def of(cls, chunks: list[Chunk], device: torch.device, block_size: int | None = None) -> "Batch":
        """Return the step that computes these chunks, with block tables if there is a `block_size`.

        All its numbers go to the device in one transfer.
        """
        token_ids, positions, logits_for, tables, seq_lens, cu_seqlens = [], [], [], [], [], [0]
        for _, sequence, start, stop, num_logits, drafts in chunks:
            token_ids += sequence.tokens[start:stop]
            token_ids += drafts
            positions += range(start, stop)
            end = cu_seqlens[-1] + stop - start
            logits_for += range(end - num_logits, end)
            tables.append(sequence.block_table)
            seq_lens.append(stop)
            cu_seqlens.append(end)
        arrays = {
            "token_ids": np.array(token_ids, dtype=np.int64),
            "positions": np.array(positions, dtype=np.int64),
            "logits_for": np.array(logits_for, dtype=np.int64),
        }
        if block_size is not None:
            padded = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
            for row, table in zip(padded, tables, strict=True):
                row[: len(table)] = table
            rows = np.repeat(np.arange(len(tables)), np.diff(cu_seqlens))
            at, offsets = np.divmod(arrays["positions"], block_size)
            arrays["slots"] = padded[rows, at].astype(np.int64) * block_size + offsets
            arrays["block_tables"] = padded
            arrays["seq_lens"] = np.array(seq_lens, dtype=np.int32)
            arrays["cu_seqlens_q"] = np.array(cu_seqlens, dtype=np.int32)
        packed = torch.frombuffer(bytearray().join(arrays.values()), dtype=torch.uint8)  # those of int64 come first
        if device.type == "cuda":
            packed = packed.pin_memory()  # so that the host does not wait for the transfer
        packed, tensors, start = packed.to(device, non_blocking=True), {}, 0
        for name, array in arrays.items():
            dtype = torch.int64 if array.dtype == np.int64 else torch.int32
            tensors[name] = packed[start : start + array.nbytes].view(dtype).view(array.shape)
            start += array.nbytes
        return cls(chunks, **tensors)
