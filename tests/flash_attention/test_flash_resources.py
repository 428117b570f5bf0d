"""Registers, shared memory and spills of FlashAttention's Triton kernels, compiled for GPUs that need not exist here.

Compiled with the tiles that a launch takes. PAGEWISE_FULL=1 compiles every kind; with PAGEWISE_RECORD=<file>, each
becomes a line of a table: kernel, options, D, dtype, GPU, tiles, warps, stages, registers, spilled and shared bytes.
"""

import os

import pytest
import torch
from covering import in_turns, is_full
from flash_compiled import (
    BACKWARD,
    BYTES,
    FIRST_BACKWARD,
    FIRST_FORWARD,
    FORWARD,
    KINDS,
    compiled,
    first_tiles,
    gpu,
    heavy,
    only_compiled,
)
from triton_compile import Compiled

from pagewise.flash_attention import attention, flash_attention, flash_attention_varlen, in_cuda, in_triton, tuning
from pagewise.tools.architecture import SHARED_BYTES
from pagewise.tools.sizes import padded

pytestmark = pytest.mark.slow

LIGHT = [kind for kind in KINDS if not heavy(kind)]
TOGETHER, HEAVY = "causal, window, softcap, alibi", "mask, dropout"
NAMES = {FORWARD: "forward", BACKWARD: "backward"}


def taken(kernel: object, D: int, dtype: str, sm: int, kind: str) -> Compiled:
    """Compiled with the first tiles; it fits the GPU, and the bound of its shared memory is one."""
    tiles = first_tiles(kernel, D, dtype, sm, kind)
    result = compiled(kernel, tiles, D, dtype, sm, kind)
    needs = tuning.forward_shared_bytes if kernel is FORWARD else tuning.backward_shared_bytes
    assert result.shared_bytes <= needs(tiles, padded(D), BYTES[dtype], gpu(sm)) <= SHARED_BYTES[sm]
    if path := os.environ.get("PAGEWISE_RECORD"):
        cut = f"{tiles.owned}×{tiles.visited}"
        line = (NAMES[kernel], kind, D, dtype, f"sm_{sm}", cut, tiles.num_warps, tiles.num_stages, *result[:3])
        with open(path, "a") as file:
            file.write(f"| {' | '.join(map(str, line))} |\n")
    return result


# ------------------------------------------------------------------------------------------------ what is promised


@pytest.mark.parametrize(("D", "sm"), in_turns([16, 32, 64, 128] if is_full() else [64, 128], [80, 90]))
@pytest.mark.parametrize("kind", LIGHT if is_full() else [TOGETHER])
def test_the_forward_in_16_bits_spills_nothing(kind, D, sm):
    """With four options at once it may spill seven registers."""
    allowed = 28 if kind == TOGETHER else 0
    assert taken(FORWARD, D, "fp16", sm, kind).spilled_bytes <= allowed
    if is_full() and kind == TOGETHER:
        assert taken(FORWARD, D, "bf16", sm, kind).spilled_bytes <= allowed


OTHERS = [
    *((FORWARD, D, "fp16", HEAVY) for D in (64, 128)),
    *((FORWARD, 256, "fp16", kind) for kind in ("causal", TOGETHER, HEAVY)),
    *((BACKWARD, D, "fp16", kind) for D in (64, 128, 256) for kind in ("causal", TOGETHER, HEAVY)),
    *(
        (kernel, D, "fp32", kind)
        for kernel in (FORWARD, BACKWARD)
        for D in (64, 128, 256)
        for kind in ("causal", HEAVY)
    ),
]


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize(("kernel", "D", "dtype", "kind"), OTHERS if is_full() else [(BACKWARD, 128, "fp16", "causal")])
def test_the_others_spill_little(kernel, D, dtype, kind, sm):
    """In bytes per thread, which has 1020 of registers at most."""
    allowed = 640 if (D, dtype, kind) == (256, "fp32", HEAVY) else 256
    assert taken(kernel, D, dtype, sm, kind).spilled_bytes <= allowed


# ------------------------------------------------------------------------------------------------ every architecture

