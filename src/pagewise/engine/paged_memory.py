"""Keys and values in blocks of one tensor. Attention reads each block where it is (lesson 9)."""

from contextlib import nullcontext

import torch
from torch import Tensor

from pagewise import paged_attention_varlen
from pagewise.engine.batch import Batch
from pagewise.engine.config import EngineConfig, KVSizes
from pagewise.engine.profile import Profile
from pagewise.engine.request import Chunk, Request
from pagewise.models import Attend
from pagewise.paged_attention.inputs import DECODING
from pagewise.paged_blocks import BlockPool, OutOfBlocks, PagedKVCache
from pagewise.paged_blocks.write import kv_writer
from pagewise.tools.device import choose_backend

WATERMARK = 0.05  # of the blocks; vLLM keeps 0.01


class BlockMemory(BlockPool):
    """The bookkeeping of every memory that consists of blocks: a pool of blocks that admits requests."""

    fork, commit, free = BlockPool.share, BlockPool.register, BlockPool.release

    def __init__(self, config: EngineConfig, nbytes: int) -> None:
        super().__init__(config.num_blocks, config.block_size, prefix_cache=config.prefix_cache)
        self.nbytes, self.num_tokens = nbytes, config.num_blocks * config.block_size

    @property
    def usage(self) -> float:
        """The share of the blocks that are in use, from 0 to 1."""
        return 1 - self.num_free_blocks / self.num_blocks

    @property
    def used_nbytes(self) -> int:
        """Bytes of the blocks that are in use."""
        return self.nbytes // self.num_blocks * (self.num_blocks - self.num_free_blocks)

    def check_fits(self, request: Request) -> None:
        """Raise ValueError if the request's sequences cannot all be in memory at once, even alone."""
        needed = self._blocks_for(request.width, request.most_slots, len(request.prompt))
        if needed > self.num_blocks:
            said = f"{request.sampling.described(len(request.prompt))} need {needed} blocks of {self.block_size} tokens"
            raise ValueError(f"{said}, and the memory has {self.num_blocks}: raise num_blocks, or ask for less")

    def _blocks_for(self, width: int, length: int, common: int) -> int:
        """Return the blocks of `width` sequences of `length` tokens that begin with the same `common` tokens."""
        shared = common // self.block_size
        return shared + width * (-(-length // self.block_size) - shared)

    def admit(self, request: Request, computing: list[Chunk]) -> int | None:
        """Give blocks to the tokens that all sequences share. See `Memory.admit`.

        While other requests hold blocks, WATERMARK of all blocks stay free. The others need them soon, and would
        preempt the youngest request for them, which is this one.
        """
        common, live = request.common, request.live
        spare = int(WATERMARK * self.num_blocks) if self.num_free_blocks < self.num_blocks else 0
        if self.prefix_cache and computing:  # one of these may compute the first block that is not cached yet
            stop = self.num_cached(common) + self.block_size
            beginning = common.tokens[:stop]
            if stop < len(common.tokens) and any(chunk.sequence.tokens[:stop] == beginning for chunk in computing):
                return None
        if len(live) > 1:
            needed = self._blocks_for(len(live), max(len(sequence.tokens) for sequence in live), len(common.tokens))
            if needed + spare > self.num_free_blocks:
                raise OutOfBlocks(f"{len(live)} sequences need {needed} blocks")
        return self.hold(live[0], common, spare)


class PagedMemory(BlockMemory):
    """Blocks of a `PagedKVCache`."""

    def __init__(self, config: EngineConfig, sizes: KVSizes, device: torch.device, dtype: torch.dtype) -> None:
        (layers, Hkv, D, window), N, P = sizes, config.num_blocks, config.block_size
        dtype, layout = config.kv_cache_dtype or dtype, "vllm" if config.backend == "cuda" else "nhd"
        self.cache = PagedKVCache(layers, N, P, Hkv, D, dtype=dtype, device=device, layout=layout)
        super().__init__(config, self.cache.nbytes)
        self.backend, self.device = config.backend, device
        self.k_scale, self.v_scale = float(config.k_scale), float(config.v_scale)
        writes = choose_backend("auto", self.cache.k.device)  # attention may have another backend
        self._how_to_write = {"k_scale": self.k_scale, "v_scale": self.v_scale, "backend": writes}
        # attention multiplies its scores by k_scale, which costs less than multiplying every key
        scale = DECODING.scale_for(D) * self.k_scale
        self._options = DECODING._replace(scale=scale, window=window)

    def batch(self, chunks: list[Chunk]) -> Batch:
        """Return a step with its block tables, and with the copies of blocks that it begins with."""
        return Batch.of(chunks, self.device, self.block_size)._replace(copies=self.take_copies())

    def attention(self, batch: Batch) -> Attend:
        """Return a function that writes the step's keys and values into their slots, and then attends to all keys."""
        if batch.copies:
            self.cache.copy_blocks(batch.copies)
        write = kv_writer(self.cache.k, self.cache.v, batch.slots, **self._how_to_write)
        with Profile.span("block tables"):
            step = paged_attention_varlen.Step(
                batch.block_tables,
                batch.seq_lens,
                batch.cu_seqlens_q,
                block_size=self.block_size,
                decodes=len(batch.token_ids) == len(batch.seq_lens),  # no chunk is empty
                options=self._options,
                v_scale=self.v_scale,
                plain=True,
            )
            plan = paged_attention_varlen.plan(step, self.backend)

        attention = plan.attend
        if Profile.span is not nullcontext:  # else the layers pay for no span
            write, attention = Profile.span("cache write")(write), Profile.span("attention")(attention)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1)  # [total_q, heads, D]
            write(layer, k, v)
            return attention(q, self.cache.k[layer], self.cache.v[layer]).transpose(0, 1)[None]

        attend.sliding_window = self._options.window  # the model checks it
        return attend
