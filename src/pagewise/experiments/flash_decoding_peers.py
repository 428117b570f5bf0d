"""Other people's decode over keys and values that lie side by side, for Flash-Decoding to be compared with.

Each is prepared for batches once, as its users would, and gives a call for each. In blocks: `paged_attention_peers`.
"""

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from pagewise.experiments.decode_inputs import DenseInputs
from pagewise.experiments.paged_attention_peers import SDPA, compiled_flex_attention

Run = Callable[[], Float[Tensor, "B H 1 D"]]
Prepare = Callable[[Sequence[DenseInputs]], list[Run]]


def peers(device: torch.device) -> dict[str, Prepare]:
    """Those that this machine has, by name."""
    found = {f"SDPA {name}": partial(_sdpa, backend) for name, backend in SDPA.items()}
    if device.type == "cuda":
        found["FlexAttention"] = _flex_attention
        if importlib.util.find_spec("flash_attn"):
            found["flash-attn"] = _flash_attn
    return found


def _sdpa(backend: SDPBackend, batches: Sequence[DenseInputs]) -> list[Run]:
    """Lengths that differ are a mask, which flash does not take."""

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])

    def mask_of(batch: DenseInputs) -> Tensor | None:
        if batch.seq_lens is None:
            return None
        return (torch.arange(batch.k.shape[2], device=batch.q.device) < batch.seq_lens[:, None])[:, None, None]

    return [partial(run, *batch[:3], mask_of(batch)) for batch in batches]


def _flex_attention(batches: Sequence[DenseInputs]) -> list[Run]:
    from torch.nn.attention.flex_attention import create_block_mask

    compiled = compiled_flex_attention()

    def prepare(q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor | None) -> Run:
        mask = None
        if seq_lens is not None:
            sizes = (len(q), None, 1, k.shape[2])
            mask = create_block_mask(lambda b, h, row, col: col < seq_lens[b], *sizes, device=q.device)
        return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])

    return [prepare(*batch) for batch in batches]


def _flash_attn(batches: Sequence[DenseInputs]) -> list[Run]:
    from flash_attn import flash_attn_with_kvcache

    def run(q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor | None) -> Tensor:
        return flash_attn_with_kvcache(q, k, v, cache_seqlens=seq_lens).transpose(1, 2)

    def tokens_first(batch: DenseInputs) -> tuple[Tensor, ...]:
        """q, k and v as [B, tokens, heads, D]."""
        return tuple(x.transpose(1, 2).contiguous() for x in batch[:3])

    return [partial(run, *tokens_first(batch), batch.seq_lens) for batch in batches]
