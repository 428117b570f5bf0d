"""Other people's attention over whole sequences, for FlashAttention to be compared with: what torch brings along.

Each peer is prepared for sequences of one length, causal or not, and then attends as its users would have it.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from pagewise.experiments.paged_attention_peers import SDPA, compiled_flex_attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v [B, H, S, D] -> out
Prepare = Callable[[int, bool], Attend]  # seq_len, causal


def peers(device: torch.device) -> dict[str, Prepare]:
    """Those that this machine has, by name."""
    found = {f"SDPA {name}": partial(_sdpa, SDPA[name]) for name in ("flash", "cudnn", "math")}
    if device.type == "cuda":
        found["FlexAttention"] = partial(_flex_attention, device)
    return found


def _sdpa(backend: SDPBackend, seq_len: int, causal: bool) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    return attend


def _flex_attention(device: torch.device, seq_len: int, causal: bool) -> Attend:
    from torch._functorch import config
    from torch.nn.attention.flex_attention import create_block_mask

    config.donated_buffer = False  # else a backward can run only once
    mask = None
    if causal:
        mask = create_block_mask(lambda b, h, row, col: row >= col, None, None, seq_len, seq_len, device=device)
    return partial(compiled_flex_attention(), block_mask=mask)
