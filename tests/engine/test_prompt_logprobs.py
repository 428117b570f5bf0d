"""Log-probabilities of prompts are those of one pass over the prompt, however the engine computes it."""

import pytest
import torch
from checkpoints import logits
from serving import tiny_llm

from pagewise.engine import LLM, SamplingParams
from pagewise.models import tiny_model

pytestmark = pytest.mark.usefixtures("shapes_unchecked")
PROMPTS = ["Attention reads each block of keys where it is", "Attention reads each block of keys where it is not", "A"]


def expected(model, prompt):
    """Return log p of all tokens after each token of a prompt but the last."""
    return logits(model, torch.tensor([prompt])).log_softmax(dim=-1)[0, :-1]


def assert_right(output, model, number):
    prompt, found = output.prompt_token_ids, output.prompt_logprobs
    of_all = expected(model, prompt)
    assert len(found) == len(prompt) - 1
    for token, scores, right in zip(prompt[1:], found, of_all, strict=True):
        assert next(iter(scores)) == token
        likeliest = right.topk(number).indices.tolist()
        assert set(scores) == {token, *likeliest}
        assert scores == pytest.approx({one: right[one].item() for one in scores}, abs=1e-4)


SMALL = {"num_blocks": 14, "block_size": 8, "max_num_batched_tokens": 9}
WAYS = [
    ({}, 0),
    ({}, 1),
    ({"max_num_batched_tokens": 7}, 0),
    ({"max_num_batched_tokens": 7}, 4),
    (SMALL, 20),  # some are preempted
    ({"scheduler": "naive"}, 1),
    ({"attention": "dense"}, 4),
    ({"speculate": 3}, 8),
]
LONGEST = 20


def plain(max_tokens):
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def alone():
    """Return what follows each prompt in an engine that scores none."""
    with torch.inference_mode():
        return tiny_llm().generate(PROMPTS, plain(LONGEST))


@pytest.mark.parametrize(("options", "max_tokens"), WAYS, ids=str)
def test_log_p_of_a_prompt_are_those_of_one_pass(alone, options, max_tokens):
    llm = tiny_llm(**options)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, prompt_logprobs=3, ignore_eos=True)
    mixed = llm.generate(PROMPTS * 2, [sampling] * 3 + [plain(max_tokens or 1)] * 3)
    assert (llm.scheduler.num_preemptions > 0) == (options == SMALL)
    for output, other, innocent in zip(mixed[:3], mixed[3:], alone, strict=True):
        assert_right(output, llm.model, 3)
        assert output.token_ids == innocent.token_ids[:max_tokens]
        assert output.finish_reason == "length"
        assert other.token_ids == innocent.token_ids[: max_tokens or 1]
        assert other.prompt_logprobs is None
    assert not llm.scheduler.running
    for output in llm.generate(PROMPTS[:1], SamplingParams(max_tokens=0, prompt_logprobs=3)):
        assert_right(output, llm.model, 3)
        assert not output.num_cached_tokens  # although the prefix cache has them


def test_a_prompt_that_fills_the_context_is_scored_if_nothing_is_drawn():
    llm = tiny_llm(max_model_len=64)
    prompt = list(b"A page table maps pages to frames, a block table maps blocks    ")
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert (len(output.prompt_logprobs), output.token_ids, output.text) == (63, [], "")
    assert [len(scores) for scores in output.prompt_logprobs] == [1] * 63
    with pytest.raises(ValueError, match="max_tokens = 1 exceed the model's context of 64 tokens"):
        llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=0))


def test_several_samples_have_one_scored_prompt():
    llm = tiny_llm(max_num_batched_tokens=16)
    (output,) = llm.generate(
        [PROMPTS[0]], SamplingParams(max_tokens=4, n=3, seed=1, prompt_logprobs=2, ignore_eos=True)
    )
    assert_right(output, llm.model, 2)
    (alone,) = tiny_llm().generate([PROMPTS[0]], SamplingParams(max_tokens=4, n=3, seed=1, ignore_eos=True))
    assert [choice.token_ids for choice in output.choices] == [choice.token_ids for choice in alone.choices]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"prompt_logprobs": -1}, "prompt_logprobs must be"),
        ({"prompt_logprobs": 1.5}, "prompt_logprobs must be"),
        ({"prompt_logprobs": 0, "beam_width": 2}, "prompt_logprobs = 0 with beam_width = 2"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": -1, "prompt_logprobs": 0}, "max_tokens must be at least 0"),
    ],
    ids=str,
)
def test_what_cannot_be_scored_is_refused(fields, why):
    with pytest.raises((TypeError, ValueError), match=why):
        SamplingParams(**fields)


# ------------------------------------------------------------------------------------------------ max_model_len


def test_no_sequence_is_longer_than_max_model_len():
    model, tokenizer = tiny_model()
    llm = LLM(model, tokenizer=tokenizer, max_model_len=40)
    assert llm.memory.num_blocks <= 64 * 3  # 64 sequences of 3 blocks, however much memory is free
    (output,) = llm.generate(["A" * 30], SamplingParams(max_tokens=10, ignore_eos=True))
    assert len(output.token_ids) == llm.max_new_tokens("A" * 30) == 10
    with pytest.raises(ValueError, match="a prompt of 30 tokens and max_tokens = 11 exceed the model's context of 40"):
        llm.generate(["A" * 30], SamplingParams(max_tokens=11))


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "9", 513])
def test_a_max_model_len_that_is_no_length_of_the_model_is_refused(value):
    with pytest.raises((TypeError, ValueError), match="max_model_len"):
        tiny_llm(max_model_len=value)
