"""Where the engine's keys and values lie: in blocks, or dense, and how a step attends to them (lesson 9).

    paged   blocks of a `PagedKVCache`, taken as sequences grow; attention reads them where they lie
    dense   a contiguous piece per sequence, reserved for all tokens it may ever have; every decode step copies them
            into one padded batch, for each layer anew: the "build a batch" that paging removes

Both have the same methods, for sequences that the scheduler runs. `attention` gives the `Attend` of one step.
"""

from math import prod

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pagewise import paged_attention_varlen
from pagewise.engine.batch import Batch
from pagewise.engine.profile import span
from pagewise.engine.sequence import Request, Sequence
from pagewise.flash_attention import flash_attention
from pagewise.flash_decoding import flash_decoding
from pagewise.models import Attend
from pagewise.paged_blocks import BlockManager, OutOfBlocks, PagedKVCache
from pagewise.paged_blocks.prefix_cache import TokenBlocks
from pagewise.tools.sizes import cdiv


class PagedMemory:
    """A `BlockManager` and the `PagedKVCache` that its block tables point into."""

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
    ) -> None:
        self.manager = BlockManager(num_blocks, block_size, prefix_cache=prefix_cache)
        sizes = (config.num_hidden_layers, num_blocks, block_size, config.num_key_value_heads, config.head_dim)
        layout = "vllm" if backend == "cuda" else "nhd"
        self.cache = PagedKVCache(*sizes, dtype=dtype, device=device, layout=layout)
        self.prefix_cache, self.backend, self.block_size = prefix_cache, backend, block_size
        self.nbytes, self.num_tokens = self.cache.nbytes, num_blocks * block_size

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
        """Blocks of `width` sequences of `length` tokens, of which all begin with the same `common` ones."""
        shared = common // self.block_size if width > 1 else 0
        return shared + width * (cdiv(length, self.block_size) - shared)

    def blocks(self, tokens: list[int]) -> TokenBlocks:
        """Tokens as `prefix_is_coming` and `admit` need them, so that a request that waits is hashed once."""
        return TokenBlocks(tokens, self.block_size)

    def prefix_is_coming(self, tokens: TokenBlocks, computing: list[Sequence]) -> bool:
        """Whether one of these sequences is computing the block that these tokens, as far as cached, go on with."""
        if not self.prefix_cache or not computing:
            return False
        stop = self.manager.cached_prefix(tokens) + self.block_size
        return stop < len(tokens) and any(sequence.tokens[:stop] == tokens.tokens[:stop] for sequence in computing)

    def admit(self, request: Request, tokens: TokenBlocks) -> int:
        """Blocks for the tokens that its sequences have in common; how many of these the prefix cache has.

        Raises OutOfBlocks also if the free blocks do not hold the tokens that the sequences do not share.
        """
        needed = self._blocks_for(len(request.live), len(request.live[0].tokens), len(tokens))
        if len(request.live) > 1 and needed > self.manager.num_free_blocks:
            raise OutOfBlocks(f"{len(request.live)} sequences need {needed} blocks")
        return self.manager.allocate(request.live[0], tokens)

    def extend(self, sequence: Sequence) -> None:
        """Slots for all its tokens. OutOfBlocks: for some there are none; call again when there are."""
        for token in sequence.tokens[self.manager.num_tokens(sequence) :]:
            self.manager.append(sequence, token)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child shares the parent's blocks, until one of them writes."""
        self.manager.fork(parent, child)

    def commit(self, sequence: Sequence) -> None:
        """Let other prompts find the blocks that the sequence has computed."""
        self.manager.commit(sequence, sequence.num_computed)

    def free(self, sequence: Sequence) -> None:
        """A sequence of a running request has ended."""
        self.manager.free(sequence)

    def release(self, request: Request) -> None:
        """A running request does not run any more."""
        for sequence in request.in_memory():
            self.manager.free(sequence)

    def attention(self, batch: Batch) -> Attend:
        """Write a step's keys and values into their slots, then attend: all of it told by the batch."""
        with span("block tables"):
            tables = (batch.block_tables, batch.seq_lens, batch.cu_seqlens_q)
            decodes = len(batch.token_ids) == len(batch.seq_lens)  # no chunk is empty
            plan = paged_attention_varlen.plan(
                *tables, block_size=self.block_size, backend=self.backend, decodes=decodes
            )

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # [total_q, heads, D]
            with span("cache write"):
                self.cache.write(layer, batch.slots, k, v, check=False)
            with span("attention"):
                out = plan.attend(q, self.cache.k[layer], self.cache.v[layer])
            return out.transpose(0, 1)[None]

        return attend


