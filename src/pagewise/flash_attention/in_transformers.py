"""FlashAttention under Hugging Face's models: `attn_implementation="pagewise"`, in training and generation (lesson 6).

    from pagewise.flash_attention import register_attention

    register_attention()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="pagewise")

transformers asks for two functions. `attend` computes attention, and `visible_keys` makes the mask that `attend` gets.
The mask is as small as possible.

    None       Query i sees the keys up to its own. In models with is_causal=False, it sees all keys.
    [B, S]     As above, without the keys that are padding (False). One row serves all queries.
    [B,1,T,S]  Everything else, True = may look: a window, packed sequences, or a cache with unused slots.

Models project to [B, T, H, D] and pass transposed views [B, H, T, D]. Neither is copied.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from pagewise.flash_attention.attention import flash_attention

# Models pass these arguments to every attention function. They change nothing here.
_HARMLESS = {
    *("cache_position", "deterministic", "num_items_in_batch", "output_hidden_states", "output_router_logits"),
    *("position_ids", "return_dict", "use_cache"),
}
_REMEDIES = {
    "cu_seq_lens_q": ": pass position_ids that begin anew with each packed sequence, and no attention_mask",
    "output_attentions": ': the weights are never stored; use attn_implementation="eager" to look at them',
}


def register_attention(name: str = "pagewise") -> None:
    """Register `flash_attention` with transformers as attn_implementation=`name`.

    Models run with it in training and generation. It supports padding on either side, grouped heads, windows, softcap,
    dropout, any cache of transformers, autocast, and activation checkpointing, which recomputes with the same dropout.

    Raises:
        ImportError: transformers is not installed.
        TypeError, ValueError: the name is not a string, or belongs to another implementation.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {type(name).__name__}")
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            "register_attention needs transformers: pip install 'attention-page-by-page[models]'"
        ) from error
    registered = AttentionInterface().get(name)
    if name == "eager" or registered not in (None, attend):
        raise ValueError(f"name must not be that of another attention implementation, got {name!r}")
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, visible_keys)


def attend(
    module: nn.Module,
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B Hkv S D"],
    value: Float[Tensor, "B Hkv S D"],
    attention_mask: Bool[Tensor, "..."] | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[Float[Tensor, "B T H D"], None]:
    """Compute `flash_attention` as transformers calls it, with a mask of `visible_keys` or the caller's own [B,1,T,S].

    Under autocast, q, k and v take its dtype, because rotary embeddings leave them in different dtypes. The second
    result would be the weights, which are never stored.

    Raises:
        ValueError, TypeError: an argument does not fit, or it would change the result and is not supported here.
    """
    for what, given in others.items():
        if what not in _HARMLESS and given is not None and given is not False:
            raise ValueError(f"this attn_implementation does not know {what}{_REMEDIES.get(what, '')}")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is not None and attention_mask.dim() == 2:
        attention_mask = attention_mask[:, None, None, :]
    elif attention_mask is not None:  # it has a row per query, and includes causality and the window
        causal = False
    on = query.device.type
    if torch.is_autocast_enabled(on):
        query, key, value = (t.to(torch.get_autocast_dtype(on)) for t in (query, key, value))
    options = {"causal": causal, "window": sliding_window if causal else None, "scale": scaling}
    options |= {"softcap": softcap or 0.0, "attn_mask": attention_mask, "dropout_p": dropout}
    out = flash_attention(query, key, value, **options)
    return out.transpose(1, 2).contiguous(), None


def visible_keys(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    *,
    attention_mask: Bool[Tensor, "B S_all"] | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **others: object,
) -> Bool[Tensor, "B S"] | Bool[Tensor, "B 1 T S"] | None:
    """Return the mask for `attend`, as small as it can be (see the docstring of this module).

    Args:
        q_offset, kv_offset: positions of the first query and the first key.
        attention_mask: a mask of all tokens so far, False for padding.
        local_size: the window or chunk of a layer that does not see everything before.
        allow_is_causal_skip: only these arguments make the mask differ from the causal one.
        others: further arguments of transformers' `sdpa_mask`, such as the mask's function.
    """
    end = kv_offset + kv_length
    is_causal = (
        allow_is_causal_skip
        and not isinstance(q_offset, Tensor)  # from a static cache: reading it would wait for the GPU
        and q_offset + q_length == end
        and (local_size is None or end <= local_size)
        and (attention_mask is None or attention_mask.shape[-1] >= end)
    )
    if not is_causal:
        from transformers.masking_utils import sdpa_mask

        sizes = (batch_size, q_length, kv_length, q_offset, kv_offset)
        others |= {"attention_mask": attention_mask, "local_size": local_size, "allow_is_causal_skip": False}
        return sdpa_mask(*sizes, **others)
    if attention_mask is None:
        return None
    mask = attention_mask[:, kv_offset:end]
    capturing = mask.is_cuda and torch.cuda.is_current_stream_capturing()
    if capturing or torch.compiler.is_compiling():  # while a graph is captured or traced, no number is known
        return mask
    return None if mask.all() else mask
