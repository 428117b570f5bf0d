"""Mistral is a Llama in which a token sees the last `sliding_window` tokens: the tokens are those of transformers."""

from dataclasses import replace

import pytest
import torch
from checkpoints import change_config, logits, save_random

from pagewise.engine import LLM, SamplingParams
from pagewise.kv_cache import generate
from pagewise.models import load_model

pytestmark = pytest.mark.usefixtures("shapes_unchecked")
WINDOW, NUM_TOKENS = 8, 16
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """Return the folder of a checkpoint, prompts, and the tokens that transformers writes after each."""
    folder = tmp_path_factory.mktemp("mistral")
    peer = save_random("mistral", folder, sliding_window=WINDOW)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(97, (length,), generator=generator).tolist() for length in (17, 1, 40, 40)]
    prompts[3][:32] = prompts[2][:32]  # so that the prefix cache has something
    texts = [
        peer.generate(torch.tensor([prompt]), do_sample=False, pad_token_id=0, max_new_tokens=NUM_TOKENS)[0].tolist()
        for prompt in prompts
    ]
    return folder, prompts, [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"block_size": 4, "max_num_batched_tokens": 11},
        {"scheduler": "naive", "speculate": 3},
        {"num_blocks": 12, "block_size": 8},
    ],
    ids=str,
)
def test_tokens_are_those_of_transformers(case, options):
    folder, prompts, texts = case
    llm = LLM(load_model(folder)[0], **{"num_blocks": 64, "backend": "torch"} | options)
    for _ in range(2):
        assert [output.token_ids for output in llm.generate(prompts, GREEDY)] == texts


@pytest.mark.slow
def test_tokens_of_tritons_kernels_are_those_of_transformers(case, kernel_device):
    folder, prompts, texts = case
    llm = LLM(load_model(folder, device=kernel_device)[0], num_blocks=64, backend="triton")
    short = SamplingParams(max_tokens=3, temperature=0.0)
    assert [output.token_ids for output in llm.generate(prompts[:2], short)] == [text[:3] for text in texts[:2]]


def test_the_window_matters(case):
    folder, prompts, texts = case
    model, _ = load_model(folder)
    whole = LLM(type(model)(replace(model.config, sliding_window=None)), num_blocks=64)
    whole.model.load_state_dict(model.state_dict())
    assert [output.token_ids for output in whole.generate(prompts, GREEDY)] != texts


@pytest.mark.parametrize("window", [None, 256, 300])
def test_without_a_window_below_the_context_it_is_a_llama(tmp_path, window):
    peer = save_random("mistral", tmp_path, sliding_window=window)
    model, _ = load_model(tmp_path)
    assert model.config.sliding_window is None
    ids = torch.arange(30)[None]
    torch.testing.assert_close(logits(model, ids), peer(ids).logits, rtol=1e-4, atol=1e-4)
    assert LLM(model, num_blocks=8, attention="dense").generate([[1, 2, 3]], GREEDY)


def test_what_does_not_apply_the_window_is_refused(case):
    folder, prompts, _ = case
    model, _ = load_model(folder)
    for options, why in (
        ({"attention": "dense"}, 'attention = "dense"'),
        ({"attention": "block_tensors"}, 'attention = "block_tensors"'),
        ({"backend": "cuda"}, 'backend = "cuda"'),
    ):
        with pytest.raises(ValueError, match=f"{why} does not support sliding_window = 8 of the model"):
            LLM(model, num_blocks=8, **options)
    with pytest.raises(ValueError, match=r"attend.sliding_window must be 8, the model's, got None"):
        generate(model, torch.tensor([prompts[0]]), 1)


@pytest.mark.parametrize(
    ("without", "changes", "why"),
    [
        ((), {"sliding_window": 0}, "sliding_window must be at least 1"),
        ((), {"sliding_window": "8"}, "sliding_window must be an int"),
        ((), {"layer_types": ["full_attention", "sliding_attention"]}, "layers of 'full_attention' are not"),
        (
            (),
            {"sliding_window": None, "layer_types": ["sliding_attention"] * 2},
            "layers of 'sliding_attention' are not",
        ),
        (("num_key_value_heads",), {}, "config.json lacks num_key_value_heads"),
        (("max_position_embeddings",), {}, "config.json lacks max_position_embeddings"),
        ((), {"attention_bias": True}, "attention_bias"),
        ((), {"hidden_act": "gelu"}, "hidden_act"),
    ],
    ids=str,
)
def test_a_mistral_that_is_not_implemented_is_refused(tmp_path, without, changes, why):
    save_random("mistral", tmp_path)
    change_config(tmp_path, *without, **changes)
    with pytest.raises((TypeError, ValueError), match=why):
        load_model(tmp_path)


def test_a_config_without_a_window_has_transformers_default(tmp_path):
    save_random("mistral", tmp_path, max_position_embeddings=5000)
    change_config(tmp_path, "sliding_window")
    assert load_model(tmp_path)[0].config.sliding_window == 4096
