"""The Triton kernels of packed queries: their registration, what is compiled into them, and their code for GPUs."""

import inspect

import pytest
import torch
from covering import covering
from packed_cases import assert_packed_matches_dense, packed_inputs
from triton_compile import compile_triton

from conftest import executed
from pagewise.kernels.paged_attention_varlen import merge_varlen_kernel, varlen_kernel
from pagewise.paged_attention import paged_attention_varlen, varlen
from pagewise.paged_attention.in_triton import tiles_for
from pagewise.tools.sizes import padded

E4M3 = torch.float8_e4m3fn
POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
COMPILED = {
    "head_size": [80, 128, 256],
    "dtype": list(POINTERS),
    "cache": [None, E4M3],
    "rows": [2, 4096],
    "group": [1, 4],
    "options": [False, True],
    "cut": [None, "num", "size"],
    "sm": [80, 90],
}
CHANGING = ("capacity", "window", "cut", "slots")


def compile_varlen(head_size, dtype, cache, rows, group, options, cut, sm):
    tiles = tiles_for(rows, head_size, dtype, cache or dtype)
    native = cache is None or sm >= 89
    stored = POINTERS[dtype] if cache is None else "*fp8e4nv" if native else "*u8"
    signature = {n: "*fp32" for n in ("lse_ptr", "m_ptr", "l_ptr", "acc_ptr")}
    signature |= {"q_ptr": POINTERS[dtype], "out_ptr": POINTERS[dtype], "k_ptr": stored, "v_ptr": stored}
    signature |= dict.fromkeys(("tables_ptr", "lens_ptr", "ends_ptr", "sequences_ptr"), "*i32")
    signature |= dict.fromkeys(("scale", "softcap", "v_scale"), "fp32") | ({"slopes_ptr": "*fp32"} if options else {})
    signature |= dict.fromkeys((*CHANGING, "num_heads", "tables_stride_row", "tables_stride_column"), "i32")
    constants = {
        "P": 16, "D": head_size, "BLOCK_D": padded(head_size), "GROUP": group, "BLOCK_R": tiles.rows,
        "TILE": tiles.keys, "FLOAT8_BITS": 0 if native else 4, "SOFTCAP": options,
        "CUT": cut or "num", "SPLIT": cut is not None,
    }  # fmt: skip
    for name in inspect.signature(varlen_kernel.fn).parameters:
        if name.startswith(("q_stride", "k_stride", "v_stride")):
            signature[name] = "i32:16"
        elif name not in signature and name not in constants:
            constants[name] = None
    return compile_triton(
        varlen_kernel, signature, constants, sm, num_warps=tiles.num_warps, num_stages=tiles.num_stages
    )


def name(case):
    return "-".join(str(value).removeprefix("torch.") for value in case.values())


@pytest.mark.parametrize("case", covering(COMPILED), ids=name)
def test_varlen_kernel_compiles_for_gpus_without_spilling(case, record_property):
    compiled = compile_varlen(**case)
    for figure in ("registers", "spilled_bytes", "shared_bytes"):
        record_property(figure, getattr(compiled, figure))
    assert compiled.spilled_bytes == 0
    assert compiled.shared_bytes <= 99 * 1024  # what every GPU from sm_80 on, sm_86 included, gives a thread block


@pytest.mark.parametrize("cut", ["num", "size"])
def test_merge_kernel_compiles_for_gpus_without_spilling(cut, record_property):
    signature = {n: "*fp32" for n in ("m_ptr", "l_ptr", "acc_ptr", "lse_ptr")} | {"out_ptr": "*bf16", "v_scale": "fp32"}
    signature |= dict.fromkeys(("lens_ptr", "ends_ptr", "sequences_ptr"), "*i32")
    signature |= dict.fromkeys((*CHANGING, "num_heads"), "i32")
    constants = {"D": 128, "BLOCK_D": 128, "GROUP": 4, "BLOCK_R": 64, "TILE": 64, "CUT": cut, "AT_ONCE": 16}
    compiled = compile_triton(merge_varlen_kernel, signature, constants, 90)
    record_property("registers", compiled.registers)
    assert compiled.spilled_bytes == 0


def test_keys_are_on_their_way_early():
    """Fetched ahead of use by cp.async."""
    compiled = compile_varlen(128, torch.bfloat16, None, 4096, 4, options=False, cut=None, sm=80)
    assert "cp.async.cg.shared.global" in compiled.ptx


