"""The unified and the lazy softmax as Triton kernels: how they are registered, and their code on GPUs."""

import pytest
import torch
from decode_compile import POINTERS, assert_fits, compile_merge, for_every_gpu
from flash_cases import name, random_qkv
from triton_compile import compile_triton

from conftest import assert_as_accurate_as_naive
from pagewise.flash_decoding_plus_plus import UnifiedMax, lazy_rescale_attention, unified_max_attention
from pagewise.kernels.flash_decoding_plus_plus import unified_max_kernel
from pagewise.naive_attention import attention
from pagewise.paged_attention.in_triton import partial_results
from pagewise.tools.launch import launch

COMPILED = {
    "which": ["unified", "lazy"],
    "head_size": [64, 256],
    "dtype": list(POINTERS),
    "rows": [(1, 1), (2, 3), (8, 3)],  # query heads per KV head, queries
    "options": [False, True],
    "wide": [False, True],
}


@pytest.mark.filterwarnings("ignore:overflow|invalid value:RuntimeWarning")  # numpy's, of a row that is recomputed
def test_ops_are_registered_soundly(kernel_device):
    qkv = random_qkv(2, 70, 16, (2, 1), 1, torch.float32, kernel_device)
    qkv[0][0, 0, 0] *= 1e4  # a row that is recomputed
    shape = (0.25, True, 2)
    lens = torch.tensor([70, 9], dtype=torch.int32, device=kernel_device)
    torch.library.opcheck(torch.ops.pagewise.unified_max_attention, (*qkv, lens, 1.0, -57.0, 63.0, 1e-30, *shape))
    torch.library.opcheck(torch.ops.pagewise.lazy_rescale_attention, (*qkv, 8.0, *shape))


def test_ops_take_queries_with_a_tokens_heads_side_by_side(kernel_device):
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in random_qkv(3, 70, 16, (4, 2), 1, torch.float32))
    q, k, v = (x.to(kernel_device) for x in (q, k, v))
    out, _ = unified_max_attention(q, k, v, UnifiedMax(0, -57, 63), causal=True, num_splits=2, backend="triton")
    torch.testing.assert_close(out, attention(q, k, v, causal=True))
    out = lazy_rescale_attention(q, k, v, causal=True, num_splits=2, backend="triton")
    torch.testing.assert_close(out, attention(q, k, v, causal=True))


@pytest.mark.parametrize("case", for_every_gpu(COMPILED), ids=name)
def test_kernels_compile_for_every_gpu(case, record_property):
    case = dict(case)
    group, queries = case.pop("rows")
    wide = case.pop("wide") and case["dtype"] == torch.float16
    compiled = assert_fits(case.pop("which"), record_property, group=group, queries=queries, wide=wide, **case)
    assert "cp.async.cg" in compiled.ptx or case["sm"] < 80  # wide, and on their way early


@pytest.mark.parametrize("sm", [80, 90])
def test_merge_kernel_compiles_for_gpus_without_spilling(sm):
    assert compile_merge("add", 128, torch.bfloat16, sm).spilled_bytes == 0


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


@pytest.mark.parametrize("sm", [80, 90])
def test_the_first_rung_compiles_for_gpus_without_spilling(sm):
    tensor = ["*fp16", "i32:16", "i32:16", "i32:16", 1]
    signature = {"q": ["*fp16", "i32:16", "i32:16", 1], "k": tensor, "v": tensor}
    signature |= dict.fromkeys(("m_ptr", "l_ptr", "acc_ptr"), "*fp32") | {"num_heads": "i32", "S": "i32"}
    signature |= {"scale": "fp32", "phi": "fp32"}
    constants = {"D": 128, "GROUP": 8, "ROWS": 16, "TILE": 64}
    assert compile_triton(unified_max_kernel, signature, constants, sm).spilled_bytes == 0
