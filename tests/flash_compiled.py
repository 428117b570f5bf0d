"""FlashAttention's Triton kernels compiled for a GPU that need not exist here, as a launch compiles them."""

from triton_compile import Compiled, compile_triton

from pagewise.flash_attention import tuning
from pagewise.kernels.flash_attention import flash_attention_kernel, flash_forward_kernel
from pagewise.kernels.flash_attention_backward import flash_attention_backward_kernel, flash_dq_kernel
from pagewise.tools.architecture import SHARED_BYTES, Architecture
from pagewise.tools.sizes import padded

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
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
_NEEDS = {"threshold": "seed", "growth": "seed"} | dict.fromkeys(
    ("cu_seqlens_q", "cu_seqlens_k", "sequences", "key_sequences", "query_sequences"), "packed"
)
_OPTIONS = {"window", "softcap", "slopes", "attn_mask", "seed", *_NEEDS}
_TYPES = {
    "lse": "*fp32", "m_ptr": "*fp32", "log_l_ptr": "*fp32", "delta": "*fp32", "slopes": "*fp32", "seed": "*i64",
    "attn_mask": ["*u8", "i32:16", "i32:16", "i32:16", 1], "cu_seqlens_q": "*i32", "cu_seqlens_k": "*i32",
    "sequences": "*i32", "key_sequences": "*i32", "query_sequences": "*i32",
    "scale": "fp32", "softcap": "fp32", "growth": "fp32", "plain_scale": "fp32",
}  # fmt: skip


def gpu(sm: int) -> Architecture:
    return Architecture(sm, SHARED_BYTES[sm], num_sms=100)


def heavy(kind: str) -> bool:
    return bool({"attn_mask", "seed"} & KINDS[kind])


def first_tiles(kernel: object, D: int, dtype: str, sm: int, kind: str) -> tuning.Tiles:
    """The tiles that a launch takes without timing."""
    choices = tuning.backward_tiles if kernel is flash_attention_backward_kernel else tuning.forward_tiles
    return choices(padded(D), BYTES[dtype], gpu(sm), heavy=heavy(kind))[0]


def compiled(kernel, tiles: tuning.Tiles, D: int, dtype: str, sm: int, kind: str, gradient: bool = True) -> Compiled:
    """As for tensors whose strides are multiples of 16. gradient: the forward stores what a backward needs."""
    signature, constants = {}, {"D": D, "BLOCK_D": padded(D), "CAUSAL": "causal" in KINDS[kind]}
    for name in kernel.arg_names:
        unused = name in _OPTIONS and _NEEDS.get(name, name) not in KINDS[kind]
        if name in ("KEY_COLS", "QUERY_ROWS") or (name == "ROWS"):
            constants[name] = tiles.owned
        elif name in ("KEY_ROWS", "QUERY_COLS", "COLS"):
            constants[name] = tiles.visited
        elif unused or (name in ("m_ptr", "log_l_ptr") and not gradient):
            constants[name] = None
        elif name in ("q", "k", "v", "out", "d_out", "dq", "dk", "dv"):
            signature[name] = [f"*{dtype}", "i32:16", "i32:16", "i32:16", 1]
        elif name == "lse" and kernel is flash_forward_kernel:
            signature[name] = ["*fp32", "i32", "i32", 1]
        elif name not in constants:
            signature[name] = _TYPES.get(name, "i32")
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    return compile_triton(kernel, signature, constants, sm, **options)


FORWARD, BACKWARD, FIRST_FORWARD, FIRST_BACKWARD = (
    flash_attention_kernel, flash_attention_backward_kernel, flash_forward_kernel, flash_dq_kernel,
)  # fmt: skip