def test_no_length_batch_or_table_width_is_compiled_in():
    """What changes from step to step is neither a constant of the kernels nor specialised on."""
    parameters = inspect.signature(varlen_kernel.fn).parameters | inspect.signature(merge_varlen_kernel.fn).parameters
    constants = {n for n, p in parameters.items() if "constexpr" in str(p.annotation)}
    assert constants == {
        "P", "D", "BLOCK_D", "GROUP", "BLOCK_R", "TILE", "FLOAT8_BITS", "SOFTCAP", "CUT", "SPLIT", "AT_ONCE",
    }  # fmt: skip
    assert set(not_specialized(varlen_kernel)) == {*CHANGING, "tables_stride_row"}
    assert set(not_specialized(merge_varlen_kernel)) == set(CHANGING)


def not_specialized(kernel):
    options = kernel.kwargs if hasattr(kernel, "kwargs") else None  # interpreted kernels keep them as given
    return options["do_not_specialize"] if options else kernel.do_not_specialize


@pytest.mark.parametrize("splits", [("num", 1), ("size", 16)])
def test_op_is_registered_soundly(splits, kernel_device):
    inputs = packed_inputs([5, 40], [1, 5], 4, 2, 32, dtype=torch.bfloat16, device=kernel_device)
    inputs = [t.nan_to_num() if t.is_floating_point() else t for t in inputs]  # it compares the inputs too
    chunks = varlen.plan(*inputs[3:], block_size=16, backend="triton").chunks(*inputs[:2])
    slopes = torch.ones(4, device=kernel_device)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    options = (slopes, 0.1, 9, 2.0, 0.5) if splits[1] > 1 else (None, 0.1, None, 0.0, 1.0)
    inputs = (*inputs, chunks, *options, *splits)
    torch.library.opcheck(torch.ops.pagewise.paged_attention_varlen, inputs, test_utils=tests)


@pytest.mark.parametrize("sizes", [{"block_size": 12}, {"head_size": 320}, {"dtype": torch.float64}], ids=str)
def test_refusals_name_torch(sizes, kernel_device):
    inputs = packed_inputs(
        [5, 40], [1, 5], 4, 2, **{"head_size": 32, "dtype": torch.float16} | sizes, device=kernel_device
    )
    with pytest.raises(ValueError, match=r'backend="triton".*backend="torch"'):
        paged_attention_varlen(*inputs, backend="triton")
    assert paged_attention_varlen(*inputs, backend="torch").isfinite().all()


def test_any_number_of_heads_may_share_a_kv_head(kernel_device):
    """More than a chunk has rows, so that one query's heads are in several."""
    for group in (1, 3, 40):
        inputs = packed_inputs([20, 35], [1, 3], 2 * group, 2, 16, dtype=torch.float16, device=kernel_device)
        assert_packed_matches_dense(in_triton, inputs)


def test_keys_are_cut_where_it_is_asked_for(kernel_device):
    inputs = packed_inputs([130, 40], [2, 5], 4, 2, 32, dtype=torch.float16, device=kernel_device)
    for splits, merges in (({"num_splits": 1}, 0), ({"num_splits": 3}, 1), ({"split_size": 64}, 1)):
        before = executed["merge_varlen_kernel"]
        paged_attention_varlen(*inputs, **splits, backend="triton")
        assert executed["merge_varlen_kernel"] - before == merges, splits


@pytest.mark.parametrize("splits", [{}, {"num_splits": 2}], ids=str)
def test_an_impossible_length_gives_nan(splits, kernel_device):
    """Unchecked, beyond what its table can hold; the other sequences' rows are right."""
    q, k, v, tables, lens, ends = packed_inputs([40, 40], [2, 2], 4, 2, 32, dtype=torch.float32, device=kernel_device)
    right = in_triton(q, k, v, tables, lens, ends)[0]
    lens[0] = 10**6
    out = paged_attention_varlen(q, k, v, tables, lens, ends, **splits, check=False, backend="triton")
    assert out[:2].isnan().all()
    torch.testing.assert_close(out[2:], right[2:], rtol=1e-5, atol=1e-6)


def in_triton(*inputs):
    return paged_attention_varlen(*inputs, return_lse=True, backend="triton")
