"""GPT-2, Llama 2 and 3, Qwen2 and Qwen3: the logits of transformers, and each weight moves these."""

import json

import pytest
import torch
from checkpoints import ARCHITECTURES, VOCAB, change_config, change_weights, logits, random_peer, save_random
from safetensors.torch import load_file

from pagewise.kv_cache import generate
from pagewise.models.gpt2 import GPT2, GPT2Config
from pagewise.models.llama import Llama, LlamaConfig
from pagewise.models.load import build_model, eos_token_ids, load_model

IDS = torch.randint(VOCAB, (2, 70), generator=torch.Generator().manual_seed(1))
POSITIONS = torch.arange(70).expand_as(IDS)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def saved(request, tmp_path_factory):
    """(name, transformers' model, our model that load_model made of its checkpoint)."""
    folder = tmp_path_factory.mktemp(request.param)
    peer = save_random(request.param, folder)
    return request.param, peer, load_model(folder)[0]


# ------------------------------------------------------------------------------------------------ against transformers


def test_logits_are_those_of_transformers(saved):
    _, peer, model = saved
    torch.testing.assert_close(logits(model, IDS), peer(IDS).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"activation_function": "gelu"},
        {"activation_function": "gelu_pytorch_tanh"},
        {"n_inner": 100},
        {"tie_word_embeddings": False},
        {"n_head": 4},
    ],
    ids=str,
)
def test_gpt2_with_other_settings_has_the_logits_of_transformers(options, tmp_path):
    peer = save_random("gpt2", tmp_path, **options)
    model, _ = load_model(tmp_path, dtype=torch.float64)
    torch.testing.assert_close(logits(model, IDS), peer.double()(IDS).logits, rtol=0, atol=1e-9)


def test_every_weight_moves_the_logits(saved):
    """By more than the tests above let pass: a model that ignored a weight, or took it elsewhere, would fail."""
    _, peer, _ = saved
    right = peer(IDS).logits
    for name, weight in peer.named_parameters():
        kept = weight.clone()
        weight.copy_(kept.roll(1, 0))
        assert (peer(IDS).logits - right).abs().max() > 3e-4, name
        weight.copy_(kept)


# ------------------------------------------------------------------------------------------------ forward


def test_logits_for_some_tokens_are_those_rows_of_all(saved):
    _, _, model = saved
    some = torch.tensor([69, 3, 3, 0])
    torch.testing.assert_close(logits(model, IDS, logits_for=some), logits(model, IDS)[:, some], rtol=0, atol=1e-5)
    assert logits(model, IDS, logits_for=some[:0]).shape == (2, 0, VOCAB)


ZEROS = torch.zeros(2, 3, dtype=torch.int64)
SAME = [  # what both models refuse: the arguments, the error, the message
    ({"token_ids": ZEROS + 61}, ValueError, "token_ids must be in .*vocab_size = 61.*61"),
    ({"token_ids": ZEROS - 1}, ValueError, "token_ids must be in .*-1"),
    ({"token_ids": ZEROS.float()}, TypeError, "token_ids must be int64 or int32, got float32"),
    ({"token_ids": ZEROS[0]}, ValueError, "token_ids must have 2 dimensions"),
    ({"token_ids": [[1]]}, TypeError, "token_ids must be a torch.Tensor"),
    ({"positions": ZEROS[:, :2]}, ValueError, r"positions must be \[B, T\] = \[2, 3\], got \[2, 2\]"),
    ({"positions": ZEROS[:1]}, ValueError, "positions must be"),
    ({"positions": ZEROS[0]}, ValueError, "positions must have 2 dimensions"),
    ({"positions": ZEROS.float()}, TypeError, "positions must be int64 or int32"),
    ({"positions": ZEROS.to("meta")}, ValueError, "positions must have the device of token_ids"),
    ({"attend": None}, TypeError, "attend must be a function"),
    ({"logits_for": torch.tensor([3])}, ValueError, r"logits_for must be in \[0, T = 3\), got 3 … 3"),
    ({"logits_for": torch.tensor([-1, 2])}, ValueError, r"logits_for must be in \[0, T = 3\), got -1 … 2"),
    ({"logits_for": torch.tensor([[1]])}, ValueError, "logits_for must have 1 dimensions"),
    ({"logits_for": torch.tensor([1.0])}, TypeError, "logits_for must be int64"),
    ({"logits_for": [1]}, TypeError, "logits_for must be a torch.Tensor"),
    ({"logits_for": torch.tensor([1]).to("meta")}, ValueError, "logits_for must have the device of token_ids"),
]
TRANSPOSED = {"attend": lambda layer, q, k, v: q.transpose(1, 2)}
RETURNED = r"attend returned must be \[B, H, T, D\] = \[2, 2, 3, 4\], got \[2, 3, 2, 4\]"
NOT_LEARNT = r"positions must be in \[0, max_position_embeddings = 4\), got"
REFUSED = [
    *((model, *row) for model in ("gpt2", "llama") for row in [*SAME, (TRANSPOSED, ValueError, RETURNED)]),
    *(("gpt2", {"positions": ZEROS + position}, ValueError, f"{NOT_LEARNT} {position}") for position in (4, -1)),
]
SMALL = {"gpt2": GPT2(GPT2Config(61, 8, 1, 2, 8, 4)), "llama": Llama(LlamaConfig(61, 8, 8, 1, 2))}


