"""Compiles the decode kernels of lessons 5, 7, 8 and 9 for a GPU that need not be there."""

import inspect

import torch
from covering import covering, is_full
from triton_compile import compile_triton

from pagewise.kernels.flash_decoding import flash_decoding_kernel, merge_plan_kernel
from pagewise.kernels.flash_decoding_plus_plus import (
    add_splits_kernel,
    lazy_rescale_kernel,
    unified_max_attention_kernel,
)
from pagewise.kernels.paged_attention import merge_splits_kernel, paged_attention_kernel
from pagewise.kernels.paged_attention_varlen import paged_attention_varlen_kernel
from pagewise.tools.architecture import SHARED_BYTES
from pagewise.tools.sizes import padded
from pagewise.tools.tuning import LOADS, decode_tiles

POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
STORED = {E4M3: "*fp8e4nv", E5M2: "*fp8e5"}
KERNELS = {
    "paged": paged_attention_kernel,
    "decode": flash_decoding_kernel,
    "varlen": paged_attention_varlen_kernel,
    "unified": unified_max_attention_kernel,
    "lazy": lazy_rescale_kernel,
}
MERGES = {"splits": merge_splits_kernel, "plan": merge_plan_kernel, "add": add_splits_kernel}
SPILLED = 16  # bytes that ptxas may spill although registers are left: it aims at a number of warps per SM
DIMS = {"k": 4, "v": 4, "k_cache": 4, "v_cache": 4, "block_tables": 2}  # of a tensor that a kernel takes as a tuple
INTEGERS = {
    "programs_ptr", "splits_ptr", "items_ptr", "seq_lens_ptr", "cu_seqlens_q_ptr", "chunk_seqs_ptr",
}  # fmt: skip
FLOATS = {"scale", "softcap", "v_scale", "phi", "low", "high", "smallest", "threshold"}


# A GPU of each assembler and of each size of shared memory. With PAGEWISE_FULL=1, all GPUs.
TENSOR_CORES = [80, 86, 89, 90, 100, 120] if is_full() else [80, 90, 120]


def for_every_gpu(axes, allowed=lambda case: True):
    """Cases with every pair of values of `axes` and of the GPUs, and one case for sm_75.

    On sm_75 Triton has no tensor cores, auto takes torch, and a kernel takes six times as long to compile. The case has
    the second value of each axis, with which options are compiled for a GPU that lacks instructions. With
    PAGEWISE_FULL=1, another case has the first values.
    """
    for_sm_75 = (
        {name: values[i] for name, values in axes.items()} | {"sm": 75} for i in ((1, 0) if is_full() else (1,))
    )
    return [*covering(axes | {"sm": TENSOR_CORES}, allowed), *for_sm_75]


def compile_decode(
    which, head_size, dtype, sm, *, group=4, queries=1, cache=None, options=False, split=True, paged=True, wide=False
):
    """Compile one of KERNELS as its launcher would. options: ALiBi and softcap, lengths of dense keys; and causal, for
    several queries."""
    kernel = KERNELS[which]
    tiles = decode_tiles(group * queries, head_size, dtype, cache or dtype)
    native = cache is None or sm >= 89
    stored = POINTERS[dtype] if cache is None else STORED[cache] if native else "*u8"
    dims = DIMS | ({"q": 3, "out": 3, "lse": 2} if which in ("paged", "varlen") else {"q": 4, "out": 4, "lse": 3})
    constants = {
        "P": 16 if paged else None, "D": head_size, "BLOCK_D": padded(head_size), "HKV": 2, "GROUP": group,
        "ROWS": tiles.rows, "TILE": tiles.keys, "FLOAT8_BITS": 0 if native else 4 if cache == E4M3 else 5,
        "CAUSAL": options and queries > 1, "WIDE": wide,
    }  # fmt: skip
    absent = set() if split else {"partials"}
    absent |= set() if options else {"slopes_ptr", "softcap"}
    absent |= set() if paged else {"block_tables"}
    absent |= {"seq_lens_ptr"} if which in ("unified", "lazy") and not options else set()
    absent |= {"chosen_ptr"} if which == "lazy" and not options else set()
    signature = {}
    for name in inspect.signature(kernel.fn).parameters:
        if name in absent:
            constants[name] = None
        elif name in dims:
            pointer = {"lse": "*fp32", "block_tables": "*i32"}.get(name, stored if name[0] in "kv" else POINTERS[dtype])
            strides = ["i32"] * 2 if name == "block_tables" else ["i32:16"] * (dims[name] - 1) + [1]
            signature[name] = [pointer, *strides]
        elif name == "partials":
            signature[name] = ["*fp32"] * 3
        elif name.endswith("_ptr"):
            signature[name] = "*i32" if name in INTEGERS else "*u8" if name == "chosen_ptr" else "*fp32"
        elif name not in constants:
            signature[name] = "fp32" if name in FLOATS else "i32"
    constants = {name: value for name, value in constants.items() if name in inspect.signature(kernel.fn).parameters}
    return compile_triton(kernel, signature, constants, sm, **tiles.launch_options)


def compile_merge(which, head_size, dtype, sm, *, group=4, rows=16):
    """Compile one of MERGES."""
    kernel = MERGES[which]
    constants = {"D": head_size, "BLOCK_D": padded(head_size), "GROUP": group, "ROWS": rows, "LOADS": LOADS}
    names = inspect.signature(kernel.fn).parameters
    constants = {name: value for name, value in constants.items() if name in names}
    kinds = {"partials": ["*fp32"] * 3, "out_ptr": POINTERS[dtype], "items_ptr": "*i32", "unsafe_ptr": "*u8"}
    signature = {
        name: kinds.get(name, "*fp32" if name.endswith("_ptr") else "fp32" if name in FLOATS else "i32")
        for name in names
        if name not in constants
    }
    return compile_triton(kernel, signature, constants, sm)


def assert_fits(which, record_property, **case):
    """The kernel compiles, its shared memory fits the GPU, and it spills next to nothing where it has tensor cores."""
    compiled = compile_decode(which, **case)
    for figure in ("registers", "spilled_bytes", "shared_bytes"):
        record_property(figure, getattr(compiled, figure))
    assert compiled.shared_bytes <= SHARED_BYTES[case["sm"]]
    if case["sm"] >= 80:  # on sm_75 Triton has no tensor cores and spills kilobytes; auto takes torch there
        assert compiled.spilled_bytes <= SPILLED
    return compiled
