"""attn_implementation="pagewise": transformers' models give what they give with "eager", in training and generation."""

import copy
import importlib.util
import itertools
import sys

import pytest
import torch

from conftest import assert_as_accurate_as_naive
from pagewise.flash_attention import flash_attention, in_transformers
from pagewise.flash_attention.in_transformers import attend, visible_keys
from pagewise.models import register_attention

WINDOW = 4
TOKENS = {
    "vocab_size": 61, "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
    "initializer_range": 0.3,
}  # fmt: skip
SIZES = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
CONFIGS = {
    "llama": ("LlamaConfig", SIZES),
    "gpt2": ("GPT2Config", {
        "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }),
    "gemma2": ("Gemma2Config", SIZES | {
        "sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 3,
    }),
}  # fmt: skip
LENGTHS = (11, 5, 1)


# All workers of a run collect this module, and transformers takes three seconds: it is imported when a test needs it.
@pytest.fixture(scope="module", autouse=True)
def registered():
    register_attention()


def model_of(name, **options):
    import transformers

    torch.manual_seed(0)
    make_config, sizes = CONFIGS[name]
    config = getattr(transformers, make_config)(**TOKENS, **sizes)
    for option, value in options.items():
        setattr(config, option, value)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def batch(side):
    """Token ids [3, 11] and which of them are there: padded on one side, or (None) not at all."""
    ids = torch.randint(3, 61, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(1))
    there = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    there = {"right": there, "left": there.flip(1), None: torch.ones_like(there)}[side]
    return ids.where(there, 0), there


def logits(model, side):
    """Logits of the tokens that are there, in a batch; in float64 from each sequence alone, which needs no padding."""
    ids, there = batch(side)
    if model.dtype == torch.float64:
        return torch.cat([model(sequence[mask][None]).logits[0] for sequence, mask in zip(ids, there, strict=True)])
    positions = (there.cumsum(1) - 1).clamp(min=0)
    return model(ids, attention_mask=there.long(), position_ids=positions).logits[there]


def loss(model, side, **options):
    """The mean over all tokens that are there and have one before them, in a batch or alone, as `logits`."""
    ids, there = batch(side)
    if model.dtype == torch.float64:
        alone = [sequence[mask][None] for sequence, mask in zip(ids, there, strict=True)]
        return sum(model(tokens, labels=tokens, num_items_in_batch=sum(LENGTHS) - 3).loss for tokens in alone)
    return model(ids, attention_mask=there.long(), labels=ids.where(there, -100), **options).loss


def with_each(model, run):
    """`run(model)` with pagewise, and what the policy holds it against: eager in float64 and in the model's dtype."""
    exact = run(copy.deepcopy(model).double())
    naive = run(copy.deepcopy(model))
    model.set_attn_implementation("pagewise")
    return run(model), exact, naive


# ------------------------------------------------------------------------------------------------ what models give


@pytest.mark.slow
@pytest.mark.parametrize("side", ["right", "left", None])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_eager(name, side):
    assert_as_accurate_as_naive(*with_each(model_of(name), lambda model: logits(model, side)))


@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_all_gradients_are_those_of_eager(name):
    def run(model):
        found = loss(model, "right")
        found.backward()
        return [found, *(parameter.grad for parameter in model.parameters())]

    for out, exact, naive in zip(*with_each(model_of(name), run), strict=True):
        assert_as_accurate_as_naive(out.flatten(), exact.flatten(), naive.flatten(), factor=3)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", CONFIGS)
def test_generation_is_that_of_eager_token_for_token(name, cache):
    ids, there = batch("left")
    model, options = model_of(name), {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache}
    expected = model.generate(ids, attention_mask=there.long(), **options)
    model.set_attn_implementation("pagewise")
    assert model.generate(ids, attention_mask=there.long(), **options).equal(expected)
    assert expected[:, ids.shape[1] :].unique().numel() > 5  # not one token all over


@pytest.mark.parametrize(("cache", "sizes"), [("DynamicCache", {}), ("StaticCache", {"max_cache_len": 16})])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_several_tokens_after_those_in_a_cache(name, cache, sizes):
    """Queries fewer than keys; with a static cache, keys beyond the last query too, which are no keys yet."""
    import transformers

    ids, _ = batch(None)

    def run(model):
        past = getattr(transformers, cache)(config=model.config, **sizes)
        return torch.cat([model(part, past_key_values=past).logits for part in ids.split((5, 4, 2), dim=1)], dim=1)

    assert_as_accurate_as_naive(*with_each(model_of(name), run))


def test_packed_sequences_do_not_see_each_other():
    ids, _ = batch(None)
    positions = torch.cat([torch.arange(7), torch.arange(4)])[None].expand_as(ids)
    model = model_of("llama")
    model.set_attn_implementation("pagewise")
    packed = model(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(packed[:, :7], model(ids[:, :7]).logits)
    torch.testing.assert_close(packed[:, 7:], model(ids[:, 7:]).logits)


@pytest.mark.parametrize("side", ["right", None])
def test_a_model_that_looks_both_ways(side):
    model = model_of("llama", is_causal=False)
    assert_as_accurate_as_naive(*with_each(model, lambda model: logits(model, side)))


@pytest.mark.parametrize("name", CONFIGS)
def test_under_autocast_errors_are_those_of_eager(name):
    def run(model):
        with torch.autocast("cpu", torch.bfloat16, enabled=model.dtype != torch.float64):
            return logits(model, "right")

    assert_as_accurate_as_naive(*with_each(model_of(name), run))


def test_autocast_rounds_what_is_given_and_nothing_that_is_computed():
    q, k, v = qkv()
    expected, _ = attend(torch.nn.Module(), *(x.bfloat16() for x in (q, k, v)), None)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = attend(torch.nn.Module(), q, k, v.bfloat16(), None)  # as rotary embeddings leave them
    assert out.dtype == torch.bfloat16
    assert out.equal(expected)


# ------------------------------------------------------------------------------------------------ dropout


def gradients(model, seed):
    model.zero_grad()
    torch.manual_seed(seed)
    loss(model, "right", use_cache=False).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of the method's new name, which transformers 5.0 lacks
@pytest.mark.parametrize(("name", "option"), [("llama", "attention_dropout"), ("gpt2", "attn_pdrop")])
def test_checkpointing_recomputes_with_the_same_dropout(name, option):
    model = model_of(name, **{option: 0.3})
    model.set_attn_implementation("pagewise")
    without = gradients(model, seed=1)
    model.train()
    dropped = gradients(model, seed=1)
    assert not dropped.allclose(without)
    assert not dropped.allclose(gradients(model, seed=2))
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        assert gradients(model, seed=1).equal(dropped)


# ------------------------------------------------------------------------------------------------ the mask

MASKS = {
    "causal": ("causal_mask_function", None),
    "window": ("sliding_window_causal_mask_function", WINDOW),
    "chunk": ("chunked_causal_mask_function", WINDOW, torch.zeros(2, dtype=torch.int64)),
}


def written_out(mask, T, S):
    """Return the mask [B, 1, T, S] that `attend` makes of a mask."""
    if mask is not None and mask.dim() == 4:
        return mask
    causal = torch.ones(T, S, dtype=torch.bool).tril(S - T).expand(2, 1, T, S)
    return causal if mask is None else causal & mask[:, None, None, :]


@pytest.mark.parametrize("kind", MASKS)
def test_masks_say_what_those_of_sdpa_say(kind):
    from transformers import masking_utils

    name, local_size, *more = MASKS[kind]
    function = getattr(masking_utils, name)
    function = function(local_size, *more) if local_size else function
    forms = set()
    for q_offset, T, kv_offset, free, padded in itertools.product((0, 2, 5), (1, 3), (0, 2), (0, 4), (False, True)):
        S = q_offset + T - kv_offset + free  # free: places of a static cache that no token has taken yet
        if S < T:
            continue
        there = torch.ones(2, q_offset + T, dtype=torch.bool)
        there[0, : kv_offset + 1] = not padded
        options = {"mask_function": function, "attention_mask": there, "local_size": local_size}
        where = (2, T, S, q_offset, kv_offset)
        mask = visible_keys(*where, **options)
        expected = masking_utils.sdpa_mask(*where, **options, allow_is_causal_skip=False).expand(2, 1, T, S)
        assert written_out(mask, T, S).equal(expected), where
        forms.add(None if mask is None else mask.dim())
    assert forms == {None, 2, 4}


def test_a_mask_is_as_small_as_can_be():
    padded = torch.tensor([[True] * 5, [False] * 2 + [True] * 3])
    assert visible_keys(2, 5, 5, attention_mask=torch.ones(2, 5, dtype=torch.bool)) is None
    assert visible_keys(2, 5, 5, attention_mask=padded).equal(padded)
    assert visible_keys(2, 2, 4, 3, 1, attention_mask=padded).equal(padded[:, 1:])
    for whole in ({"local_size": 4}, {"allow_is_causal_skip": False}, {"q_offset": torch.tensor(0)}):
        assert visible_keys(2, 5, 5, **whole, attention_mask=padded).shape == (2, 1, 5, 5)


# ------------------------------------------------------------------------------------------------ what is refused


def qkv():
    return torch.randn(3, 2, 4, 5, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("what", "given"),
    [
        ("s_aux", torch.zeros(4)),
        ("position_bias", torch.zeros(1, 4, 5, 5)),
        ("head_mask", torch.ones(4)),
        ("output_attentions", True),
        ("cu_seq_lens_q", torch.tensor([0, 5])),
    ],
)
def test_what_it_does_not_know_is_refused_by_name(what, given):
    with pytest.raises(ValueError, match=f"does not know {what}"):
        attend(torch.nn.Module(), *qkv(), None, **{what: given})
    attend(torch.nn.Module(), *qkv(), None, **{what: None}, position_ids=torch.arange(5), use_cache=True)


def test_a_model_asked_for_its_attentions_refuses():
    model = model_of("llama")
    model.set_attn_implementation("pagewise")
    with pytest.raises(ValueError, match='use attn_implementation="eager" to look at them'):
        model(batch(None)[0], output_attentions=True)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        *((name, ValueError, "name must not be that of another") for name in ("eager", "sdpa", "flash_attention_2")),
        (None, TypeError, "name must be a string, got NoneType"),
    ],
)
def test_names_that_are_refused(name, error, message, shapes_unchecked):
    with pytest.raises(error, match=message):
        register_attention(name)


def test_any_other_name_will_do_and_twice():
    from transformers import AttentionInterface

    for _ in range(2):
        register_attention("by the page")
    assert AttentionInterface()["by the page"] is attend


def test_without_transformers_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    spec = importlib.util.spec_from_file_location("without", in_transformers.__file__)
    without = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(without)  # which needs no transformers yet
    with pytest.raises(ImportError, match=r"pip install 'attention-page-by-page\[models\]'"):
        without.register_attention()


# ------------------------------------------------------------------------------------------------ how it attends


def test_the_output_lies_as_models_reshape_it():
    out, weights = attend(torch.nn.Module(), *qkv(), None)
    assert out.shape == (2, 5, 4, 8)
    assert out.is_contiguous()
    assert weights is None


def test_a_window_without_a_mask_is_kept():
    q, k, v = qkv()
    visible = torch.ones(5, 5, dtype=torch.bool).tril().triu(-1).expand(2, 1, 5, 5)
    windowed, _ = attend(torch.nn.Module(), q, k, v, None, sliding_window=2)
    torch.testing.assert_close(windowed, attend(torch.nn.Module(), q, k, v, visible, sliding_window=2)[0])


def test_a_mask_with_a_row_per_query_may_show_later_keys():
    """A prefix of three tokens that see each other: the mask alone says so, although the model is causal."""
    q, k, v = qkv()
    visible = (torch.ones(5, 5, dtype=torch.bool).tril() | (torch.arange(5) < 3)).expand(2, 1, 5, 5)
    out, _ = attend(torch.nn.Module(), q, k, v, visible)
    torch.testing.assert_close(out.transpose(1, 2), flash_attention(q, k, v, attn_mask=visible))
