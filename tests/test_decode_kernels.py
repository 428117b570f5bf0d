"""The code of the decode kernels on GPUs: what is compiled into them, what they spill, and when their loads begin.

They are the Triton kernels of lessons 5, 7, 8 and 9, and their merges. With PAGEWISE_FULL=1 they compile for all GPUs.
"""

import inspect

import pytest
import torch
from covering import is_full, label
from decode_compile import E4M3, E5M2, POINTERS, assert_fits, compile_decode, compile_merge, for_every_gpu
from triton_compile import compile_triton

from pagewise.kernels.flash_decoding import flash_decoding_kernel, merge_plan_kernel, split_decode_kernel
from pagewise.kernels.flash_decoding_plus_plus import unified_max_kernel
from pagewise.kernels.paged_attention import merge_splits_kernel, paged_attention_kernel, paged_decode_kernel
from pagewise.kernels.paged_attention_varlen import paged_attention_varlen_kernel

SIZES = {"head_size": [80, 128, 256, 64] if is_full() else [80, 128, 256], "dtype": list(POINTERS)}
EITHER = {"options": [False, True], "split": [False, True]}
PAGED = SIZES | {"cache": [None, E4M3, E5M2], "group": [1, 8, 32, 4] if is_full() else [1, 8, 32]} | EITHER
DECODE = SIZES | {"cache": [None, E4M3], "group": [1, 4, 32], "queries": [1, 3, 16]} | EITHER | {"paged": [False, True]}
VARLEN = SIZES | {"head_size": [80, 128, 256], "cache": [None, E4M3], "queries": [2, 1024], "group": [1, 4]} | EITHER
SOFTMAX = {"which": ["unified", "lazy"], "head_size": [64, 256], "dtype": list(POINTERS)}
SOFTMAX |= {"rows": [(1, 1), (2, 3), (8, 3)], "options": [False, True], "wide": [False, True]}


def exists(case):
    """Float8 is for paged caches only."""
    return case["cache"] is None or case["paged"]


# float32 needs most shared memory, and this GPU has least.
TIGHT = {"which": "varlen", "head_size": 80, "dtype": torch.float32, "queries": 2, "group": 1, "split": False, "sm": 75}
CASES = [
    TIGHT,
    *({"which": "paged"} | case for case in for_every_gpu(PAGED)),
    *({"which": "decode"} | case for case in for_every_gpu(DECODE, exists)),
    *({"which": "varlen"} | case for case in for_every_gpu(VARLEN)),
    *for_every_gpu(SOFTMAX),
]


@pytest.mark.parametrize("case", CASES, ids=label)
def test_compiles_for_every_gpu(case, record_property):
    case = dict(case)
    if "rows" in case:
        case["group"], case["queries"] = case.pop("rows")
        case["wide"] = case["wide"] and case["dtype"] == torch.float16
    compiled = assert_fits(case.pop("which"), record_property, **case)
    if "wide" in case:
        assert "cp.async.cg" in compiled.ptx or case["sm"] < 80


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize(
    ("which", "head_size", "rows"),
    [("splits", 80, 16), ("splits", 256, 16), ("plan", 80, 16), ("plan", 256, 64), ("add", 128, 16)],
)
def test_merges_compile_without_spilling(which, head_size, rows, sm, record_property):
    compiled = compile_merge(which, head_size, torch.bfloat16, sm, rows=rows)
    record_property("registers", compiled.registers)
    assert compiled.spilled_bytes == 0


TENSORS = {"q": ["*fp16", "i32:16", "i32:16", 1], "scale": "fp32"}
CACHE = ["*fp16", "i32:16", "i32:16", "i32:16", 1]
SPLIT = TENSORS | {"k": CACHE, "v": CACHE, "m_ptr": "*fp32", "l_ptr": "*fp32", "acc_ptr": "*fp32"}
SPLIT |= {"num_heads": "i32", "S": "i32"}
FIRST_RUNGS = {
    paged_decode_kernel: TENSORS
    | {"out": TENSORS["q"], "k_cache": CACHE, "v_cache": CACHE, "block_tables": ["*i32", "i32", 1]}
    | {"seq_lens_ptr": "*i32"},
    split_decode_kernel: SPLIT,
    unified_max_kernel: SPLIT | {"phi": "fp32"},
}


@pytest.mark.slow
@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("kernel", FIRST_RUNGS, ids=lambda kernel: kernel.fn.__name__)
def test_first_rungs_compile_without_spilling(kernel, sm):
    constants = {"D": 128, "GROUP": 8, "ROWS": 16, "TILE": 64} | ({"P": 16} if kernel is paged_decode_kernel else {})
    assert compile_triton(kernel, FIRST_RUNGS[kernel], constants, sm).spilled_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "sm", "sizes"),
    [
        ("paged", 90, {"group": 1}),
        ("paged", 90, {"group": 8}),
        ("decode", 90, {"paged": False}),
        ("decode", 90, {"paged": True}),
        ("varlen", 80, {"queries": 1024, "split": False}),
    ],
)
def test_loads_are_wide_and_on_their_way_early(which, sm, sizes):
    """16 bytes per thread and load, fetched ahead of use by cp.async."""
    assert "cp.async.cg.shared.global" in compile_decode(which, 128, torch.bfloat16, sm, **sizes).ptx


@pytest.mark.parametrize("group", [1, 8])
def test_float8_becomes_bfloat16_by_way_of_float16(group):
    """Triton's own way from e5m2 on sm_90, a product with 2¹¹², makes finite numbers of inf and NaN."""
    compiled = compile_decode("paged", 128, torch.bfloat16, 90, group=group, cache=E5M2)
    assert "cvt.rn.f16x2.e5m2x2" in compiled.ptx
    assert "mul.rn.bf16x2" not in compiled.ptx


ALWAYS = {"P", "D", "BLOCK_D", "GROUP", "ROWS", "TILE", "FLOAT8_BITS"}


@pytest.mark.parametrize(
    ("kernel", "constants", "unspecialized"),
    [
        (paged_attention_kernel, ALWAYS, {"block_tables", "capacity", "window", "num_splits"}),
        (merge_splits_kernel, {"D", "BLOCK_D", "LOADS"}, {"num_splits"}),
        (flash_decoding_kernel, ALWAYS | {"HKV", "CAUSAL"}, {"block_tables", "num_queries", "capacity", "window"}),
        (merge_plan_kernel, {"D", "BLOCK_D", "GROUP", "ROWS", "LOADS"}, None),
        (paged_attention_varlen_kernel, ALWAYS | {"HKV"}, {"block_tables", "capacity", "window"}),
    ],
)
def test_what_changes_from_step_to_step_is_not_compiled_in(kernel, constants, unspecialized):
    """Lengths, batches and the width of tables are neither constants of a kernel nor specialised on."""
    parameters = inspect.signature(kernel.fn).parameters
    assert {name for name, p in parameters.items() if "constexpr" in str(p.annotation)} == constants
    options = kernel.kwargs if hasattr(kernel, "kwargs") else None  # interpreted kernels keep them as given
    found = options.get("do_not_specialize", ()) if options is not None else kernel.do_not_specialize
    assert unspecialized is None or set(found) == unspecialized
