"""The first rung of the unified softmax as a Triton kernel."""

import pytest
import torch
from decode_compile import DTYPES
from flash_cases import random_qkv

from conftest import assert_as_accurate_as_naive
from pagewise.flash_decoding_plus_plus.in_triton import shared_arguments
from pagewise.kernels.flash_decoding_plus_plus import unified_max_kernel
from pagewise.naive_attention import attention
from pagewise.paged_attention.in_triton import partial_results
from pagewise.tools.launch import launch


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_the_first_rung_leaves_sums_that_only_need_adding(num_splits, dtype, kernel_device):
    q, k, v = random_qkv(1, 130, 64, (6, 2), dtype=dtype, device=kernel_device)
    B, (H, Hkv) = len(q), (6, 2)
    m, l, acc = partial_results(B * H * num_splits, 64, kernel_device)
    sizes = {"D": 64, "GROUP": H // Hkv, "ROWS": 16, "TILE": 32}
    arguments = (q[:, :, 0], k, v, m, l, acc, H, 130, 64**-0.5, 1.0)
    launch(unified_max_kernel, (B, Hkv, num_splits), *arguments, **sizes)
    m, l, acc = m.view(B, H, -1), l.view(B, H, -1), acc.view(B, H, -1, 64)
    out = (acc.sum(dim=2) / l.sum(dim=2)[..., None]).to(dtype)
    exact, naive = (attention(*(x.to(t) for x in (q, k, v)))[:, :, 0] for t in (torch.float64, dtype))
    assert_as_accurate_as_naive(out, exact, naive)
    scores = (q.float() @ k.float().repeat_interleave(3, dim=1).mT)[:, :, 0] / 8
    torch.testing.assert_close(m.amax(dim=-1), scores.amax(dim=-1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("num_splits", "programs"), [(None, (4, 1)), (3, (4, 3)), (100, (4, 5))])
def test_as_many_splits_as_asked_for(num_splits, programs):
    """At most one for each tile of 32 keys. On a CPU the default is one."""
    q, k, v = random_qkv(1, 130, 64, (4, 2), dtype=torch.float32)
    grid, arguments = shared_arguments(q, k, v, None, 1.0, False, num_splits)
    assert grid == programs
    assert len(arguments["partials"][0]) == 2 * 4 * programs[1]
