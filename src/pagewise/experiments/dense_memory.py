"""Contiguous keys and values: the memory that paging replaces (lesson 9).

Attention kernels for dense tensors need one tensor for the whole batch. Sequences have different lengths, so every
decode step copies the keys and values of all sequences into one padded batch, for each layer. Paged attention needs no
such copies.
"""

from collections.abc import Callable
from itertools import accumulate, pairwise
from math import prod

import torch
from torch import Tensor

from pagewise.engine.batch import Batch
from pagewise.engine.config import EngineConfig, KVSizes
from pagewise.engine.profile import Profile
from pagewise.engine.request import Chunk, Request, Sequence
from pagewise.flash_attention import flash_attention
from pagewise.flash_decoding import flash_decoding
from pagewise.flash_decoding_plus_plus import UnifiedMax, unified_max_attention
from pagewise.models import Attend
from pagewise.paged_attention_varlen.fused import fused_attention
from pagewise.paged_blocks import OutOfBlocks

Write = Callable[[int, Chunk, Tensor, Tensor], None]
"""write(layer, chunk, k[Hkv, T, D], v): store the keys and values of a chunk."""
Read = Callable[[int, Chunk], Tensor]
"""read(layer, chunk) -> [2, Hkv, stop, D]: the keys and values of the chunk's sequence, up to its end."""


