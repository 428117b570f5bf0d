"""Llama: positions of each sequence, exact angles, and one `attend` that alone decides about attention."""

import pytest
import torch
from torch import Tensor

from pagewise.models.llama import Llama, LlamaConfig
from pagewise.naive_attention import attention

SIZES = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3}


def naive(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, causal=True)


def random_llama(heads=4, kv_heads=2, head_dim=16, dtype=torch.float64, **options) -> Llama:
    """Weights large enough that every part of the model moves the logits."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    model = Llama(LlamaConfig(**SIZES, **sizes, **options)).to(dtype).requires_grad_(False)
    for weight in model.parameters():
        size = weight.shape[-1] ** -0.5 if weight.dim() == 2 else 1.0
        weight.copy_((size * torch.randn(weight.shape, generator=generator, dtype=torch.float64)).to(dtype))
    return model


def random_ids(*shape, vocab=61, seed=1) -> Tensor:
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def from_zero(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1]).expand_as(ids)


# ------------------------------------------------------------------------------------------------ positions


def test_each_sequence_of_a_batch_has_its_own_positions():
    model, ids = random_llama(), random_ids(3, 11)
    positions = from_zero(ids) + torch.tensor([[0], [5], [77]])
    positions[2, 4:] += 3
    batch = model(ids, positions, naive)
    for row in range(3):
        alone = model(ids[row : row + 1], positions[row : row + 1], naive)
        torch.testing.assert_close(batch[row : row + 1], alone, rtol=1e-10, atol=1e-10)


def test_rope_angles_are_exact_in_a_bfloat16_model():
    """In bfloat16 position 4001 would be 4000, and the fastest pair would point elsewhere."""
    exact, rounded = {}, {}
    model = random_llama(dtype=torch.bfloat16)
    ids = random_ids(1, 5)
    model(ids, from_zero(ids) + 4001, recording(rounded))
    model.double()(ids, from_zero(ids) + 4001, recording(exact))
    for got, want in zip(rounded[0], exact[0], strict=True):
        assert (got.double() - want).abs().max() <= 2e-2 * want.abs().max()


# ------------------------------------------------------------------------------------------------ attend


def recording(calls: dict):
    def attend(layer, q, k, v):
        assert layer not in calls, f"layer {layer} attended twice"
        calls[layer] = (q, k, v)
        return naive(layer, q, k, v)

    return attend


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_attend_is_called_once_per_layer_with_the_documented_shapes(dtype):
    calls = {}
    model, ids = random_llama(8, 2, 6, dtype), random_ids(2, 7)
    logits = model(ids, from_zero(ids), recording(calls))
    assert list(calls) == [0, 1, 2]
    for q, k, v in calls.values():
        assert (q.shape, k.shape, v.shape) == ((2, 8, 7, 6), (2, 2, 7, 6), (2, 2, 7, 6))
        assert q.dtype == k.dtype == v.dtype == dtype
    assert (logits.shape, logits.dtype) == ((2, 7, 61), dtype)
    assert torch.isfinite(logits).all()


def test_attend_alone_decides_who_sees_whom():
    """Without a mask of its own: attention that sees everything moves the first logits, causal attention does not."""
    model, ids = random_llama(), random_ids(1, 9)
    changed = ids.clone()
    changed[0, -1] = (ids[0, -1] + 1) % 61
    for causal, moved in ((True, False), (False, True)):

        def attend(layer, q, k, v, causal=causal):
            return attention(q, k, v, causal=causal)

        difference = model(ids, from_zero(ids), attend) - model(changed, from_zero(ids), attend)
        assert (difference[:, :-1].abs().max() > 1e-3) == moved


# ------------------------------------------------------------------------------------------------ bad input

IDS = torch.zeros(2, 3, dtype=torch.int64)


def test_last_token_of_the_vocabulary_and_int32_are_fine():
    model = random_llama()
    ids = IDS + 60
    torch.testing.assert_close(model(ids.int(), IDS.int(), naive), model(ids, IDS, naive), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("sizes", "error", "says"),
    [
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, ValueError, "must be a multiple of num_key_value_heads"),
        ({"num_attention_heads": 4, "head_dim": 7}, ValueError, "head_dim must be even.*got 7"),
        ({"num_attention_heads": 5}, ValueError, "hidden_size = 48 is not a multiple of num_attention_heads = 5"),
        ({"num_attention_heads": 0}, ValueError, "num_attention_heads must be at least 1, got 0"),
        ({"num_attention_heads": 4, "rms_norm_eps": -1.0}, ValueError, "rms_norm_eps must be"),
        ({"num_attention_heads": 4, "rope_theta": 0.0}, ValueError, "rope_theta must be"),
        ({"num_attention_heads": 4.0}, TypeError, "num_attention_heads must be an int, got float"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, error, says, shapes_unchecked):
    with pytest.raises(error, match=says):
        LlamaConfig(**SIZES, **sizes)
