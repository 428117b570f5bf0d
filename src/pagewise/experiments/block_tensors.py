"""Blocks that are tensors of their own: the first version of lesson 9's source, and the rival of its table (lesson 9).

A dictionary for each layer maps a block to a pair of tensors, K and V [Hkv, P, D]. So sequences can share blocks, but
no kernel can read them. Every step gathers the blocks of each sequence, one by one, into a contiguous tensor. It copies
these tensors into a padded batch, for each layer. One tensor for all blocks, and a kernel that reads block tables, make
both copies unnecessary: see `PagedMemory`.
"""

import torch
from torch import Tensor

from pagewise.engine.batch import Batch
from pagewise.engine.config import EngineConfig, KVSizes
from pagewise.engine.paged_memory import BlockMemory
from pagewise.engine.profile import Profile
from pagewise.engine.request import Chunk
from pagewise.experiments.dense_memory import PaddedAttention
from pagewise.models import Attend
from pagewise.tools.sizes import cdiv


class BlockTensors:
    """{block: (K, V)} for each layer. A block gets its tensors when its first token is written."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._zeros = torch.zeros(num_kv_heads, block_size, head_size, dtype=dtype, device=device)
        self._blocks: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in range(num_layers)]

    @property
    def nbytes(self) -> int:
        """Bytes of K and V of all layers together, if all blocks are in use."""
        return 2 * len(self._blocks) * self.num_blocks * self._zeros.nbytes

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks (src, dst) in all layers, as if all sources were read before any destination is written."""
        for blocks in self._blocks:
            copies = {dst: tuple(x.clone() for x in blocks[src]) for src, dst in pairs if src in blocks}
            blocks.update(copies)

    def write(self, layer: int, table: list[int], start: int, k: Tensor, v: Tensor) -> None:
        """Put K and V [Hkv, T, D] of tokens start, start + 1, … into the blocks of a table."""
        blocks, P, stop = self._blocks[layer], self.block_size, start + k.shape[1]
        for i in range(start // P, cdiv(stop, P)):
            first, last = max(start, i * P), min(stop, (i + 1) * P)
            if first == i * P or table[i] not in blocks:
                blocks[table[i]] = (self._zeros.clone(), self._zeros.clone())
            for block, new in zip(blocks[table[i]], (k, v), strict=True):
                block[:, first - i * P : last - i * P] = new[:, first - start : last - start]

    def gather(self, layer: int, table: list[int], length: int) -> Tensor:
        """Return K and V of a sequence's first `length` tokens, [2, Hkv, length, D], copied block by block."""
        out = self._zeros.new_empty(2, len(self._zeros), length, self._zeros.shape[2])
        for i in range(cdiv(length, self.block_size)):
            start = i * self.block_size
            for to, block in zip(out, self._blocks[layer][table[i]], strict=True):
                to[:, start : start + self.block_size] = block[:, : length - start]
        return out


class BlockTensorMemory(BlockMemory):
    """Blocks in a dictionary. Each step gathers them into a padded batch."""

    def __init__(self, config: EngineConfig, sizes: KVSizes, device: torch.device, dtype: torch.dtype) -> None:
        num_layers, num_kv_heads, head_dim, _ = sizes
        self.cache = BlockTensors(
            num_layers, config.num_blocks, config.block_size, num_kv_heads, head_dim, dtype=dtype, device=device
        )
        super().__init__(config, self.cache.nbytes)
        self.device = device
        self._padded = PaddedAttention(config.backend, dtype=dtype, device=device)

    def batch(self, chunks: list[Chunk]) -> Batch:
        """Return a step with the copies of blocks that it begins with, without block tables."""
        return Batch.of(chunks, self.device)._replace(copies=self.take_copies())

    def attention(self, batch: Batch) -> Attend:
        """Return the `Attend` of a step: append to blocks, gather all sequences into a batch, attend."""
        self.cache.copy_blocks(batch.copies)
        tables = {chunk.sequence: chunk.sequence.block_table for chunk in batch.chunks}

        def write(layer: int, chunk: Chunk, k: Tensor, v: Tensor) -> None:
            self.cache.write(layer, tables[chunk.sequence], chunk.start, k, v)

        def read(layer: int, chunk: Chunk) -> Tensor:
            with Profile.span("gather blocks"):
                return self.cache.gather(layer, tables[chunk.sequence], chunk.stop)

        return self._padded.of_step(batch, write, read)
