"""The Triton kernels of packed queries: their registration, what is compiled into them, and their code for GPUs."""

import inspect

import pytest
import torch
from covering import covering
from triton_compile import compile_triton

from pagewise.kernels.paged_attention_varlen import varlen_kernel
from pagewise.paged_attention.in_triton import tiles_for
from pagewise.tools.sizes import padded

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
COMPILED = {
    "head_size": [64, 80, 128, 256],
    "dtype": list(POINTERS),
    "cache": [None, E4M3, E5M2],
    "rows": [2, 32, 4096],
    "group": [1, 4],
    "options": [False, True],
    "cut": [None, "num", "size"],
    "sm": [80, 90],
}
CHANGING = ("capacity", "window", "cut", "slots")


def compile_varlen(head_size, dtype, cache, rows, group, options, cut, sm):
    tiles = tiles_for(rows, head_size, dtype, cache or dtype)
    native = cache is None or sm >= 89
    stored = POINTERS[dtype] if cache is None else {E4M3: "*fp8e4nv", E5M2: "*fp8e5"}[cache] if native else "*u8"
    signature = {n: "*fp32" for n in ("lse_ptr", "m_ptr", "l_ptr", "acc_ptr")}
    signature |= {"q_ptr": POINTERS[dtype], "out_ptr": POINTERS[dtype], "k_ptr": stored, "v_ptr": stored}
    signature |= dict.fromkeys(("tables_ptr", "lens_ptr", "ends_ptr", "sequences_ptr"), "*i32")
    signature |= dict.fromkeys(("scale", "softcap", "v_scale"), "fp32") | ({"slopes_ptr": "*fp32"} if options else {})
    signature |= dict.fromkeys((*CHANGING, "num_heads", "tables_stride_row", "tables_stride_column"), "i32")
    constants = {
        "P": 16, "D": head_size, "BLOCK_D": padded(head_size), "GROUP": group, "BLOCK_R": tiles.rows,
        "TILE": tiles.keys, "FLOAT8_BITS": 0 if native else 4 if cache == E4M3 else 5, "SOFTCAP": options,
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