# Cases that failed once, and a case of each family. sm_75 compiles slowly: its products become many instructions.
BY_ARCHITECTURE = [
    (75, FORWARD, 64, "fp16", "causal"), (75, BACKWARD, 256, "fp16", "dropout"), (86, BACKWARD, 256, "fp16", "causal"),
    (86, FORWARD, 128, "fp16", "causal, packed"), (90, FORWARD, 256, "fp16", "causal"),
    (100, BACKWARD, 128, "fp16", "causal"), (120, FORWARD, 256, "bf16", "causal"),
    (120, BACKWARD, 256, "fp16", "causal"),
]  # fmt: skip
OF_FULL = [
    (75, BACKWARD, 16, "fp16", "causal"), (80, FORWARD, 256, "fp16", "causal"),
    (89, BACKWARD, 256, "fp16", "causal, packed"), (120, FORWARD, 256, "fp16", "causal, packed"),
]  # fmt: skip


@pytest.mark.parametrize(("sm", "kernel", "D", "dtype", "kind"), BY_ARCHITECTURE + OF_FULL * is_full())
def test_the_first_tiles_fit_every_architecture(sm, kernel, D, dtype, kind):
    taken(kernel, D, dtype, sm, kind)


def test_no_length_is_a_constant():
    """Lengths, windows and numbers of heads, of 1, of a multiple of 16 and of others, take the same kernels."""
    kernels = []
    with only_compiled(80) as found:
        for T, S, heads, window in ((1, 1, 1, 1), (16, 16, 16, 16), (17, 33, 2, 5), (48, 64, 3, 32)):
            q, k, v = (torch.zeros(1, heads, n, 16).half().requires_grad_() for n in (T, S, S))
            for options in ({}, {"causal": True, "window": window}):
                flash_attention(q, k, v, **options, backend="triton").sum().backward()
                kernels.append([kernel.ptx for kernel in found])
                found.clear()
    assert all(ptx == kernels[i % 2] for i, ptx in enumerate(kernels))


@pytest.mark.parametrize(("kernel", "sm"), [(FIRST_FORWARD, 80), (FIRST_BACKWARD, 90)])
def test_first_rungs_compile(kernel, sm):
    assert compiled(kernel, tuning.Tiles(64, 64, 4, 2), 64, "fp16", sm, "causal").spilled_bytes == 0


# ------------------------------------------------------------------------------------------------ sm_75


@pytest.fixture
def on_a_t4(monkeypatch):
    """The CPU's tensors taken for those of a T4, and the backend that was chosen."""
    chosen = []
    for module in (in_triton, attention, attention.in_cuda):
        monkeypatch.setattr(module, "architecture", lambda device: gpu(75))
    monkeypatch.setattr(attention.in_cuda, "forward", lambda q, k, v, options: chosen.append("cuda") or (q, q[..., 0]))

    def attend(q, k, v, options, dropout, backend, **packed):
        chosen.append(backend)
        return q, q[..., 0]

    monkeypatch.setattr(attention, "attend", attend)
    return chosen


def test_on_sm_75_auto_takes_cuda_if_it_can_and_torch_otherwise(on_a_t4):
    q, k, v = torch.randn(3, 1, 2, 5, 64).half()
    flash_attention(q, k, v, causal=True)
    flash_attention(q, k, v, causal=True, window=3)
    flash_attention(q.requires_grad_(), k, v)
    flash_attention(q.detach().bfloat16(), k.bfloat16(), v.bfloat16())
    rows, sums = (x[0].transpose(0, 1).detach() for x in (q, k, v)), torch.tensor([0, 5], dtype=torch.int32)
    flash_attention_varlen(*rows, sums, sums)
    assert on_a_t4 == ["cuda", "torch", "torch", "torch", "torch"]


@pytest.mark.usefixtures("on_a_t4")
@pytest.mark.parametrize(("backend", "too_wide"), [("triton", 256), ("cuda", 2 * max(in_cuda.HEAD_SIZES))])
def test_bfloat16_and_wide_heads_on_sm_75_are_refused_with_their_remedies(backend, too_wide):
    q = torch.randn(1, 2, 5, 64).bfloat16()
    with pytest.raises(ValueError, match=r"cannot compute with bfloat16 on this GPU \(sm_75\).*use float16"):
        flash_attention(q, q, q, backend=backend)
    wide = torch.randn(1, 2, 5, too_wide)
    with pytest.raises(ValueError, match=rf"head sizes .*128.*, got {too_wide}"):
        flash_attention(wide, wide, wide, backend=backend)
