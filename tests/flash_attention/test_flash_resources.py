"""What FlashAttention's Triton kernels take of a GPU that need not be there: registers, shared memory, spills.

Compiled with the tiles that are tried first. PAGEWISE_FULL=1 compiles every kind; with PAGEWISE_RECORD=<file>, too, each
becomes a line of the table in RESOURCES.md.
"""

import inspect
import os
import re
from typing import Any

import pytest
from triton_compile import Compiled, compile_triton

from pagewise.kernels.flash_attention import flash_attention_kernel, forward_tiles
from pagewise.kernels.flash_attention_backward import backward_tiles, flash_attention_backward_kernel
from pagewise.kernels.flash_attention_hopper import flash_attention_hopper_kernel, hopper_tiles

FULL = os.environ.get("PAGEWISE_FULL") == "1"
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}  # what a thread block may have
KINDS = {
    "plain": (),
    "causal": ("CAUSAL",),
    "window": ("CAUSAL", "WINDOW"),
    "softcap": ("CAUSAL", "SOFTCAP"),
    "alibi": ("CAUSAL", "ALIBI"),
    "causal, window, softcap, alibi": ("CAUSAL", "WINDOW", "SOFTCAP", "ALIBI"),
    "causal, packed": ("CAUSAL", "PACKED"),
    "mask": ("MASK",),
    "dropout": ("DROPOUT",),
    "mask, dropout": ("MASK", "DROPOUT"),
}
LIGHT = [kind for kind, flags in KINDS.items() if not {"MASK", "DROPOUT"} & {*flags}]
TOGETHER = "causal, window, softcap, alibi"
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
FLOATS = {"scale", "softcap", "growth", "plain_scale"}
FLOAT32 = {"slopes_ptr", "lse_ptr", "m_ptr", "log_l_ptr", "delta_ptr"}
OTHERS = {"mask_ptr": "*u8", "seed_ptr": "*i64", "cu_q_ptr": "*i32", "cu_k_ptr": "*i32"}


def compiled(kernel: Any, tiles: dict[str, int], D: int, dtype: str, sm: int, kind: str, **more: bool) -> Compiled:
    """As a launch for tensors of `dtype` compiles it, whose strides are multiples of 16, as heads of 16 dims make them."""
    tiles = dict(tiles)
    options = {name: tiles.pop(name) for name in ("num_warps", "num_stages")}
    constants = {"D": D, "BLOCK_D": max(16, 1 << (D - 1).bit_length())} | tiles
    flags = {name for name in inspect.signature(kernel.fn).parameters if name.isupper()} - {*constants, "T", "S"}
    constants |= {flag: flag in KINDS[kind] for flag in flags} | more
    signature = {}
    for name in {*inspect.signature(kernel.fn).parameters} - {*constants}:
        if name.endswith("_ptr"):
            signature[name] = OTHERS.get(name) or ("*fp32" if name in FLOAT32 else f"*{dtype}")
        else:
            by_16 = "stride" in name and name != "mask_stride_col"
            signature[name] = "fp32" if name in FLOATS else "i32:16" if by_16 else "i32"
    taken = compile_triton(kernel, signature, constants, sm, **options)
    cut = "×".join(str(size) for name, size in tiles.items() if not name.startswith(("QUERY", "WARP")))
    which = kernel.fn.__name__.removeprefix("flash_attention_").removesuffix("kernel").strip("_") or "forward"
    line = (which, kind, D, dtype, f"sm_{sm}", cut, *options.values(), *taken[:3])
    if path := os.environ.get("PAGEWISE_RECORD"):
        with open(path, "a") as file:
            file.write(f"| {' | '.join(map(str, line))} |\n")
    assert taken.shared_bytes <= SHARED_BYTES[sm]
    return taken


def forward(D: int, dtype: str, sm: int, kind: str) -> Compiled:
    choices = forward_tiles(max(16, D), BYTES[dtype], sm // 10, heavy=kind not in LIGHT)
    return compiled(flash_attention_kernel, choices[0], D, dtype, sm, kind, LEARNS=True, REST=BYTES[dtype] == 2)


def backward(D: int, dtype: str, sm: int, kind: str) -> Compiled:
    choices = backward_tiles(D, BYTES[dtype], sm // 10, heavy=kind not in LIGHT)
    return compiled(flash_attention_backward_kernel, choices[0], D, dtype, sm, kind)
