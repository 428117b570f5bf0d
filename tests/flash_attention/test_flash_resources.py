"""What FlashAttention's Triton kernels take of a GPU that need not be there: registers, shared memory, spills.

Compiled with the tiles that are tried first. PAGEWISE_FULL=1 compiles every kind; with PAGEWISE_RECORD=<file>, too,
each becomes a line of the table in RESOURCES.md.
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
from pagewise.tools.sizes import padded

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
NOT_FLOAT = {"mask_ptr": "*u8", "seed_ptr": "*i64", "cu_q_ptr": "*i32", "cu_k_ptr": "*i32"}


def compiled(kernel: Any, tiles: dict[str, int], D: int, dtype: str, sm: int, kind: str, **more: bool) -> Compiled:
    """As a launch compiles it for tensors whose strides are multiples of 16, as heads of 16 dims make them."""
    tiles = dict(tiles)
    options = {name: tiles.pop(name) for name in ("num_warps", "num_stages")}
    constants = {"D": D, "BLOCK_D": padded(D)} | tiles
    flags = {name for name in inspect.signature(kernel.fn).parameters if name.isupper()} - {*constants, "T", "S"}
    constants |= {flag: flag in KINDS[kind] for flag in flags} | more
    signature = {}
    for name in {*inspect.signature(kernel.fn).parameters} - {*constants}:
        if name.endswith("_ptr"):
            signature[name] = NOT_FLOAT.get(name) or ("*fp32" if name in FLOAT32 else f"*{dtype}")
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
    choices = forward_tiles(padded(D), BYTES[dtype], sm // 10, heavy=kind not in LIGHT)
    return compiled(flash_attention_kernel, choices[0], D, dtype, sm, kind, LEARNS=True, REST=BYTES[dtype] == 2)


def backward(D: int, dtype: str, sm: int, kind: str) -> Compiled:
    choices = backward_tiles(padded(D), BYTES[dtype], sm // 10, heavy=kind not in LIGHT)
    return compiled(flash_attention_backward_kernel, choices[0], D, dtype, sm, kind)


# ------------------------------------------------------------------------------------------------ what is promised


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("D", [16, 32, 64, 128] if FULL else [64, 128])
@pytest.mark.parametrize("kind", LIGHT if FULL else [TOGETHER])
def test_the_forward_in_16_bits_spills_nothing(kind, D, sm):
    assert forward(D, "fp16", sm, kind).spilled_bytes == 0
    if FULL and kind == TOGETHER:
        assert forward(D, "bf16", sm, kind).spilled_bytes == 0


@pytest.mark.parametrize("D", [64, 128] if FULL else [128])
@pytest.mark.parametrize("variant", ["descriptors", "warp_specialized"])
def test_hoppers_variants_are_what_they_are_called(variant, D):
    """The tensor memory accelerator moves tiles; with warp specialisation, asked by warps of their own: 4 become 12."""
    kernel, tiles = flash_attention_hopper_kernel, hopper_tiles(D, variant)[0]
    taken = compiled(kernel, tiles, D, "fp16", 90, "causal", LEARNS=True, REST=True)
    assert "cp.async.bulk.tensor" in taken.ptx
    threads = int(re.search(r"\.reqntid (\d+)", taken.ptx)[1])
    assert threads == (12 if variant == "warp_specialized" else 8) * 32


# ------------------------------------------------------------------------------------------------ what is recorded

HEAVY = "mask, dropout"
OTHERS = [
    *((forward, D, "fp16", HEAVY) for D in (64, 128)),
    *((forward, 256, "fp16", kind) for kind in ("causal", TOGETHER, HEAVY)),
    *((backward, D, "fp16", kind) for D in (64, 128, 256) for kind in ("causal", TOGETHER, HEAVY)),
    *((half, D, "fp32", kind) for half in (forward, backward) for D in (64, 128, 256) for kind in ("causal", HEAVY)),
]


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize(("half", "D", "dtype", "kind"), OTHERS if FULL else [(backward, 128, "fp16", "causal")])
def test_the_others_spill_little(half, D, dtype, kind, sm):
    """In bytes per thread, which has 1020 of registers at the most."""
    allowed = 640 if (D, dtype, kind) == (256, "fp32", HEAVY) else 256
    assert half(D, dtype, sm, kind).spilled_bytes <= allowed
