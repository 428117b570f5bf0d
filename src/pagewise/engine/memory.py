"""The keys and values of the sequences that run, in blocks, and how a step attends to them (lesson 9).

An engine has one of three memories. All have the same methods, and `attention` returns the `Attend` of one step.

    PagedMemory         blocks of one tensor. Attention reads each block where it is.
    BlockTensorMemory   blocks that are tensors of their own. Each step gathers them into a padded batch.
    DenseMemory         a contiguous tensor for each sequence. Each step copies them into a padded batch.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pagewise import paged_attention_varlen
from pagewise.engine.batch import Batch
from pagewise.engine.profile import span
from pagewise.engine.sequence import Request, Sequence
from pagewise.models import Attend
from pagewise.paged_attention.inputs import DECODING
from pagewise.paged_blocks import BlockManager, OutOfBlocks, PagedKVCache
from pagewise.paged_blocks.prefix_cache import TokenBlocks
from pagewise.tools.sizes import cdiv


class KVSizes(NamedTuple):
    """The sizes of a memory, with the names of the config. The KV heads are those that this process computes."""

    num_hidden_layers: int
    num_key_value_heads: int
    head_dim: int


def kv_sizes(model: nn.Module) -> KVSizes:
    """Return the sizes of the keys and values that `model` computes in this process. Every memory gets these sizes."""
    config = model.config
    num_kv_heads = getattr(model, "num_kv_heads", config.num_key_value_heads)  # models of other people may lack it
    return KVSizes(config.num_hidden_layers, num_kv_heads, config.head_dim)


class BlockMemory:
    """A `BlockManager`, and the cache that its block tables point into: a `PagedKVCache` or `BlockTensors`."""

    def __init__(self, cache: Any, *, prefix_cache: bool) -> None:
        self.cache, self.prefix_cache, self.block_size = cache, prefix_cache, cache.block_size
        self.manager = BlockManager(cache.num_blocks, cache.block_size, prefix_cache=prefix_cache)
        self.nbytes, self.num_tokens = cache.nbytes, cache.num_blocks * cache.block_size

    @property
    def usage(self) -> float:
        """The share of the blocks that are in use, from 0 to 1."""
        return 1 - self.manager.num_free_blocks / self.manager.num_blocks

    @property
    def used_nbytes(self) -> int:
        """Bytes of the blocks that are in use."""
        return self.nbytes // self.manager.num_blocks * (self.manager.num_blocks - self.manager.num_free_blocks)

    def check_fits(self, request: Request) -> None:
        """ValueError if the request's sequences cannot all be in memory at once, even alone."""
        needed = self._blocks_for(request.width, request.most_slots, len(request.prompt))
        if needed > self.manager.num_blocks:
            raise ValueError(
                f"{request.described} need {needed} blocks of {self.block_size} tokens, and the memory has "
                f"{self.manager.num_blocks}: raise num_blocks, or ask for less"
            )

    def _blocks_for(self, width: int, length: int, common: int) -> int:
        """Return the blocks of `width` sequences of `length` tokens that begin with the same `common` tokens."""
        shared = common // self.block_size if width > 1 else 0
        return shared + width * (cdiv(length, self.block_size) - shared)

    def blocks(self, tokens: list[int]) -> TokenBlocks:
        """Return the tokens with their hashes, which a waiting request then computes only once."""
        return TokenBlocks(tokens, self.block_size)

    def prefix_is_coming(self, tokens: TokenBlocks, computing: list[Sequence]) -> bool:
        """Return whether one of these sequences now computes the first block of `tokens` that is not cached yet."""
        if not self.prefix_cache or not computing:
            return False
        stop = self.manager.cached_prefix(tokens) + self.block_size
        return stop < len(tokens) and any(sequence.tokens[:stop] == tokens.tokens[:stop] for sequence in computing)

    def admit(self, request: Request, tokens: TokenBlocks) -> int:
        """Allocate blocks for the tokens that all its sequences share. Return how many of them the prefix cache has.

        Raises OutOfBlocks also if the free blocks do not hold the tokens that the sequences do not share.
        """
        needed = self._blocks_for(len(request.live), max(len(s.tokens) for s in request.live), len(tokens))
        if len(request.live) > 1 and needed > self.manager.num_free_blocks:
            raise OutOfBlocks(f"{len(request.live)} sequences need {needed} blocks")
        return self.manager.allocate(request.live[0], tokens)

    def extend(self, sequence: Sequence) -> None:
        """Get a slot for each of its tokens. If blocks run out (OutOfBlocks), call again when there are more."""
        for token in sequence.tokens[self.manager.num_tokens(sequence) :]:
            self.manager.append(sequence, token)

    def extend_by(self, sequence: Sequence, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """Get slots for drafts after all its tokens, while there are free blocks. Return the drafts that have slots."""
        for i, token in enumerate(drafts):
            try:
                self.manager.append(sequence, token)
            except OutOfBlocks:
                return drafts[:i]
        return drafts

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let the child share the parent's blocks, until one of them writes."""
        self.manager.fork(parent, child)

    def commit(self, sequence: Sequence) -> None:
        """Let other prompts find the blocks that the sequence has computed. Refused drafts give back their slots."""
        if sequence.num_computed >= len(sequence.tokens):  # the tokens after these were refused
            self.manager.truncate(sequence, sequence.num_computed)
        self.manager.commit(sequence, sequence.num_computed)

    def free(self, sequence: Sequence) -> None:
        """Free a sequence of a running request that has ended."""
        self.manager.free(sequence)

    def release(self, request: Request) -> None:
        """Free all sequences of a request that stops running."""
        for sequence in request.in_memory():
            self.manager.free(sequence)


class PagedMemory(BlockMemory):
    """Blocks of a `PagedKVCache`. Attention reads each block where it is.

    `dtype` is the cache's. A float8 cache stores k / k_scale and v / v_scale. The scales are 1 for all other dtypes.
    """

    def __init__(
        self,
        config: object,
        *,
        num_blocks: int,
        block_size: int,
        prefix_cache: bool,
        backend: str,
        dtype: torch.dtype,
        device: torch.device,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        sizes = (config.num_hidden_layers, num_blocks, block_size, config.num_key_value_heads, config.head_dim)
        layout = "vllm" if backend == "cuda" else "nhd"
        super().__init__(PagedKVCache(*sizes, dtype=dtype, device=device, layout=layout), prefix_cache=prefix_cache)
        self.backend = backend
        self._scales = {"k_scale": float(k_scale), "v_scale": float(v_scale)}
        # attention multiplies its scores by k_scale, which costs less than multiplying every key
        self._options = DECODING._replace(scale=DECODING.scale_for(config.head_dim) * self._scales["k_scale"])

    def attention(self, batch: Batch) -> Attend:
        """Return a function that writes the step's keys and values into their slots, and then attends to all keys."""
        with span("block tables"):
            tables = (batch.block_tables, batch.seq_lens, batch.cu_seqlens_q)
            decodes = len(batch.token_ids) == len(batch.seq_lens)  # no chunk is empty
            how = {"options": self._options, "v_scale": self._scales["v_scale"], "decodes": decodes}
            plan = paged_attention_varlen.plan(*tables, block_size=self.block_size, backend=self.backend, **how)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # [total_q, heads, D]
            with span("cache write"):
                self.cache.write(layer, batch.slots, k, v, check=False, **self._scales)
            with span("attention"):
                out = plan.attend(q, self.cache.k[layer], self.cache.v[layer])
            return out.transpose(0, 1)[None]

        return attend
