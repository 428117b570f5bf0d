"""Small calls that launch the Triton kernels of the package, and the oracle's formula for their results.

Each function of CALLS returns a `Case` for a dtype and a head size. With `options=True`, the call also uses the options
that its kernels have: a window, softcap, ALiBi, a float8 cache, several queries, a mask, dropout. Tiles are cut, one
sequence is empty, and the slots and keys that no query may see hold NaN.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagewise.flash_attention import dropout_mask, flash_attention
from pagewise.flash_decoding import flash_decoding
from pagewise.flash_decoding_plus_plus import UnifiedMax, lazy_rescale_attention, unified_max_attention
from pagewise.naive_attention import attention
from pagewise.online_softmax import online_softmax
from pagewise.paged_attention import paged_attention
from pagewise.paged_attention_varlen import paged_attention_varlen
from pagewise.paged_blocks import PagedKVCache
from pagewise.tools.sizes import cdiv, padded

Tensors = tuple[Tensor, ...]
H, HKV, P = 4, 2, 16  # query heads, KV heads, tokens per block
TRITON = {"backend": "triton"}


class Case(NamedTuple):
    """One call of Triton kernels."""

    run: Callable[[], Tensors]  # by the kernels
    naive: Callable[[torch.dtype], Tensors]  # the same results by the oracle's formula, computed in a dtype


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Return the same random numbers for the same arguments."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def seen(lse: Tensor) -> Tensor:
    """Return lse [..., 1] with 0 for a query that sees no key, so that its error can be measured."""
    return torch.where(lse > -torch.inf, lse, 0.0)[..., None]


def dense(B: int, T: int, S: int, D: int, dtype: torch.dtype) -> list[Tensor]:
    """Return q [B, H, T, D], k and v [B, HKV, S, D]."""
    sizes = (B, H, T, D), (B, HKV, S, D), (B, HKV, S, D)
    return [normal(*size, seed=seed).to(dtype) for seed, size in enumerate(sizes)]


def of_scores(options: bool) -> dict[str, Any]:
    """Return the options that every decode kernel has."""
    slopes = 2.0 ** -torch.arange(1.0, H + 1)
    return {"window": 37, "softcap": 1.5, "alibi_slopes": slopes} if options else {}


# ------------------------------------------------------------------------------------------------ lessons 3, 5


def softmax(dtype: torch.dtype, D: int, options: bool) -> Case:
    """Lesson 3's online softmax of three rows. Options: a row whose first tile holds −∞ alone."""
    x = normal(3, 2 * D + 5).to(dtype)
    tile = padded(D)
    x[1, : tile if options else 0] = -torch.inf  # a whole tile without a number
    return Case(lambda: (online_softmax(x, tile, **TRITON),), lambda dtype: (x.to(dtype).softmax(dim=-1),))


def write(dtype: torch.dtype, D: int, options: bool) -> Case:
    """Options: a float8 cache with scales, in vLLM's layout if the head size allows it."""
    slots = torch.tensor([5, -1, 40, 0, 33])
    k, v = normal(2, len(slots), HKV, D, seed=1).to(dtype)
    stored = torch.float8_e4m3fn if options else dtype
    layout = "vllm" if options and D % 16 == 0 else "nhd"
    scales = {"k_scale": 0.5, "v_scale": 3.0} if options else {}

    def written(backend: str) -> Tensors:
        cache = PagedKVCache(1, 3, P, HKV, D, dtype=stored, device="cpu", layout=layout)
        cache.write(0, slots, k, v, **scales, backend=backend)
        return tuple(x.float() for i in range(2) for x in cache.gather(0, torch.arange(3), 3 * P))

    def by_torch(dtype: torch.dtype) -> Tensors:
        return tuple(x.to(torch.promote_types(dtype, torch.float32)) for x in written("torch"))

    return Case(lambda: written("triton"), by_torch)


