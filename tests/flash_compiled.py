"""FlashAttention's Triton kernels compiled for a GPU that need not exist here, as a launch compiles them."""

import contextlib
import re
from collections.abc import Iterator
from unittest import mock

import torch
from triton_compile import Compiled

from cudascope import triton_compiled
from cudascope.toolchain.ptxas import PtxText, resources_of
from cudascope.triton import launches
from pagewise.flash_attention import in_triton, tuning
from pagewise.flash_attention.inputs import FlashInputs
from pagewise.kernels.flash_attention import flash_attention_kernel, flash_forward_kernel
from pagewise.kernels.flash_attention_backward import flash_attention_backward_kernel, flash_dq_kernel
from pagewise.tools.architecture import SHARED_BYTES, Architecture
from pagewise.tools.launch import launch
from pagewise.tools.sizes import padded

FORWARD, BACKWARD = flash_attention_kernel, flash_attention_backward_kernel
FIRST_FORWARD, FIRST_BACKWARD = flash_forward_kernel, flash_dq_kernel
KINDS = {
    "plain": set(),
    "causal": {"causal"},
    "window": {"causal", "window"},
    "softcap": {"causal", "softcap"},
    "alibi": {"causal", "slopes"},
    "causal, window, softcap, alibi": {"causal", "window", "softcap", "slopes"},
    "causal, packed": {"causal", "packed"},
    "mask": {"attn_mask"},
    "dropout": {"seed"},
    "mask, dropout": {"attn_mask", "seed"},
}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
LENGTH = 32  # of the sequences that a launch is made for


def gpu(sm: int) -> Architecture:
    return Architecture(sm, SHARED_BYTES[sm], num_sms=100)


def heavy(kind: str) -> bool:
    return bool({"attn_mask", "seed"} & KINDS[kind])


def first_tiles(kernel: object, D: int, dtype: str, sm: int, kind: str) -> tuning.Tiles:
    """The tiles that a launch takes."""
    direction = "backward" if kernel is BACKWARD else "forward"
    return tuning.choices(direction, padded(D), BYTES[dtype], gpu(sm), heavy(kind))[0]


def inputs_of(D: int, dtype: str, kind: str) -> FlashInputs:
    """Inputs whose strides are multiples of 16."""
    q, k, v = (torch.zeros(1, 2, LENGTH, D, dtype=DTYPES[dtype]) for _ in range(3))
    slopes, mask = torch.zeros(2), torch.ones(1, 2, LENGTH, LENGTH, dtype=torch.bool)
    sums, seed = torch.tensor([0, LENGTH], dtype=torch.int32), torch.tensor(0)
    given = KINDS[kind]
    return FlashInputs(
        q,
        k,
        v,
        slopes if "slopes" in given else None,
        mask if "attn_mask" in given else None,
        seed if "seed" in given else None,
        sums if "packed" in given else None,
        sums if "packed" in given else None,
        scale=D**-0.5,
        causal="causal" in given,
        window=20 if "window" in given else None,
        softcap=1.0 if "softcap" in given else 0.0,
        dropout_p=0.1 if "seed" in given else 0.0,
        backend="triton",
    )


def compiled(kernel, tiles: tuning.Tiles, D: int, dtype: str, sm: int, kind: str, gradient: bool = True) -> Compiled:
    """What a launch with these tiles compiles. gradient: the forward stores what a backward needs."""
    inputs = inputs_of(D, dtype, kind)
    lse, saved = torch.zeros(1, 2, LENGTH), torch.zeros(2, 1, 2, LENGTH)
    saved = saved if gradient and dtype == "fp32" else torch.zeros(0)
    with only_compiled(sm) as found, mock.patch.object(tuning, "tiles_for", return_value=tiles):
        if kernel is FORWARD:
            in_triton.forward(inputs, torch.empty_like(inputs.q), lse, saved)
        elif kernel is BACKWARD:
            in_triton.backward(inputs, inputs.q, lse, inputs.q, lse, saved)
        else:
            launch_first_rung(kernel, inputs, lse, tiles)
    ptx = found[-1].ptx
    target = re.search(r"\.target (sm_\w+)", ptx)[1]
    resources = resources_of(PtxText(ptx, found[-1].name, target), sm)
    assert resources, "ptxas does not compile the PTX"
    return Compiled(resources.registers, resources.spilled_bytes, found[-1].shared, ptx)


def launch_first_rung(kernel, inputs: FlashInputs, lse: torch.Tensor, tiles: tuning.Tiles) -> None:
    q, D = inputs.q, inputs.q.shape[-1]
    tensors = {"q": q, "k": inputs.k, "v": inputs.v}
    if kernel is FIRST_FORWARD:
        tensors |= {"out": torch.empty_like(q), "lse": lse}
    else:
        tensors |= {"d_out": q, "lse": lse.view(-1), "delta": lse.view(-1), "dq": torch.empty_like(q)}
    sizes = {"group": 1, "T": LENGTH, "S": LENGTH, "scale": inputs.scale, "D": D, "BLOCK_D": padded(D)}
    sizes |= {"ROWS": tiles.owned, "COLS": tiles.visited, "CAUSAL": inputs.causal}
    launch(kernel, (1, 2, 1), **tensors, **sizes, num_warps=tiles.num_warps, num_stages=tiles.num_stages)


@contextlib.contextmanager
def only_compiled(sm: int) -> Iterator[list]:
    """Compile the kernels that are launched inside for `sm`, without executing them. Yields them as a growing list."""
    found, real = [], launches.compiled_kernel

    def keep(launched):
        found.append(real(launched))
        return found[-1]

    no_program = mock.patch.object(launches, "_grid", return_value=(0, 1, 1))
    with triton_compiled(f"sm_{sm}"), mock.patch.object(launches, "compiled_kernel", keep), no_program:
        yield found
