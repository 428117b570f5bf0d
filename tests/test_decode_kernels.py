"""The code of the decode kernels on GPUs: what is compiled into them, what they spill, and when their loads begin.

They are the Triton kernels of lessons 5, 7, 8 and 9, and their merges. With PAGEWISE_FULL=1 they compile for all GPUs.
"""

import inspect

import pytest
import torch
from covering import is_full, label
from decode_compile import DTYPES, E4M3, E5M2, assert_fits, compiled, for_every_gpu
from triton_compile import compile_triton

from pagewise.kernels.decode import decode_attention_kernel, merge_items_kernel
from pagewise.kernels.flash_decoding import split_decode_kernel
from pagewise.kernels.flash_decoding_plus_plus import unified_max_kernel
from pagewise.kernels.paged_attention import merge_splits_kernel, paged_decode_kernel
from pagewise.kernels.work_plan import work_plan_kernel

DECODE = {"which": ["paged", "varlen", "decode"], "head_size": [80, 128, 256, 64] if is_full() else [80, 128, 256]}
DECODE |= {"dtype": DTYPES, "cache": [None, E4M3, E5M2], "group": [1, 4, 8, 32], "queries": [1, 3, 16, 1024]}
DECODE |= {"options": [False, True], "split": [False, True]}
SOFTMAX = {"which": ["unified", "lazy"], "head_size": [64, 256], "dtype": DTYPES}
SOFTMAX |= {"rows": [(1, 1), (2, 3), (8, 3)], "options": [False, True], "wide": [False, True]}


# float32 needs most shared memory, and this GPU has least.
TIGHT = {"which": "varlen", "head_size": 80, "dtype": torch.float32, "queries": 2, "group": 1, "split": False, "sm": 75}


def is_a_step(case):
    """Return whether a function takes such a call: one query per sequence, packed queries, or few over dense keys."""
    one = {"paged": case["queries"] == 1, "decode": case["queries"] <= 16, "varlen": case["queries"] > 1}
    return one[case["which"]] and (case["which"] != "decode" or case["cache"] is None)


SMALL = {
    "which": "lazy",
    "head_size": 64,
    "dtype": torch.float16,
    "rows": (1, 1),
    "options": False,
    "wide": False,
    "sm": 75,
}
CASES = [TIGHT, SMALL, *for_every_gpu(DECODE, is_a_step), *for_every_gpu(SOFTMAX)]


@pytest.mark.parametrize("case", CASES, ids=label)
def test_compiles_for_every_gpu(case, record_property):
    case = dict(case)
    if "rows" in case:
        case["group"], case["queries"] = case.pop("rows")
        case["wide"] = case["wide"] and case["dtype"] == torch.float16
    found = assert_fits(case.pop("which"), record_property, **case)
    if "wide" in case:
        assert "cp.async.cg" in found.ptx or case["sm"] < 80


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize(
    ("which", "merge", "head_size", "queries"),
    [
        ("paged", "merge_items_kernel", 80, 1),
        ("decode", "merge_items_kernel", 256, 1),
        ("varlen", "merge_items_kernel", 128, 300),
        ("decode", "work_plan_kernel", 64, 1),
        ("lazy", "merge_splits_kernel", 256, 1),
        ("unified", "add_splits_kernel", 128, 1),
    ],
)
def test_plans_and_merges_compile_without_spilling(which, merge, head_size, queries, sm, record_property):
    found = compiled(which, sm, head_size=head_size, dtype=torch.bfloat16, queries=queries, options=True, kernel=merge)
    record_property("registers", found.registers)
    assert found.spilled_bytes == 0


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
        ("decode", 90, {}),
        ("decode", 90, {"options": True}),
        ("varlen", 80, {"queries": 1024, "split": False}),
    ],
)
def test_loads_are_wide_and_on_their_way_early(which, sm, sizes):
    """16 bytes per thread and load, fetched ahead of use by cp.async."""
    found = compiled(which, sm, head_size=128, dtype=torch.bfloat16, **sizes)
    assert "cp.async.cg.shared.global" in found.ptx


@pytest.mark.parametrize("group", [1, 8])
def test_float8_becomes_bfloat16_by_way_of_float16(group):
    """Triton's own way from e5m2 on sm_90, a product with 2¹¹², makes finite numbers of inf and NaN."""
    case = {"head_size": 128, "dtype": torch.bfloat16, "group": group, "cache": E5M2}
    ptx = compiled("paged", 90, **case).ptx
    assert "cvt.rn.f16x2.e5m2x2" in ptx
    assert "mul.rn.bf16x2" not in ptx


VARYING = {"num_seqs", "capacity", "window", "num_splits", "split_tiles"}


@pytest.mark.parametrize(
    ("kernel", "constants", "unspecialized"),
    [
        (decode_attention_kernel, {"SIZES", "HKV", "FLOAT8_BITS", "CAUSAL"}, {"table_stride"} | VARYING),
        (merge_items_kernel, {"SIZES", "HKV", "CAUSAL", "LOADS"}, VARYING),
        (
            work_plan_kernel,
            {"SIZES", "HKV", "CAUSAL", "LANES"},
            {"num_items", "num_programs", "min_tiles", "capacity", "window"},
        ),
        (merge_splits_kernel, {"D", "BLOCK_D", "LOADS"}, {"num_splits"}),
    ],
)
def test_what_changes_from_step_to_step_is_not_compiled_in(kernel, constants, unspecialized):
    """Lengths, batches and the width of tables are neither constants of a kernel nor specialised on."""
    parameters = inspect.signature(kernel.fn).parameters
    assert {name for name, p in parameters.items() if "constexpr" in str(p.annotation)} == constants
    options = kernel.kwargs if hasattr(kernel, "kwargs") else None  # interpreted kernels keep them as given
    found = options.get("do_not_specialize", ()) if options is not None else kernel.do_not_specialize
    assert set(found) == unspecialized