class Paged(NamedTuple):
    """Queries over a cache. The queries of a sequence are its newest tokens; `ends` are the sums of their numbers."""

    q: Tensor  # [total_q, H, D]
    k_cache: Tensor  # [N, P, HKV, D]
    v_cache: Tensor
    tables: Tensor  # [B, M]
    lens: Tensor  # [B]
    ends: Tensor  # [B + 1]

    @classmethod
    def of(cls, lens: list[int], queries: list[int], D: int, dtype: torch.dtype, stored: torch.dtype) -> "Paged":
        """Return random tensors with scattered blocks. Slots that hold no token are NaN."""
        M = cdiv(max(lens), P)
        tables = torch.randperm(len(lens) * M, generator=torch.Generator().manual_seed(0)).view(-1, M).int()
        caches = normal(2, len(lens) * M, P, HKV, D, seed=1)
        for table, length in zip(tables.long(), lens, strict=True):
            for i, block in enumerate(table.tolist()):
                caches[:, block, max(0, length - i * P) :] = torch.nan
        q = normal(sum(queries), H, D, seed=2).to(dtype)
        ends = torch.tensor([0, *queries]).cumsum(0).int()
        return cls(q, *caches.to(stored), tables, torch.tensor(lens).int(), ends)

    def naive(self, dtype: torch.dtype, k_scale: float = 1.0, v_scale: float = 1.0, **options: Any) -> Tensors:
        """Return (out, lse), one sequence after the other."""
        results = []
        for b, length in enumerate(self.lens.tolist()):
            q = self.q[self.ends[b] : self.ends[b + 1]].to(dtype).transpose(0, 1)[None]
            k, v = (
                (cache[self.tables[b].long()].double().flatten(0, 1)[:length] * scale).to(dtype).transpose(0, 1)[None]
                for cache, scale in ((self.k_cache, k_scale), (self.v_cache, v_scale))
            )
            out, lse = attention(q, k, v, causal=True, return_lse=True, **options)
            results.append((out[0].transpose(0, 1), seen(lse[0].transpose(0, 1))))
        return tuple(map(torch.cat, zip(*results, strict=True)))


LENS = [70, 0, 33]


def of_cache(options: bool) -> dict[str, Any]:
    """Return the options of scores, and the scales of a float8 cache, if there are options."""
    return of_scores(options) | ({"k_scale": 0.5, "v_scale": 3.0} if options else {})


def paged_decode(dtype: torch.dtype, D: int, options: bool) -> Case:
    """Lesson 5's last rung and its merge. Options: also a float8 cache (e4m3)."""
    inputs = Paged.of(LENS, [1, 1, 1], D, dtype, torch.float8_e4m3fn if options else dtype)

    def run() -> Tensors:
        out, lse = paged_attention(*inputs[:5], num_splits=3, return_lse=True, **of_cache(options), **TRITON)
        return out, seen(lse)

    return Case(run, lambda dtype: inputs.naive(dtype, **of_cache(options)))


def varlen(dtype: torch.dtype, D: int, options: bool) -> Case:
    """Lesson 9's kernel and lesson 7's merge. Options: also a float8 cache (e5m2)."""
    inputs = Paged.of(LENS, [5, 0, 1], D, dtype, torch.float8_e5m2 if options else dtype)

    def run() -> Tensors:
        out, lse = paged_attention_varlen(*inputs, num_splits=3, return_lse=True, **of_cache(options), **TRITON)
        return out, seen(lse)

    return Case(run, lambda dtype: inputs.naive(dtype, **of_cache(options)))


# ------------------------------------------------------------------------------------------------ lessons 7, 8


def decode(dtype: torch.dtype, D: int, options: bool) -> Case:
    """Lesson 7's splits and their merge. Options: three queries per sequence, by programs that share the work."""
    q, k, v = dense(2, 3 if options else 1, 150, D, dtype)
    lens, more = torch.tensor([150, 70]), of_scores(options) | {"causal": True}
    k[1, :, 70:] = v[1, :, 70:] = torch.nan

    def run() -> Tensors:
        num_splits = None if options else 3
        out, lse = flash_decoding(
            q, k, v, seq_lens=lens.int(), num_splits=num_splits, return_lse=True, **more, **TRITON
        )
        return out, seen(lse)

    def naive(dtype: torch.dtype) -> Tensors:
        rows = ((x[b, None].to(dtype) for x in (q, k[:, :, : lens[b]], v[:, :, : lens[b]])) for b in range(2))
        out, lse = map(torch.cat, zip(*(attention(*row, **more, return_lse=True) for row in rows), strict=True))
        return out, seen(lse)

    return Case(run, naive)


