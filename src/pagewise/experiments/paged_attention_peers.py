"""Other people's decode, for paged decode to be compared with: torch's backends, and the libraries that are installed.

Each peer is prepared for batches once, as its users would, and gives a call for each. Only FlashInfer reads our blocks.
The others get keys and values that lie side by side already: what gathering them costs is not in their time.
"""

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from pagewise.paged_attention.inputs import PagedInputs

Batches = Sequence[PagedInputs]
Run = Callable[[], Float[Tensor, "B H D"]]
SDPA = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
SideBySide = tuple[Float[Tensor, "B H D"], Float[Tensor, "B S Hkv D"], Float[Tensor, "B S Hkv D"]]


def peers(device: torch.device) -> dict[str, Callable[[Batches], list[Run]]]:
    """Those that this machine has, by name."""
    found = {f"SDPA {name}, not paged": partial(_sdpa, backend) for name, backend in SDPA.items()}
    if device.type != "cuda":
        return found
    found["FlexAttention, not paged"] = _flex_attention
    for module, name, prepare in (
        ("flashinfer", "FlashInfer", _flashinfer),
        ("flash_attn", "flash-attn, not paged", _flash_attn),
        ("xformers", "xformers, not paged", _xformers),
    ):
        if importlib.util.find_spec(module):
            found[name] = prepare
    return found


def side_by_side(batch: PagedInputs) -> SideBySide:
    """q, and K and V of sequences of one length, gathered: [B, S, Hkv, D]."""
    k, v = (cache[batch.block_tables].flatten(1, 2) for cache in (batch.k_cache, batch.v_cache))
    return batch.q, k, v


def _heads_first(batch: PagedInputs) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, H, 1, D], k and v [B, Hkv, S, D], contiguous."""
    q, k, v = side_by_side(batch)
    return q[:, :, None], k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()


def _sdpa(backend: SDPBackend, batches: Batches) -> list[Run]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])[:, :, 0]

    return [partial(run, *_heads_first(batch)) for batch in batches]


def _flex_attention(batches: Batches) -> list[Run]:
    compiled = compiled_flex_attention()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compiled(q, k, v, enable_gqa=q.shape[1] != k.shape[1])[:, :, 0]

    return [partial(run, *_heads_first(batch)) for batch in batches]


def compiled_flex_attention() -> Callable[..., Tensor]:
    """Compiled anew for each shape: with sizes left open it takes the kernel that is meant for prefill."""
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()
    return torch.compile(flex_attention, dynamic=False)


def _flashinfer(batches: Batches) -> list[Run]:
    import flashinfer

    def prepare(batch: PagedInputs) -> Run:
        q, tables, lens, (_, P, Hkv, D) = batch.q, batch.block_tables, batch.seq_lens, batch.cache_sizes
        workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device=q.device)
        decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        counts = (lens + P - 1) // P  # blocks of each sequence
        indptr = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        indices = tables[torch.arange(tables.shape[1], device=q.device) < counts[:, None]]
        last = (lens - 1) % P + 1  # tokens in the last block
        dtypes = {"q_data_type": q.dtype, "kv_data_type": batch.k_cache.dtype}
        decode.plan(indptr, indices, last, q.shape[1], Hkv, D, P, **dtypes)
        return lambda: decode.run(q, (batch.k_cache, batch.v_cache))

    return [prepare(batch) for batch in batches]


def _flash_attn(batches: Batches) -> list[Run]:
    """Its blocks must have a multiple of 256 tokens, so it gets none."""
    from flash_attn import flash_attn_with_kvcache

    def run(q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor) -> Tensor:
        return flash_attn_with_kvcache(q[:, None], k, v, cache_seqlens=seq_lens)[:, 0]

    return [partial(run, *side_by_side(batch), batch.seq_lens) for batch in batches]


def _xformers(batches: Batches) -> list[Run]:
    """Its grouped form [B, S, Hkv, G, D]: G query heads on the same, expanded, keys and values."""
    from xformers.ops import memory_efficient_attention_forward

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = q.unflatten(1, (k.shape[2], -1))[:, None]  # [B, 1, Hkv, G, D]
        k, v = (t[:, :, :, None].expand(-1, -1, -1, grouped.shape[3], -1) for t in (k, v))
        return memory_efficient_attention_forward(grouped, k, v)[:, 0].flatten(1, 2)

    return [partial(run, *side_by_side(batch)) for batch in batches]
