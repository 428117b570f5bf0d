"""Other people's attention, which the benchmarks compare with ours: torch's own, and libraries that are installed.

Each peer is prepared once, as its users would prepare it. A peer of decode is prepared for several inputs and gives a
call for each. Only FlashInfer reads our blocks. The other peers of paged decode get keys and values that were gathered
before, so that the gathering is not part of their time.
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
from pagewise.paged_attention.inputs import PagedInputs

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v [B, H, S, D] -> out
Prepare = Callable[[int, bool], Attend]  # seq_len, causal
Run = Callable[[], Tensor]
PrepareDecode = Callable[[Sequence[DenseInputs]], list[Run]]
PreparePagedDecode = Callable[[Sequence[PagedInputs]], list[Run]]
SDPA = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}

# ------------------------------------------------------------------------------------------------ whole sequences


def peers_of_attention(device: torch.device) -> dict[str, Prepare]:
    """Return the peers that this machine has, by name."""
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

    config.donated_buffer = False  # otherwise a backward can run only once
    mask = None
    if causal:
        mask = create_block_mask(lambda b, h, row, col: row >= col, None, None, seq_len, seq_len, device=device)
    return partial(_compiled_flex_attention(), block_mask=mask)


def _compiled_flex_attention() -> Callable[..., Tensor]:
    """Compile FlexAttention for one shape. With dynamic sizes it would take the kernel that is meant for prefill."""
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()
    return torch.compile(flex_attention, dynamic=False)


# ------------------------------------------------------------------------------------------------ decode


def peers_of_decode(device: torch.device) -> dict[str, PrepareDecode]:
    """Return the peers that this machine has, by name. A call returns [B, H, 1, D]."""
    found = {f"SDPA {name}": partial(_sdpa_decode, backend) for name, backend in SDPA.items()}
    if device.type == "cuda":
        found["FlexAttention"] = _flex_decode
        if importlib.util.find_spec("flash_attn"):
            found["flash-attn"] = _flash_attn_decode
    return found


def _sdpa_decode(backend: SDPBackend, batches: Sequence[DenseInputs]) -> list[Run]:
    """Different lengths need a mask, which the flash backend refuses."""

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])

    def mask_of(batch: DenseInputs) -> Tensor | None:
        if batch.seq_lens is None:
            return None
        return (torch.arange(batch.k.shape[2], device=batch.q.device) < batch.seq_lens[:, None])[:, None, None]

    return [partial(run, *batch[:3], mask_of(batch)) for batch in batches]


def _flex_decode(batches: Sequence[DenseInputs]) -> list[Run]:
    from torch.nn.attention.flex_attention import create_block_mask

    compiled = _compiled_flex_attention()

    def prepare(q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor | None) -> Run:
        mask = None
        if seq_lens is not None:
            sizes = (len(q), None, 1, k.shape[2])
            mask = create_block_mask(lambda b, h, row, col: col < seq_lens[b], *sizes, device=q.device)
        return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])

    return [prepare(*batch) for batch in batches]


def _flash_attn_decode(batches: Sequence[DenseInputs]) -> list[Run]:
    from flash_attn import flash_attn_with_kvcache

    def run(q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor | None) -> Tensor:
        return flash_attn_with_kvcache(q, k, v, cache_seqlens=seq_lens).transpose(1, 2)

    def tokens_first(batch: DenseInputs) -> tuple[Tensor, ...]:
        """Return q, k and v as [B, tokens, heads, D]."""
        return tuple(x.transpose(1, 2).contiguous() for x in batch[:3])

    return [partial(run, *tokens_first(batch), batch.seq_lens) for batch in batches]


# ------------------------------------------------------------------------------------------------ paged decode


def peers_of_paged_decode(device: torch.device) -> dict[str, PreparePagedDecode]:
    """Return the peers that this machine has, by name. A call returns [B, H, D]."""
    found = {f"{name}, not paged": partial(_not_paged, peer) for name, peer in peers_of_decode(device).items()}
    if device.type == "cuda" and importlib.util.find_spec("flashinfer"):
        found["FlashInfer"] = _flashinfer
    return found


def gathered(batch: PagedInputs) -> tuple[Float[Tensor, "B Hkv S D"], Float[Tensor, "B Hkv S D"]]:
    """Return contiguous K and V of sequences of one length."""
    k, v = (cache[batch.block_tables].flatten(1, 2) for cache in (batch.k_cache, batch.v_cache))
    return k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()


def _not_paged(prepare: PrepareDecode, batches: Sequence[PagedInputs]) -> list[Run]:
    def without_tokens(run: Run) -> Tensor:
        return run()[:, :, 0]

    dense = [DenseInputs(batch.q[:, :, None], *gathered(batch), None) for batch in batches]
    return [partial(without_tokens, run) for run in prepare(dense)]


def _flashinfer(batches: Sequence[PagedInputs]) -> list[Run]:
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