def of_dense(q: Tensor, k: Tensor, v: Tensor, run: Callable[..., Tensor], **options: Any) -> Case:
    """Return the case of a function of dense keys that cuts them in three splits and returns its output alone."""

    def naive(dtype: torch.dtype) -> Tensors:
        return (attention(*(x.to(dtype) for x in (q, k, v)), **options),)

    return Case(lambda: (run(q, k, v, **options, num_splits=3, **TRITON),), naive)


def unified_max(dtype: torch.dtype, D: int, options: bool) -> Case:
    """Lesson 8's last rung: the unified maximum, the sum of its splits, and the rows that are computed again."""
    q, k, v = dense(2, 3 if options else 1, 150, D, dtype)

    def run(*qkv: Tensor, **options: Any) -> Tensor:
        out, recomputed = unified_max_attention(*qkv, UnifiedMax(0.0, -2.5, 2.5), **options)
        if not recomputed.any() or recomputed.all():
            raise AssertionError("some rows must leave the band, and some must not")
        return out

    return of_dense(q, k, v, run, causal=options)


def lazy_rescale(dtype: torch.dtype, D: int, options: bool) -> Case:
    """Lesson 8's lazy rescaling, and lesson 5's merge."""
    q, k, v = dense(2, 3 if options else 1, 150, D, dtype)
    return of_dense(q, k, v, lazy_rescale_attention, causal=options)


# ------------------------------------------------------------------------------------------------ lesson 6


def gradients_of(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of a loss with respect to out and to the lse of the queries that see a key."""
    return normal(*out.shape, seed=3).to(out.dtype), 8 * normal(*lse.shape, seed=4).to(lse.dtype)


def loss_of(out: Tensor, lse: Tensor) -> Tensor:
    """Return a loss with the gradients of `gradients_of`."""
    d_out, d_lse = gradients_of(out, lse)
    return (out * d_out).sum() + (seen(lse)[..., 0] * d_lse).sum()


def with_gradients(attend: Callable[..., Tensors], qkv: Iterable[Tensor]) -> Tensors:
    """Return (out, lse, dq, dk, dv)."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    out, lse = attend(*leaves)
    return out.detach(), seen(lse.detach()), *torch.autograd.grad(loss_of(out, lse), leaves)


def flash(dtype: torch.dtype, D: int, options: bool) -> Case:
    """Forward and backward. Options: all of them. In float32 the scores are so large that their rounding matters."""
    T, S = 37, 70
    qkv = dense(1, T, S, D, dtype)
    if dtype == torch.float32:
        qkv[0], qkv[1] = qkv[0].round() * 512, qkv[1].round()  # q · k is exact, in any order
    mask = torch.rand(1, H, T, S, generator=torch.Generator().manual_seed(5)) < 0.7
    mask[:, :, T // 2] = False  # a query that sees nothing
    every = {"causal": True, "attn_mask": mask, "dropout_p": 0.17, **of_scores(True)}
    more, seed = (every, {"dropout_seed": 11}) if options else ({"causal": True}, {})

    def run() -> Tensors:
        return with_gradients(lambda *qkv: flash_attention(*qkv, **more, **seed, return_lse=True, **TRITON), qkv)

    def naive(dtype: torch.dtype) -> Tensors:
        kept = {"dropout_mask": dropout_mask((1, H, T, S), 0.17, 11)} if options else {}
        attend = lambda *qkv: attention(*qkv, **more, **kept, return_lse=True)  # noqa: E731
        return with_gradients(attend, (x.to(dtype) for x in qkv))

    return Case(run, naive)


CALLS: dict[str, Callable[[torch.dtype, int, bool], Case]] = {
    "softmax": softmax,
    "write": write,
    "paged decode": paged_decode,
    "varlen": varlen,
    "decode": decode,
    "unified max": unified_max,
    "lazy rescale": lazy_rescale,
    "flash": flash,
}
