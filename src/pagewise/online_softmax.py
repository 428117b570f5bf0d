"""Online softmax: attention over keys that arrive a piece at a time (lesson 3).

All that has been seen of a row of scores s and its values v fits in three quantities,

    m = max s        l = Σ exp(s − m)        acc = Σ exp(s − m) · v

and two such summaries of disjoint keys merge into one:  softmax(s) @ v = acc / l,  logsumexp(s) = m + log l.
Milakov & Gimelshein 2018; Rabe & Staats 2021.
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from pagewise.naive_attention import finite, grouped_matmul, masked_scores, query_positions, row_max
from pagewise.options import ScoreOptions
from pagewise.tools.checks import FLOATS, check_count, check_qkv, check_same, check_shape
from pagewise.tools.device import choose_backend
from pagewise.tools.launch import launch
from pagewise.tools.ops import custom_op
from pagewise.tools.products import product
from pagewise.tools.transforms import derivative_of, outside_graphs


class Partial(NamedTuple):
    """Attention over some of the keys, not yet normalised. `Partial.empty` is the zero of `merge`."""

    m: Float[Tensor, "*rows"]
    l: Float[Tensor, "*rows"]
    acc: Float[Tensor, "*rows D"]

    @classmethod
    def empty(
        cls, *rows: int, head_size: int, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
    ) -> "Partial":
        """What is known before any key is seen: m = −∞, l = 0, acc = 0."""
        m = torch.full(rows, -torch.inf, dtype=dtype, device=device)
        return cls(m, torch.zeros_like(m), torch.zeros(*rows, head_size, dtype=dtype, device=device))

    @classmethod
    def of(cls, scores: Float[Tensor, "*rows S"], values: Float[Tensor, "*#rows S D"]) -> "Partial":
        """The summary of S scores and their values, in float32 (float64 for float64). −inf: may not look."""
        m, weights = _unnormalised(scores)
        acc = product(weights[..., None, :], values.to(weights.dtype))
        return cls(m, weights.sum(dim=-1), acc.squeeze(-2))

    @classmethod
    def of_heads(cls, scores: Float[Tensor, "B H T S"], values: Float[Tensor, "B Hkv S D"]) -> "Partial":
        """`Partial.of` for T queries of H heads that share the values of Hkv heads: one matrix product per KV head."""
        m, weights = _unnormalised(scores)
        return cls(m, weights.sum(dim=-1), grouped_matmul(weights, values.to(weights.dtype)))

    def merge(self, other: "Partial") -> "Partial":
        """The summary of both sets of keys. Associative and commutative, up to rounding. ValueError if rows differ."""
        if self.acc.shape != other.acc.shape:
            raise ValueError(f"other must have acc of shape {list(self.acc.shape)}, got {list(other.acc.shape)}")
        m = torch.maximum(self.m, other.m)
        a, b = torch.exp(self.m - finite(m)), torch.exp(other.m - finite(m))
        return Partial(m, a * self.l + b * other.l, a[..., None] * self.acc + b[..., None] * other.acc)

    def output(self) -> Float[Tensor, "*rows D"]:
        """softmax(s) @ v: acc / l, and 0 where no key was visible."""
        return self.acc / self.l.masked_fill(self.l == 0, 1.0)[..., None]

    def lse(self) -> Float[Tensor, "*rows"]:
        """Natural log-sum-exp of the scores: m + log l, and −inf where no key was visible."""
        return self.m + torch.log(self.l)


def _unnormalised(scores: Float[Tensor, "*rows S"]) -> tuple[Float[Tensor, "*rows"], Float[Tensor, "*rows S"]]:
    """(m, exp(scores − m)) of each row, in float32 at least; weights 0 in a row of −inf."""
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    m = row_max(scores)
    return m, torch.exp(scores - finite(m)[..., None])


def online_softmax(
    x: Float[Tensor, "*rows S"], tile_size: int, *, backend: Literal["auto", "torch", "triton"] = "auto"
) -> Float[Tensor, "*rows S"]:
    """softmax(x) along the last dimension, reading x twice, `tile_size` numbers at a time.

    The first pass keeps (m, l) only, the second writes exp(x − m) / l. A row of −inf gives 0. In the dtype of x.
    Differentiable. `backend="triton"` needs a power-of-two tile_size and takes float32, float16 and bfloat16;
    "auto" takes it where x is on a GPU and it can.

    Raises:
        ValueError, TypeError: tile_size < 1, x without dimensions or not floating point, backend unknown or unable.
    """
    check_count("tile_size", tile_size)
    if not isinstance(x, Tensor) or x.dtype not in (*FLOATS, torch.float64):
        raise TypeError(f"x must be a floating-point tensor [..., S], got {getattr(x, 'dtype', type(x).__name__)}")
    if x.dim() == 0:
        raise ValueError("x must have at least 1 dimension [..., S], got a scalar")
    refusal, derivative = _triton_refuses(x, tile_size), derivative_of(x)
    if choose_backend(backend, x.device, refusal, derivative=derivative, has_backward=True) == "torch":
        return _online_softmax_torch(x, tile_size)
    return torch.ops.pagewise.online_softmax(x, tile_size)


def _triton_refuses(x: Tensor, tile_size: int) -> str | None:
    """Why the Triton kernel cannot run, or None."""
    if x.dtype not in FLOATS:
        return f"takes float32, float16 or bfloat16, got {x.dtype}"
    return None if tile_size & (tile_size - 1) == 0 else f"needs a tile_size that is a power of two, got {tile_size}"


@outside_graphs('online_softmax(backend="torch")', remedy='backend="triton", or torch.softmax')
def _online_softmax_torch(x: Float[Tensor, "*rows S"], tile_size: int) -> Float[Tensor, "*rows S"]:
    seen = Partial.empty(*x.shape[:-1], head_size=0, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    tiles = x.split(int(tile_size), dim=-1)
    for tile in tiles:
        seen = seen.merge(Partial.of(tile, tile.new_empty(*tile.shape, 0)))
    l = seen.l.masked_fill(seen.l == 0, 1.0)
    out = [torch.exp(tile.to(l.dtype) - finite(seen.m)[..., None]) / l[..., None] for tile in tiles]
    return torch.cat(out, dim=-1).to(x.dtype)


@custom_op("online_softmax", fake=lambda x, _: torch.empty_like(x, memory_format=torch.contiguous_format))
def _online_softmax_op(x: Tensor, tile_size: int) -> Tensor:
    from pagewise.kernels.online_softmax import online_softmax_kernel

    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        S = x.shape[-1]
        rows = out.view(-1)
        launch(online_softmax_kernel, (x.numel() // S,), x.view(-1), rows, S, TILE=tile_size, outputs=(rows,))
    return out


def _softmax_backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
    (saved,) = ctx.saved_tensors
    out, g = saved.float(), grad.float()
    return (out * (g - (g * out).sum(dim=-1, keepdim=True))).to(saved.dtype), None


torch.library.register_autograd(
    "pagewise::online_softmax",
    _softmax_backward,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


@outside_graphs("online_attention", remedy="pagewise.flash_attention.flash_attention")
def online_attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B Hkv S D"],
    v: Float[Tensor, "B Hkv S D"],
    *,
    tile_size: int,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Float[Tensor, " H"] | None = None,
    attn_mask: Bool[Tensor, "..."] | None = None,
    return_lse: bool = False,
) -> Float[Tensor, "B H T D"] | tuple[Float[Tensor, "B H T D"], Float[Tensor, "B H T"]]:
    """`naive_attention.attention` without its T × S matrix: keys and values are read once, `tile_size` at a time.

    Options, results and errors are those of `attention` (no dropout); scores exist for one tile only.
    """
    check_qkv(q, k, v)
    check_count("tile_size", tile_size)
    options = ScoreOptions(scale, causal, window, softcap, alibi_slopes, attn_mask).checked(q, k.shape[2])
    (B, H, T, D), S = q.shape, k.shape[2]
    queries = query_positions(T, S, q.device)
    seen = Partial.empty(B, H, T, head_size=D, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    for start in range(0, S, tile_size):
        keys = torch.arange(start, min(start + tile_size, S), device=q.device)
        k_tile, v_tile = k[:, :, start : start + tile_size], v[:, :, start : start + tile_size]
        of_tile = options._replace(attn_mask=mask_tile(attn_mask, start, tile_size))
        scores = masked_scores(q, k_tile, queries, keys, of_tile)
        seen = seen.merge(Partial.of_heads(scores, v_tile))
    out = seen.output().to(q.dtype)
    return (out, seen.lse()) if return_lse else out


def mask_tile(mask: Bool[Tensor, "..."] | None, start: int, tile_size: int) -> Bool[Tensor, "..."] | None:
    """The columns of a mask that belong to keys [start, start + tile_size); a mask with one column has it for all."""
    has_columns = mask is not None and mask.dim() > 0 and mask.shape[-1] > 1
    return mask[..., start : start + tile_size] if has_columns else mask


def merge_attention(
    outs: Float[Tensor, "n *rows D"], lses: Float[Tensor, "n *rows"]
) -> tuple[Float[Tensor, "*rows D"], Float[Tensor, "*rows"]]:
    """Attention over all keys from n normalised results over disjoint pieces of them, each with its log-sum-exp.

        lse = log Σ_i exp(lse_i)        out = Σ_i exp(lse_i − lse) · out_i

    A piece that saw no key has lse −inf (+inf counts as the same, as some kernels write it); whatever its `out`
    holds, NaN included, is not read. If no piece saw a key, out is 0 and lse is −inf.

    Returns:
        out in the dtype of `outs`, lse in that of `lses`.

    Raises:
        ValueError, TypeError: shapes or devices do not fit, or lses is neither float32 nor float64.
    """
    for name, tensor, dtypes in (
        ("outs", outs, (*FLOATS, torch.float64)),
        ("lses", lses, (torch.float32, torch.float64)),
    ):
        if not isinstance(tensor, Tensor) or tensor.dtype not in dtypes:
            got = getattr(tensor, "dtype", type(tensor).__name__)
            raise TypeError(f"{name} must be a tensor of {' or '.join(map(str, dtypes))}, got {got}")
    if outs.dim() < 2:
        raise ValueError(f"outs must be [n, ..., D], got shape {list(outs.shape)}")
    check_shape("lses", lses, outs.shape[:-1], "n ...")
    check_same("device", outs=outs, lses=lses)
    lse_dtype = lses.dtype
    lses = lses.to(torch.promote_types(outs.dtype, lse_dtype))
    empty = torch.isinf(lses)
    lses = lses.masked_fill(empty, -torch.inf)
    m = row_max(lses.movedim(0, -1))
    weights = torch.exp(lses - finite(m))
    l = weights.sum(dim=0)
    parts = outs.to(lses.dtype).masked_fill(empty[..., None], 0.0) * weights[..., None]
    out = parts.sum(dim=0) / l.masked_fill(l == 0, 1.0)[..., None]
    return out.to(outs.dtype), (m + torch.log(l)).to(lse_dtype)
