"""The base class of decoders, their embeddings, and checks of what `forward` gets and of what `attend` returns."""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from pagewise.tools.checks import check_same, check_shape, check_tensor


class Decoder(nn.Module):
    """A decoder over token ids. `attend` computes the attention. New weights are torch's random ones.

    `eos_token_ids` are the tokens that end a text, and `sampling_defaults` the sampling parameters that the model's
    authors recommend. `load_model` reads both from the checkpoint.
    """

    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: Mapping[str, float] = MappingProxyType({})


def new_embedding(num_rows: int, size: int) -> nn.Embedding:
    """Return an embedding with random weights."""
    # uniform_, because on the meta device, where load_model builds its models, normal_ imports torch's compiler (4 s)
    return nn.Embedding.from_pretrained(torch.empty(num_rows, size).uniform_(-0.05, 0.05), freeze=False)


def check_inputs(
    token_ids: Tensor,
    positions: Tensor,
    attend: object,
    logits_for: Tensor | None,
    *,
    vocab_size: int,
    num_positions: int | None = None,
    sliding_window: int | None = None,
) -> None:
    """Check the arguments of a decoder's `forward`. Raises ValueError or TypeError.

    Ranges are checked on the CPU only. On a GPU the check would wait for the device, and torch's embedding and indexing
    stop an index out of range there.
    """
    check_tensor("token_ids", token_ids, "B T", dtypes=(torch.int64, torch.int32))
    check_tensor("positions", positions, "B T", dtypes=(torch.int64, torch.int32))
    if positions.shape != token_ids.shape:
        check_shape("positions", positions, token_ids.shape, "B T")
    if positions.device != token_ids.device:
        check_same("device", token_ids=token_ids, positions=positions)
    if not callable(attend):
        raise TypeError(f"attend must be a function attend(layer, q, k, v), got {type(attend).__name__}")
    if sliding_window != (applied := getattr(attend, "sliding_window", None)):
        raise ValueError(
            f"attend.sliding_window must be {sliding_window}, the model's, got {applied}: the engine's attention has it"
        )
    ranges = [("token_ids", token_ids, "vocab_size", vocab_size, "were they made by this model's tokenizer?")]
    if num_positions is not None:
        ranges.append(("positions", positions, "max_position_embeddings", num_positions, "the model has no others"))
    if logits_for is not None:
        check_tensor("logits_for", logits_for, "n", dtypes=(torch.int64,))
        if logits_for.device != token_ids.device:
            check_same("device", token_ids=token_ids, logits_for=logits_for)
        ranges.append(("logits_for", logits_for, "T", token_ids.shape[1], "it counts the tokens of this call"))
    for name, ids, bound, below, hint in ranges:
        if ids.device.type == "cpu" and ids.numel():
            low, high = map(int, ids.aminmax())
            if low < 0 or high >= below:
                raise ValueError(f"{name} must be in [0, {bound} = {below}), got {low} … {high}: {hint}")


def check_attended(out: Tensor, q: Tensor) -> None:
    """`attend` must return one row per query, of q's shape [B, H, T, D] and dtype."""
    check_tensor("what attend returned", out, "B H T D", dtypes=(q.dtype,))
    check_shape("what attend returned", out, q.shape, "B H T D")
