"""The unified and the lazy softmax as Triton kernels: how they are registered, and their code on GPUs."""

import inspect

import pytest
import torch
from covering import covering
from flash_cases import name, random_qkv
from triton_compile import compile_triton

from pagewise.flash_decoding_plus_plus import UnifiedMax, lazy_rescale_attention, unified_max_attention
from pagewise.kernels.flash_decoding import merge_splits_kernel
from pagewise.kernels.paged_attention import decode_kernel
from pagewise.naive_attention import attention
from pagewise.paged_attention.in_triton import tiles_for
from pagewise.tools.sizes import padded

POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
BAND = ("reference", "band_low", "band_high", "smallest")
COMPILED = {
    "softmax": ["unified", "lazy", "recomputing"],
    "head_size": [64, 256],
    "dtype": list(POINTERS),
    "rows": [(1, 1), (2, 3), (8, 3)],  # query heads per KV head, queries
    "sm": [80, 90],
}


@pytest.mark.filterwarnings("ignore:overflow|invalid value:RuntimeWarning")  # numpy's, of a row that is recomputed
def test_ops_are_registered_soundly(kernel_device):
    qkv = random_qkv(2, 70, 16, (2, 1), 1, torch.float32, kernel_device)
    qkv[0][0, 0, 0] *= 1e4  # a row that is recomputed
    shape = (None, True, 2)
    torch.library.opcheck(torch.ops.pagewise.decode_unified, (*qkv, 1.0, -57.0, 63.0, 1e-30, *shape))
    torch.library.opcheck(torch.ops.pagewise.decode_lazily, (*qkv, 8.0, *shape))


def test_ops_take_queries_with_a_tokens_heads_side_by_side(kernel_device):
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in random_qkv(3, 70, 16, (4, 2), 1, torch.float32))
    q, k, v = (x.to(kernel_device) for x in (q, k, v))
    out, _ = unified_max_attention(q, k, v, UnifiedMax(0, -57, 63), causal=True, num_splits=2, backend="triton")
    torch.testing.assert_close(out, attention(q, k, v, causal=True))
    out = lazy_rescale_attention(q, k, v, causal=True, num_splits=2, backend="triton")
    torch.testing.assert_close(out, attention(q, k, v, causal=True))


@pytest.mark.parametrize("case", covering(COMPILED), ids=name)
def test_decode_kernel_compiles_for_gpus_without_spilling(case, record_property):
    softmax, head_size, dtype, (group, queries), sm = case.values()
    tiles = tiles_for(group * queries, head_size, dtype, dtype)
    signature = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), POINTERS[dtype])
    signature |= dict.fromkeys(("lse_ptr", "m_ptr", "l_ptr", "acc_ptr"), "*fp32")
    signature |= dict.fromkeys(
        ("scale", "softcap", "v_scale", "reference", "band_low", "band_high", "smallest"), "fp32"
    )
    signature |= dict.fromkeys(("num_seqs", "num_heads", "num_queries", "capacity", "window", "cut", "slots"), "i32")
    signature |= {"flags_ptr": "*u8"} if softmax != "lazy" else {}
    names = inspect.signature(decode_kernel.fn).parameters
    signature |= {stride: "i32:16" for stride in names if stride.startswith(("q_stride", "k_stride", "v_stride"))}
    constants = {
        "P": 1, "D": head_size, "BLOCK_D": padded(head_size), "GROUP": group, "BLOCK_R": tiles.rows,
        "TILE": tiles.keys, "MIN_TILES": 2, "FLOAT8_BITS": 0, "CAUSAL": queries > 1, "SOFTCAP": False, "CUT": "num",
        "SPLIT": True, "SOFTMAX": "synchronised" if softmax == "recomputing" else softmax,
        "WIDE": dtype == torch.float16 and softmax != "recomputing",
    }  # fmt: skip
    constants |= {missing: None for missing in names if missing not in signature and missing not in constants}
    threads = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    compiled = compile_triton(decode_kernel, signature, constants, sm, **threads)
    for figure in ("registers", "spilled_bytes", "shared_bytes"):
        record_property(figure, getattr(compiled, figure))
    assert compiled.spilled_bytes == 0
    assert compiled.shared_bytes <= 99 * 1024
    assert ("cp.async.cg" if tiles.rows > 1 else "ld.global.v4") in compiled.ptx  # wide, and on their way early


@pytest.mark.parametrize("sm", [80, 90])
def test_merge_kernel_compiles_for_gpus_without_spilling(sm):
    signature = {n: "*fp32" for n in ("m_ptr", "l_ptr", "acc_ptr", "lse_ptr")} | {"out_ptr": "*bf16"}
    signature |= {"flags_ptr": "*u8"} | dict.fromkeys(("v_scale", *BAND), "fp32")
    numbers = ("num_seqs", "num_heads", "num_queries", "capacity", "window", "cut", "slots")
    signature |= dict.fromkeys(numbers, "i32")
    constants = {
        "D": 128, "BLOCK_D": 128, "GROUP": 8, "BLOCK_R": 16, "TILE": 64, "MIN_TILES": 2, "CUT": "num", "AT_ONCE": 16,
        "SOFTMAX": "unified", "lens_ptr": None,
    }  # fmt: skip
    assert compile_triton(merge_splits_kernel, signature, constants, sm).spilled_bytes == 0
