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
    (B, H, T, D), (_, Hkv, S, _) = q.shape, k.shape
    out, lse = torch.empty_like(q), q.new_empty(B, H, T, dtype=torch.float32)
    sizes = (H // Hkv, T, S, D**-0.5)
    outputs = (out, lse)
    launch(
        flash_forward_kernel, (cdiv(T, ROWS), H, B), q, k, v, out, lse, *sizes, outputs=outputs, **constants(q, causal)
    )
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
    delta, dq, rows = torch.empty_like(lse), torch.empty_like(q), (lse.view(-1), d_lse.reshape(-1))
    of_delta = {"D": D, "BLOCK_D": padded(D), "ROWS": 32}
    launch(flash_attention_delta_kernel, (cdiv(T, 32) * H * B,), out, d_out, *rows, delta.view(-1), H, T, **of_delta)
    arguments = (q, k, v, d_out, rows[0], delta.view(-1), dq, H // Hkv, T, S, D**-0.5)
    launch(flash_dq_kernel, (cdiv(T, ROWS), H, B), *arguments, outputs=(dq,), **constants(q, causal))
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