class PaddedAttention:
    """Attention over contiguous keys: of each prompt alone, and of all decoding sequences in one padded batch."""

    def __init__(
        self, backend: str, *, dtype: torch.dtype, device: torch.device, unified_max: UnifiedMax | None = None
    ) -> None:
        self.backend, self.unified_max = backend, unified_max
        self.num_recomputed = torch.zeros((), dtype=torch.int64, device=device)
        # One buffer for all batches: the allocation of a fresh one would take longer than the copying.
        self._buffer = torch.empty(0, dtype=dtype, device=device)

    def of_step(self, batch: Batch, write: Write, read: Read) -> Attend:
        """Return the `Attend` of one step, over a memory that these two functions write and read."""
        ends = accumulate((chunk.stop - chunk.start for chunk in batch.chunks), initial=0)
        rows = [(slice(*row), chunk) for row, chunk in zip(pairwise(ends), batch.chunks, strict=True)]
        decoding = [(row, chunk) for row, chunk in rows if row.stop - row.start == 1]
        lens = [chunk.stop for _, chunk in decoding]
        seq_lens = torch.tensor(lens, dtype=torch.int32, device=batch.token_ids.device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = torch.empty_like(q)
            with Profile.span("cache write"):
                for row, chunk in rows:
                    write(layer, chunk, k[0, :, row], v[0, :, row])
            for row, chunk in rows:
                if row.stop - row.start > 1:
                    keys, values = read(layer, chunk)[:, None]
                    with Profile.span("attention"):
                        out[:, :, row] = self._prefill(q[:, :, row], keys, values)
            if decoding:
                at = [row.start for row, _ in decoding]
                with Profile.span("build batch"):
                    keys, values = self._padded(layer, [chunk for _, chunk in decoding], read)
                with Profile.span("attention"):
                    new = self._decode(q[0, :, at].transpose(0, 1)[:, :, None], keys, values, seq_lens)
                out[0, :, at] = new[:, :, 0].transpose(0, 1)
            return out

        return attend

    def _padded(self, layer: int, chunks: list[Chunk], read: Read) -> Tensor:
        """Return the keys and values of all sequences, [2, B, Hkv, longest, D], with 0 after the end of each.

        The next call overwrites them.
        """
        longest = max(chunk.stop for chunk in chunks)
        for i, chunk in enumerate(chunks):
            keys_and_values = read(layer, chunk)
            if i == 0:
                _, Hkv, _, D = keys_and_values.shape
                batch = self._view((2, len(chunks), Hkv, longest, D))
            batch[:, i, :, : chunk.stop] = keys_and_values
            batch[:, i, :, chunk.stop :] = 0
        return batch

    def _view(self, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor of this shape in the buffer, which grows if it is too small."""
        if self._buffer.numel() < prod(shape):
            self._buffer = self._buffer.new_empty(prod(shape) * 5 // 4)
        return self._buffer[: prod(shape)].view(shape)

    def _prefill(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k.to(q.dtype), v.to(q.dtype)  # under autocast q is not in the dtype of the memory
        if self.backend != "torch":
            return flash_attention(q, k, v, causal=True, backend=self.backend)
        T, S = q.shape[2], k.shape[2]
        mask = None if T == S else torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)

        def exact(rows: Tensor | slice) -> Tensor:
            return flash_attention(q, k, v, causal=True, backend="torch")[:, :, rows]

        return fused_attention(q, k, v, scale=q.shape[-1] ** -0.5, is_causal=mask is None, mask=mask, otherwise=exact)

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor) -> Tensor:
        k, v = k.to(q.dtype), v.to(q.dtype)
        if self.unified_max is not None:
            out, recomputed = unified_max_attention(q, k, v, self.unified_max, seq_lens=seq_lens, backend=self.backend)
            self.num_recomputed += recomputed.sum()  # on the device: the host does not wait
            return out
        if self.backend == "triton":
            return flash_decoding(q, k, v, seq_lens=seq_lens, check=False, backend="triton")
        if self.backend == "cuda":
            pieces = zip(q, k, v, seq_lens.tolist(), strict=True)
            return torch.cat(
                [flash_attention(a[None], b[None, :, :n], c[None, :, :n], backend="cuda") for a, b, c, n in pieces]
            )
        visible = torch.arange(k.shape[2], device=q.device) < seq_lens[:, None, None, None]

        def exact(rows: Tensor | slice) -> Tensor:
            return flash_decoding(q, k, v, seq_lens=seq_lens, backend="torch")[:, :, rows]

        return fused_attention(q, k, v, scale=q.shape[-1] ** -0.5, mask=visible, otherwise=exact)


class DenseMemory:
    """A tensor [2, layers, Hkv, most_slots, D] for each sequence: K and V, reserved for its longest answer.

    Nothing is shared. A request reserves slots for all its sequences as long as one of them is here.
    """

    prefix_cache = False

    def __init__(self, config: EngineConfig, sizes: KVSizes, device: torch.device, dtype: torch.dtype) -> None:
        self.num_tokens, self.block_size = config.num_blocks * config.block_size, config.block_size
        self.device, self.dtype, self._sizes = device, dtype, sizes
        self._kv: dict[Sequence, Tensor] = {}
        self._requests: dict[Sequence, Request] = {}
        self._padded = PaddedAttention(config.backend, dtype=dtype, device=device, unified_max=config.unified_max)

    @property
    def nbytes(self) -> int:
        """Bytes of all sequences that run, used or not."""
        return sum(kv.nbytes for kv in self._kv.values())

    used_nbytes = nbytes

    @property
    def num_reserved(self) -> int:
        """Tokens that running requests may ever need."""
        return sum(request.width * request.most_slots for request in set(self._requests.values()))

    @property
    def usage(self) -> float:
        """The share of the tokens that are reserved, from 0 to 1."""
        return self.num_reserved / self.num_tokens

    @property
    def num_recomputed(self) -> int:
        """Rows for which φ of `unified_max` was not safe so far: one per head, layer and decoded token."""
        return int(self._padded.num_recomputed)

    def check_fits(self, request: Request) -> None:
        """Raise ValueError if the request reserves more than there is, even alone."""
        needed = request.width * request.most_slots
        if needed > self.num_tokens:
            raise ValueError(
                f"{request.sampling.described(len(request.prompt))} reserve {needed} tokens, and the memory has "
                f"{self.num_tokens}: raise num_blocks, or ask for less"
            )

    def admit(self, request: Request, computing: list[Chunk]) -> int:
        """Reserve what all sequences may ever need. Raises OutOfBlocks; nothing is ever cached."""
        needed, left = request.width * request.most_slots, self.num_tokens - self.num_reserved
        if needed > left:
            raise OutOfBlocks(f"the request reserves {needed} tokens and {left} are left")
        first = request.live[0]
        self._kv[first], self._requests[first] = self._new(request.most_slots), request
        return 0

    def _new(self, num_tokens: int) -> Tensor:
        num_layers, num_kv_heads, head_dim, _ = self._sizes
        return torch.empty(2, num_layers, num_kv_heads, num_tokens, head_dim, dtype=self.dtype, device=self.device)

    def resize(self, sequence: Sequence, num_tokens: int) -> None:
        """There is room for the longest answer already."""

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Give the child a copy."""
        new, done = self._new(self._kv[parent].shape[3]), parent.num_computed
        new[:, :, :, :done] = self._kv[parent][:, :, :, :done]
        self._kv[child], self._requests[child], child.num_computed = new, self._requests[parent], done

    def commit(self, sequence: Sequence, num_computed: int) -> None:
        """Note how many tokens are computed."""
        sequence.num_computed = num_computed

    def free(self, sequence: Sequence) -> None:
        """Free the tensor of a sequence, if it has one."""
        self._kv.pop(sequence, None)
        self._requests.pop(sequence, None)
        sequence.num_computed = 0

    def batch(self, chunks: list[Chunk]) -> Batch:
        """Return a step without block tables."""
        return Batch.of(chunks, self.device)

    def attention(self, batch: Batch) -> Attend:
        """Return the `Attend` of a step: write its keys and values, copy all sequences into a batch, attend."""

        def write(layer: int, chunk: Chunk, k: Tensor, v: Tensor) -> None:
            kv = self._kv[chunk.sequence][:, layer]
            kv[0, :, chunk.start : chunk.stop] = k
            kv[1, :, chunk.start : chunk.stop] = v

        def read(layer: int, chunk: Chunk) -> Tensor:
            return self._kv[chunk.sequence][:, layer, :, : chunk.stop]

        return self._padded.of_step(batch, write, read)