class DenseMemory:
    """A tensor [2, layers, Hkv, most_slots, D] for each sequence: K and V, reserved for its longest answer."""

    def __init__(
        self, config: object, *, num_tokens: int, backend: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_tokens, self.backend = num_tokens, backend
        self._shape = (2, config.num_hidden_layers, config.num_key_value_heads)
        self._head_dim, self._options = config.head_dim, {"dtype": dtype, "device": device}
        self._kv: dict[Sequence, Tensor] = {}
        self._reserved: dict[Request, int] = {}
        self._padded_buffer = torch.empty(
            0, **self._options
        )  # for `_padded`: a fresh one would cost more than the copying

    @property
    def nbytes(self) -> int:
        """Bytes of all sequences that run, used or not."""
        return sum(kv.nbytes for kv in self._kv.values())

    used_nbytes = nbytes

    @property
    def usage(self) -> float:
        """The share of the tokens that are reserved, from 0 to 1."""
        return sum(self._reserved.values()) / self.num_tokens

    def check_fits(self, request: Request) -> None:
        """ValueError if the request reserves more than there is, even alone."""
        needed = request.width * request.most_slots
        if needed > self.num_tokens:
            raise ValueError(
                f"{request.described} reserve {needed} tokens, and the memory has {self.num_tokens}: raise num_blocks, "
                f"or ask for less"
            )

    def blocks(self, tokens: list[int]) -> list[int]:
        """Return the tokens as they are: dense memory has no blocks."""
        return tokens

    def prefix_is_coming(self, tokens: list[int], computing: list[Sequence]) -> bool:
        """Nothing is shared here."""
        return False

    def admit(self, request: Request, tokens: list[int]) -> int:
        """Reserve what its sequences may ever need. Raises OutOfBlocks; nothing is ever cached."""
        needed = request.width * request.most_slots
        left = self.num_tokens - sum(self._reserved.values())
        if needed > left:
            raise OutOfBlocks(f"the request reserves {needed} tokens and {left} are left")
        self._kv[request.live[0]] = self._new(request.most_slots)
        self._reserved[request] = needed
        return 0

    def _new(self, num_tokens: int) -> Tensor:
        return torch.empty(*self._shape, num_tokens, self._head_dim, **self._options)

    def extend(self, sequence: Sequence) -> None:
        """There is room."""

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child gets a copy."""
        self._kv[child] = self._new(self._kv[parent].shape[3])
        self._kv[child][:, :, :, : parent.num_computed] = self._kv[parent][:, :, :, : parent.num_computed]

    def commit(self, sequence: Sequence) -> None:
        """Nothing is shared here."""

    def free(self, sequence: Sequence) -> None:
        """A sequence of a running request has ended."""
        del self._kv[sequence]

    def release(self, request: Request) -> None:
        """A running request does not run any more."""
        for sequence in request.live:
            self._kv.pop(sequence, None)
        del self._reserved[request]

    def attention(self, batch: Batch) -> Attend:
        """Prompts one by one, then all decoding sequences as one padded batch."""
        rows = batch.rows
        decoding = [(row, chunk) for row, chunk in rows if row.stop - row.start == 1]
        lens = [chunk.stop for _, chunk in decoding]
        seq_lens = torch.tensor(lens, dtype=torch.int32, device=batch.token_ids.device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = torch.empty_like(q)
            with span("cache write"):
                for row, chunk in rows:
                    kv = self._kv[chunk.sequence][:, layer]
                    kv[0, :, chunk.start : chunk.stop] = k[0, :, row]
                    kv[1, :, chunk.start : chunk.stop] = v[0, :, row]
            for row, chunk in rows:
                if row.stop - row.start > 1:
                    keys, values = self._kv[chunk.sequence][:, layer, None, :, : chunk.stop]
                    with span("attention"):
                        out[:, :, row] = self._prefill(q[:, :, row], keys, values)
            if decoding:
                at = [row.start for row, _ in decoding]
                with span("build batch"):
                    keys, values = self._padded(layer, decoding, max(lens))
                with span("attention"):
                    new = self._decode(q[0, :, at].transpose(0, 1)[:, :, None], keys, values, seq_lens)
                out[0, :, at] = new[:, :, 0].transpose(0, 1)
            return out

        return attend

    def _padded(self, layer: int, decoding: list, longest: int) -> Tensor:
        """[2, B, Hkv, longest, D]: keys and values of all, 0 after their ends. The next call overwrites them."""
        _, _, Hkv = self._shape
        shape = (2, len(decoding), Hkv, longest, self._head_dim)
        if self._padded_buffer.numel() < prod(shape):
            self._padded_buffer = self._padded_buffer.new_empty(prod(shape) * 5 // 4)
        batch = self._padded_buffer[: prod(shape)].view(shape)
        for i, (_, chunk) in enumerate(decoding):
            batch[:, i, :, : chunk.stop] = self._kv[chunk.sequence][:, layer, :, : chunk.stop]
            batch[:, i, :, chunk.stop :] = 0
        return batch

    def _prefill(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.backend != "torch":
            return flash_attention(q, k, v, causal=True, backend=self.backend)
        T, S = q.shape[2], k.shape[2]
        mask = None if T == S else torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor) -> Tensor:
        if self.backend == "triton":
            return flash_decoding(q, k, v, seq_lens=seq_lens, check=False, backend="triton")
        if self.backend == "cuda":
            pieces = zip(q, k, v, seq_lens.tolist(), strict=True)
            return torch.cat(
                [flash_attention(a[None], b[None, :, :n], c[None, :, :n], backend="cuda") for a, b, c, n in pieces]
            )
        visible = torch.arange(k.shape[2], device=q.device) < seq_lens[:, None, None, None]
        return scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
