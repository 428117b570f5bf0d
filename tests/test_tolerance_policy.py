"""The tolerance policy itself: right results pass, every planted bug fails."""

import pytest
import torch

from conftest import assert_as_accurate_as_naive
from pagewise.naive_attention import attention

SHAPES = [(1, 2, 2, 1, 17, 32), (2, 8, 2, 33, 129, 64), (1, 4, 1, 7, 7, 80)]  # B, H, Hkv, T, S, D
NOTHING_SEEN = (1, 2, 2, 5, 3, 32)  # T > S: the first two queries stand before every key
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def inputs(shape, dtype):
    B, H, Hkv, T, S, D = shape
    generator = torch.Generator().manual_seed(sum(shape))
    sizes = [(B, H, T, D), (B, Hkv, S, D), (B, Hkv, S, D)]
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def in_tiles(q, k, v, *, bug: str | None = None, tile: int = 8):
    """Causal attention over tiles of keys in float32, with one mistake on request."""
    B, H, T, D = q.shape
    S = k.shape[2]
    k, v = (t.repeat_interleave(H // k.shape[1], dim=1).float() for t in (k, v))
    scores = q.float() @ k.mT * (1.0 if bug == "scale forgotten" else D**-0.5)
    shift = {"mask off by one": 1, "mask top-left": T - S}.get(bug, 0)
    hidden = torch.arange(S) > torch.arange(T)[:, None] + S - T + shift
    scores = scores.masked_fill(hidden, -1e4 if bug == "finite infinity" else -torch.inf)
    if bug == "one head shifted":
        scores = scores.roll(1, dims=1)
    m = torch.full((B, H, T), -torch.inf)
    l, acc = torch.zeros(B, H, T), torch.zeros(B, H, T, D)
    stop = S // tile * tile if bug == "tail dropped" else S
    for start in range(0, stop, tile):
        piece = scores[..., start : min(start + tile, stop)]
        values = v[:, :, start : min(start + tile, stop)]
        if bug == "wrong block" and start == tile:
            values = v[:, :, :tile][:, :, : piece.shape[-1]]
        m_new = torch.maximum(m, piece.amax(dim=-1))
        safe = m_new.masked_fill(m_new == -torch.inf, 0.0)
        rescale = torch.ones_like(m) if bug == "rescale skipped" else torch.exp(m - safe)
        weights = torch.exp(piece - safe[..., None])
        l = l * rescale + weights.sum(dim=-1)
        acc = acc * rescale[..., None] + weights @ values
        m = m_new
    out = acc / (l + (1.0 if bug == "epsilon in l" else 0.0)).masked_fill(l == 0, 1.0)[..., None]
    return torch.zeros_like(q) if bug == "all zero" else out.to(q.dtype)


def compare(shape, dtype, bug=None):
    q, k, v = inputs(shape, dtype)
    exact = attention(q.double(), k.double(), v.double(), causal=True)
    assert_as_accurate_as_naive(in_tiles(q, k, v, bug=bug), exact, attention(q, k, v, causal=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, NOTHING_SEEN])
def test_right_result_passes(shape, dtype):
    compare(shape, dtype)


BUGS = {
    **dict.fromkeys(["all zero", "tail dropped", "scale forgotten", "wrong block"], (1, 4, 2, 3, 17, 32)),
    **dict.fromkeys(["rescale skipped", "one head shifted", "epsilon in l"], (1, 4, 2, 3, 17, 32)),
    **dict.fromkeys(["mask off by one", "mask top-left"], (1, 4, 2, 5, 17, 32)),
    "finite infinity": NOTHING_SEEN,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_fails(bug, dtype):
    with pytest.raises(AssertionError):
        compare(BUGS[bug], dtype, bug)


def test_row_of_zeros_fails_beside_much_larger_rows():
    q, k, v = inputs((1, 2, 2, 4, 16, 32), torch.bfloat16)
    v[:, 0] *= 1e-4  # head 0's right output is far below head 1's rounding error
    exact, naive = attention(q.double(), k.double(), v.double()), attention(q, k, v)
    out = naive.clone()
    out[:, 0] = 0
    assert_as_accurate_as_naive(naive, exact, naive)
    with pytest.raises(AssertionError, match="row"):
        assert_as_accurate_as_naive(out, exact, naive)


SPOILED = {
    "NaN": (lambda out: out.index_fill(2, torch.tensor(0), torch.nan), "finite"),
    "infinity": (lambda out: out.index_fill(2, torch.tensor(0), torch.inf), "finite"),
    "another dtype": (torch.Tensor.double, "dtype"),
    "all rows a little too large": (lambda out: out * (1 + 5e-5), "largest error"),
}


@pytest.mark.parametrize(("spoil", "message"), SPOILED.values(), ids=SPOILED)
def test_a_spoiled_result_fails_with_the_reason(spoil, message):
    q, k, v = inputs((1, 2, 2, 4, 16, 32), torch.float32)
    exact, naive = attention(q.double(), k.double(), v.double()), attention(q, k, v)
    with pytest.raises(AssertionError, match=message):
        assert_as_accurate_as_naive(spoil(naive), exact, naive)
