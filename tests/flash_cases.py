"""What the tests of FlashAttention share: inputs, the options of every kind, and the oracle with its gradients."""

import math

import torch

from conftest import assert_as_accurate_as_naive
from pagewise.flash_attention import dropout_mask
from pagewise.naive_attention import attention

SEED = 11
KINDS = ["plain", "causal", "window", "softcap", "alibi", "mask", "dropout", "all"]


def random_qkv(T, S, D, heads=(6, 2), batch=2, dtype=torch.float64, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    H, Hkv = heads
    shapes = ((batch, H, T, D), (batch, Hkv, S, D), (batch, Hkv, S, D))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes]


def as_tokens(*tensors):
    """The same numbers with a token's heads beside each other, [B, T, H, D], as a model's projections leave them."""
    return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]


def options_of(kind, B, H, T, S, device="cpu"):
    """The options of one kind; "all" is everything together."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(B, H, T, S, generator=generator) < 0.7
    mask[:, :, T // 2] = False  # a query that sees nothing
    kinds = {
        "plain": {},
        "causal": {"causal": True},
        "window": {"causal": True, "window": 37},
        "softcap": {"softcap": 1.5},
        "alibi": {"alibi_slopes": 2.0 ** -torch.arange(1.0, H + 1, device=device)},
        "mask": {"attn_mask": mask.to(device)},
        "dropout": {"dropout_p": 0.17, "dropout_seed": SEED},
        "scale": {"scale": -0.3},
    }
    return (
        {name: value for options in kinds.values() for name, value in options.items()} if kind == "all" else kinds[kind]
    )


def as_drawn(p):
    """The probability that 16-bit draws have: the weights that are kept grow by 1 / (1 − p) for this p."""
    return round(p * 2**16) / 2**16


def naive(q, k, v, options, return_lse=True):
    """`attention` with the same weights dropped."""
    options = dict(options)
    seed = options.pop("dropout_seed", None)
    if p := options.get("dropout_p"):
        shape = (*q.shape[:3], k.shape[2])
        options |= {"dropout_p": as_drawn(p), "dropout_mask": dropout_mask(shape, p, seed, q.device)}
    return attention(q, k, v, **options, return_lse=return_lse)


def with_gradients(attend, q, k, v, d_out, d_lse):
    """(out, lse), (dq, dk, dv); the gradient of lse counts where a key is seen."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out, lse = attend(q, k, v)
    sees = lse > -math.inf
    loss = (out * d_out.to(out.dtype)).sum() + (torch.where(sees, lse, 0.0) * d_lse.to(lse.dtype)).sum()
    return (out, lse), torch.autograd.grad(loss, (q, k, v))


def random_gradients(q, seed=3, of_lse=8):
    """Of out and lse; that of lse is large, or dq would be the rounding of 0 where a single key is seen."""
    generator = torch.Generator().manual_seed(seed)
    d_out, d_lse = (torch.randn(shape, generator=generator) for shape in (q.shape, q.shape[:3]))
    return d_out.to(q), of_lse * d_lse.to(q.device)


def assert_matches_naive(attend, q, k, v, options):
    """`attend(q, k, v)` and its gradients, through lse too, are as accurate as naive attention in the same dtype."""
    gradients = random_gradients(q, of_lse=8 if k.shape[2] > 1 else 64)
    (out, lse), of_inputs = with_gradients(attend, q, k, v, *gradients)
    in_dtype = with_gradients(lambda *qkv: naive(*qkv, options), q, k, v, *gradients)
    exact = with_gradients(lambda *qkv: naive(*qkv, options), *(x.double() for x in (q, k, v)), *gradients)
    sees = lse > -math.inf
    assert sees.equal(exact[0][1] > -math.inf)
    assert_as_accurate_as_naive(out, exact[0][0], in_dtype[0][0])
    lses = (torch.where(sees, x, 0.0).reshape(-1, 1) for x in (lse, exact[0][1], in_dtype[0][1]))
    assert_as_accurate_as_naive(*lses)
    for of_x, of_exact, of_naive in zip(of_inputs, exact[1], in_dtype[1], strict=True):
        assert_as_accurate_as_naive(of_x, of_exact, of_naive, factor=3)
