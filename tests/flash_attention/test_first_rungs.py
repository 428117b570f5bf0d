"""The first rungs of FlashAttention's Triton kernels, against the oracle by the one tolerance policy."""

import pytest
import torch
from flash_cases import as_tokens, naive, random_gradients, random_qkv, with_gradients

from conftest import assert_as_accurate_as_naive
from pagewise.kernels.flash_attention import flash_forward_kernel
from pagewise.kernels.flash_attention_backward import flash_attention_delta_kernel, flash_dq_kernel
from pagewise.tools.launch import launch
from pagewise.tools.sizes import cdiv, padded

ROWS, COLS = 16, 32
CASES = [
    # T, S, D, (H, Hkv), causal, dtype
    (1, 1, 16, (1, 1), False, torch.float32),
    (33, 70, 40, (4, 2), True, torch.float32),
    (33, 70, 40, (4, 2), False, torch.float16),
    (37, 19, 64, (6, 1), True, torch.float16),  # the first 18 queries see no key
    (16, 32, 16, (2, 2), True, torch.bfloat16),
    (17, 97, 80, (3, 1), False, torch.bfloat16),
    (1, 65, 32, (2, 1), True, torch.bfloat16),
]
each_case = pytest.mark.parametrize(("T", "S", "D", "heads", "causal", "dtype"), CASES)


def constants(q, causal):
    return {"D": q.shape[-1], "BLOCK_D": padded(q.shape[-1]), "ROWS": ROWS, "COLS": COLS, "CAUSAL": causal}


def forward(q, k, v, causal):
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    launch_forward(q, k, v, out, lse, causal)
    return out, lse


def launch_forward(q, k, v, out, lse, causal):
    (B, H, T, D), (_, Hkv, S, _) = q.shape, k.shape
    sizes = {"group": H // Hkv, "T": T, "S": S, "scale": D**-0.5}
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    launch(flash_forward_kernel, (cdiv(T, ROWS), H, B), **tensors, **sizes, **constants(q, causal), outputs=(out, lse))
    return out, lse


def inputs(T, S, D, heads, dtype, device):
    return as_tokens(*random_qkv(T, S, D, heads, 2, dtype, device))


@each_case
def test_the_forward_is_as_accurate_as_naive(T, S, D, heads, causal, dtype, kernel_device):
    q, k, v = inputs(T, S, D, heads, dtype, kernel_device)
    out, lse = forward(q, k, v, causal)
    options = {"causal": causal}
    (exact, exact_lse), in_dtype = naive(*(x.double() for x in (q, k, v)), options), naive(q, k, v, options)
    assert_as_accurate_as_naive(out, exact, in_dtype[0])
    sees = exact_lse > -torch.inf
    assert sees.equal(lse > -torch.inf)
    assert_as_accurate_as_naive(*(torch.where(sees, x, 0.0)[..., None] for x in (lse, exact_lse, in_dtype[1].float())))


@each_case
def test_dq_is_as_accurate_as_naive(T, S, D, heads, causal, dtype, kernel_device):
    q, k, v = inputs(T, S, D, heads, dtype, kernel_device)
    gradients = d_out, d_lse = random_gradients(q, of_lse=8 if S > 1 else 64)
    (B, H, _, _), Hkv = q.shape, k.shape[1]
    out, lse = (x.contiguous() for x in forward(q, k, v, causal))
    lse, dq = lse.view(-1), torch.empty_like(q)
    delta = torch.empty_like(lse)
    rows = {"lse": lse, "d_lse": d_lse.reshape(-1), "delta": delta, "m": None}
    of_delta = {"num_heads": H, "T": T, "D": D, "BLOCK_D": padded(D), "ROWS": 32}
    launch(flash_attention_delta_kernel, (cdiv(T, 32) * H * B,), out=out, d_out=d_out, **rows, **of_delta)
    tensors = {"q": q, "k": k, "v": v, "d_out": d_out, "lse": lse, "delta": delta, "dq": dq}
    sizes = {"group": H // Hkv, "T": T, "S": S, "scale": D**-0.5}
    launch(flash_dq_kernel, (cdiv(T, ROWS), H, B), **tensors, **sizes, **constants(q, causal), outputs=(dq,))
    exact, in_dtype = (
        with_gradients(lambda *qkv: naive(*qkv, {"causal": causal}), *tensors, *gradients)[1][0]
        for tensors in ([x.double() for x in (q, k, v)], (q, k, v))
    )
    assert_as_accurate_as_naive(dq, exact, in_dtype, factor=3)


def test_a_key_that_no_query_sees_adds_nothing(kernel_device):
    """Scores of the padding of a tile are 0, and all real scores are far below 0."""
    q, k, v = torch.full((1, 1, 3, 16), 30.0), -torch.ones(1, 1, 5, 16), torch.randn(1, 1, 5, 16)
    out, _ = forward(*(x.to(kernel_device) for x in (q, k, v)), False)
    torch.testing.assert_close(out.cpu(), v.mean(dim=2, keepdim=True).expand_as(out))


def test_heads_beyond_32_bits(kernel_device):
    """Every tensor's third head begins 2³¹ elements after its first."""
    near = random_qkv(5, 7, 16, (3, 3), 1, torch.float16, kernel_device)
    q, k, v = (heads_apart(x) for x in near)
    out, lse = (
        heads_apart(torch.zeros_like(near[0])),
        heads_apart(torch.zeros(1, 3, 5, 1, device=kernel_device)).squeeze(-1),
    )
    launch_forward(q, k, v, out, lse, causal=True)
    expected = forward(*near, causal=True)
    assert out.equal(expected[0])
    assert lse.equal(expected[1])
    rows = {"lse": expected[1].view(-1), "delta": torch.rand(15, device=kernel_device)}
    sizes = {"group": 1, "T": 5, "S": 7, "scale": 0.25, **constants(q, True)}
    gradients = torch.empty_like(near[0]), heads_apart(torch.zeros_like(near[0]))
    for tensors, dq in zip((near, (q, k, v)), gradients, strict=True):
        of_heads = dict(zip("qkv", tensors, strict=True)) | {"d_out": tensors[0], "dq": dq}
        launch(flash_dq_kernel, (1, 3, 1), **of_heads, **rows, **sizes, outputs=(dq,))
    assert gradients[1].equal(gradients[0])


def heads_apart(x):
    """x with its heads 2³⁰ elements apart: only the rows are touched."""
    room = torch.empty(x.shape[1] * 2**30, dtype=x.dtype, device=x.device)
    return room.as_strided(x.shape, (0, 2**30, x.shape[3], 1)).copy_(x)
