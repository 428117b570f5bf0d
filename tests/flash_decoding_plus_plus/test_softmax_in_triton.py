"""The unified and the lazy softmax as Triton kernels: how they are registered, and the first rung."""

import pytest
import torch
from decode_compile import POINTERS
from flash_cases import random_qkv

import pagewise.flash_decoding_plus_plus.in_triton  # noqa: F401, it registers the ops
from conftest import assert_as_accurate_as_naive
from pagewise.kernels.flash_decoding_plus_plus import unified_max_kernel
from pagewise.naive_attention import attention
from pagewise.paged_attention.in_triton import partial_results
from pagewise.tools.launch import launch


@pytest.mark.filterwarnings("ignore:overflow|invalid value:RuntimeWarning")  # numpy's, of a row that is recomputed
def test_ops_are_registered_soundly(kernel_device):
    qkv = random_qkv(2, 70, 16, (2, 1), 1, torch.float32, kernel_device)
    qkv[0][0, 0, 0] *= 1e4  # a row that is recomputed
    shape = (0.25, True, 2)
    lens = torch.tensor([70, 9], dtype=torch.int32, device=kernel_device)
    torch.library.opcheck(torch.ops.pagewise.unified_max_attention, (*qkv, lens, 1.0, -57.0, 63.0, 1e-30, *shape))
    torch.library.opcheck(torch.ops.pagewise.lazy_rescale_attention, (*qkv, 8.0, *shape))


@pytest.mark.parametrize("dtype", list(POINTERS))
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
