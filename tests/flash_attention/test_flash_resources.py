"""What FlashAttention's Triton kernels take of a GPU that need not be there: registers, shared memory, spills.

Compiled with the tiles that are tried first. PAGEWISE_FULL=1 compiles every kind; with PAGEWISE_RECORD=<file>, too,
each becomes a line of the table in RESOURCES.md.
"""

import inspect
import os
import re
from typing import Any

import pytest
from covering import in_turns
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


def compiled(called: str, kernel: Any, tiles: dict, D: int, dtype: str, sm: int, kind: str, **flags: bool) -> Compiled:
    """As a launch compiles it for tensors whose strides are multiples of 16, as heads of 16 dims make them."""
    names = list(inspect.signature(kernel.fn).parameters)
    options = {name: tiles[name] for name in ("num_warps", "num_stages")}
    sizes = {name: size for name, size in tiles.items() if name not in options}
    flags |= {name: True for name in KINDS[kind]}
    constants = {"D": D, "BLOCK_D": padded(D)} | sizes
    given = {"T", "S", *constants}
    constants |= {name: flags.get(name, False) for name in names if name.isupper() and name not in given}
    signature = {name: type_of(name, dtype) for name in names if name not in constants}
    taken = compile_triton(kernel, signature, constants, sm, **options)
    assert taken.shared_bytes <= SHARED_BYTES[sm]
    if path := os.environ.get("PAGEWISE_RECORD"):
        cut = "×".join(str(size) for name, size in sizes.items() if name in {"ROWS", "COLS", "KEY_ROWS", "KEY_COLS"})
        line = (called, kind, D, dtype, f"sm_{sm}", cut, *options.values(), *taken[:3])
        with open(path, "a") as file:
            file.write(f"| {' | '.join(map(str, line))} |\n")
    return taken


def type_of(name: str, dtype: str) -> str:
    """What Triton calls the type of this argument."""
    if name.endswith("_ptr"):
        return NOT_FLOAT.get(name) or ("*fp32" if name in FLOAT32 else f"*{dtype}")
    return "fp32" if name in FLOATS else "i32:16" if "stride" in name and name != "mask_stride_col" else "i32"


def forward(D: int, dtype: str, sm: int, kind: str) -> Compiled:
    tiles = forward_tiles(padded(D), BYTES[dtype], sm // 10, heavy=kind not in LIGHT)[0]
    return compiled("forward", flash_attention_kernel, tiles, D, dtype, sm, kind, LEARNS=True, REST=BYTES[dtype] == 2)


def backward(D: int, dtype: str, sm: int, kind: str) -> Compiled:
    tiles = backward_tiles(padded(D), BYTES[dtype], sm // 10, heavy=kind not in LIGHT)[0]
    return compiled("backward", flash_attention_backward_kernel, tiles, D, dtype, sm, kind)


# ------------------------------------------------------------------------------------------------ what is promised


@pytest.mark.parametrize(("D", "sm"), in_turns([16, 32, 64, 128] if FULL else [64, 128], [80, 90]))
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
    taken = compiled(variant, kernel, tiles, D, "fp16", 90, "causal", LEARNS=True, REST=True)
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