@pytest.mark.parametrize(("model", "wrong", "error", "says"), REFUSED)
def test_bad_input_is_refused_before_any_work(model, wrong, error, says, shapes_unchecked):
    calls = []
    right = {"token_ids": ZEROS, "positions": ZEROS + 3, "attend": lambda layer, q, k, v: calls.append(q) or q}
    assert SMALL[model](**right).shape == (2, 3, 61)
    calls.clear()
    with pytest.raises(error, match=says):
        SMALL[model](**right | wrong)
    assert not calls


def test_generation_from_a_cache_works_for_every_architecture(saved):
    """Lesson 2's loop needs a config's common names only."""
    _, _, model = saved
    assert generate(model, IDS[:, :9], 20).tolist() == generate(model, IDS[:, :9], 20, cached=False).tolist()


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"num_attention_heads": 3}, "hidden_size = 8 must be a multiple of num_attention_heads = 3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1"),
        ({"layer_norm_epsilon": -1.0}, "layer_norm_epsilon must be"),
        (
            {"activation_function": "relu"},
            "activation_function = 'relu' is not implemented: supported are 'gelu', 'gelu_new'",
        ),
    ],
)
def test_sizes_of_gpt2_that_do_not_fit_are_refused(sizes, says):
    with pytest.raises(ValueError, match=says):
        GPT2Config(**{"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2} | sizes)


def test_fresh_models_know_no_end_token():
    assert GPT2(GPT2Config(9, 8, 1, 2)).eos_token_ids == ()
    assert Llama(LlamaConfig(9, 8, 8, 1, 2)).eos_token_ids == ()


# ------------------------------------------------------------------------------------------------ how they are saved


def as_openai_saved_it(weights):
    """Without the prefix, and with the causal mask in each layer."""
    bare = {name.removeprefix("transformer."): weight for name, weight in weights.items()}
    for layer in range(2):
        bare[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 256, 256).tril()
        bare[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    return bare


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_checkpoint_in_many_files_is_loaded(architecture, tmp_path):
    peer = save_random(architecture, tmp_path, shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    torch.testing.assert_close(logits(load_model(tmp_path)[0], IDS), peer(IDS).logits, rtol=0, atol=1e-4)


def test_gpt2_is_loaded_with_and_without_prefix_masks_and_second_head(tmp_path):
    peer = save_random("gpt2", tmp_path)
    change_weights(tmp_path, as_openai_saved_it)
    torch.testing.assert_close(logits(load_model(tmp_path)[0], IDS), peer(IDS).logits, rtol=0, atol=1e-4)
    change_weights(tmp_path, lambda weights: weights | {"lm_head.weight": weights["wte.weight"].clone()})
    torch.testing.assert_close(logits(load_model(tmp_path)[0], IDS), peer(IDS).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("architecture", ["gpt2", "qwen2"])
def test_a_decoder_saved_without_its_tied_head_is_loaded(architecture, tmp_path):
    peer = random_peer(architecture)
    peer.base_model.save_pretrained(tmp_path)
    assert not any(name.startswith(("transformer.", "model.")) for name in load_file(tmp_path / "model.safetensors"))
    torch.testing.assert_close(logits(load_model(tmp_path)[0], IDS), peer(IDS).logits, rtol=0, atol=1e-4)


def test_a_window_that_no_layer_uses_is_fine(tmp_path):
    """As Qwen's own checkpoints say it."""
    save_random("qwen2", tmp_path)
    unused = {"layer_types": None, "use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1}
    change_config(tmp_path, **unused)
    load_model(tmp_path)
    change_config(tmp_path, use_sliding_window=True, max_window_layers=2)
    load_model(tmp_path)


PUBLISHED = {
    "GPT-2": {
        "model_type": "gpt2", "activation_function": "gelu_new", "layer_norm_epsilon": 1e-05, "n_ctx": 1024,
        "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257, "resid_pdrop": 0.1,
    },
    "Qwen2.5-0.5B": {
        "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864,
        "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "max_position_embeddings": 32768, "max_window_layers": 24, "sliding_window": 32768, "rope_theta": 1000000.0,
        "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "Qwen3-0.6B": {
        "model_type": "qwen3", "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
        "intermediate_size": 3072, "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
        "max_position_embeddings": 40960, "max_window_layers": 28, "sliding_window": None, "rope_scaling": None,
        "rms_norm_eps": 1e-06, "rope_theta": 1000000, "tie_word_embeddings": True, "use_sliding_window": False,
        "vocab_size": 151936,
    },
}  # fmt: skip
"""Of published checkpoints, what matters of config.json, written by transformers 2 to 4."""


@pytest.mark.parametrize(
    ("name", "parameters"), [("GPT-2", 124_439_808), ("Qwen2.5-0.5B", 494_032_768), ("Qwen3-0.6B", 596_049_920)]
)
def test_published_configs_give_models_of_the_published_size(name, parameters):
    with torch.device("meta"):
        model = build_model(PUBLISHED[name])
    assert sum(weight.numel() for weight in model.parameters()) == parameters
    if name != "GPT-2":
        assert model.config.rope_theta == 1e6


# ------------------------------------------------------------------------------------------------ end tokens


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        (None, 5, (5,)),
        (None, [5, 7], (5, 7)),
        (None, None, ()),
        ([3, 4], 5, (3, 4, 5)),
        (0, 5, (0, 5)),
        (5, [5, 6], (5, 6)),
    ],
)
def test_the_end_tokens_of_both_files_end_a_text(generation, config, ids, tmp_path):
    save_random("gpt2", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    change_config(tmp_path, eos_token_id=config)
    assert load_model(tmp_path)[0].eos_token_ids == ids
    if generation is None:
        (tmp_path / "generation_config.json").unlink()
        assert load_model(tmp_path)[0].eos_token_ids == ids


@pytest.mark.parametrize("wrong", ["<|endoftext|>", [1, "2"], -1, 1.5])
def test_end_tokens_that_are_none_are_refused(wrong):
    with pytest.raises(ValueError, match="eos_token_id must be a token id or a list of them, got"):
        eos_token_ids({"eos_token_id": wrong})


def test_the_sampling_parameters_of_a_checkpoint_are_read(tmp_path):
    save_random("gpt2", tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    assert load_model(tmp_path)[0].sampling_defaults == {}
    recommended = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.1}
    others = {"do_sample": True, "max_length": 20, "num_beams": 4, "transformers_version": "4.0.0"}
    (tmp_path / "generation_config.json").write_text(json.dumps(recommended | others))
    assert load_model(tmp_path)[0].sampling_defaults == recommended
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": None, "top_p": 0.5}))
    assert load_model(tmp_path)[0].sampling_defaults == {"top_p": 0.5}
