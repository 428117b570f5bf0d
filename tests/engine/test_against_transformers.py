"""The engine writes the same tokens as transformers: greedily on every scheduler and backend, and with beams.

Equal tokens can be expected only if transformers' choice is clear. They prove something only if a mistake would change
them. The first test asserts both for the texts.
"""

from typing import NamedTuple

import pytest
import torch
from checkpoints import ARCHITECTURES, VOCAB, random_peer, save_random
from covering import in_turns, one_in_three
from torch import Tensor, nn

from pagewise.engine import LLM, SamplingParams
from pagewise.models import load_model

NUM_TOKENS = 64
LENGTHS = (17, 1, 40)
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)


def random_prompts(lengths=LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]


def written(peer, prompt: list[int], **options) -> tuple[list[int], Tensor]:
    """Return the tokens that transformers writes after a prompt, and its logits before each token [tokens, vocab]."""
    ids = torch.tensor([prompt])
    fixed = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True}
    out = peer.generate(ids, attention_mask=torch.ones_like(ids), **{"max_new_tokens": NUM_TOKENS} | fixed | options)
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits)


class Case(NamedTuple):
    """An architecture, its model here, and the tokens that transformers writes with it."""

    architecture: str
    peer: nn.Module
    model: nn.Module
    prompts: list[list[int]]
    texts: list[list[int]]
    logits: list[Tensor]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def case(request, tmp_path_factory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    peer = save_random(request.param, folder)
    prompts = random_prompts()
    texts, logits = zip(*(written(peer, prompt) for prompt in prompts), strict=True)
    return Case(request.param, peer, load_model(folder)[0], prompts, list(texts), list(logits))


# ------------------------------------------------------------------------------------------------ greedy


def test_what_is_compared_is_worth_comparing(case):
    """No text repeats itself, another first token soon changes the whole text, and no token is a close call."""
    cases = [*zip(case.prompts, case.texts, case.logits, strict=True)]
    for prompt, text, logits in one_in_three(cases, [*ARCHITECTURES].index(case.architecture)):
        assert len(text) == NUM_TOKENS
        assert len(set(text)) >= 20
        assert len(set(text[32:])) >= 12
        other, _ = written(case.peer, [(prompt[0] + 1) % VOCAB, *prompt[1:]], max_new_tokens=32)
        assert sum(a != b for a, b in zip(text, other, strict=False)) >= 24
        best, second = logits.topk(2).values.unbind(-1)
        assert (best - second).min() > 5e-4


SCHEDULERS = ["naive", "static", "continuous"]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_greedy_tokens_are_those_of_transformers(case, scheduler, shapes_unchecked):
    """Paged and dense attention take turns, so that every architecture and every scheduler meets both."""
    turn = [*ARCHITECTURES].index(case.architecture) + SCHEDULERS.index(scheduler)
    attention = ("paged", "dense")[turn % 2]
    llm = LLM(case.model, num_blocks=64, scheduler=scheduler, attention=attention, backend="torch")
    assert [output.token_ids for output in llm.generate(case.prompts, GREEDY)] == case.texts


def test_chunked_and_preempted_requests_write_the_same(case, shapes_unchecked):
    """22 blocks of 8 tokens for 250 tokens in all, and prompts in pieces of 16."""
    llm = LLM(case.model, num_blocks=22, block_size=8, max_num_batched_tokens=16, backend="torch")
    assert [output.token_ids for output in llm.generate(case.prompts, GREEDY)] == case.texts
    assert llm.scheduler.num_preemptions > 0


def test_log_probabilities_are_those_of_transformers(case, shapes_unchecked):
    llm = LLM(case.model, num_blocks=64, backend="torch")
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, logprobs=VOCAB)
    for output, logits in zip(llm.generate(case.prompts, params), case.logits, strict=True):
        (ours,) = output.logprobs
        ours = torch.tensor([[step[token] for token in range(VOCAB)] for step in ours])
        torch.testing.assert_close(ours, logits.log_softmax(-1), rtol=0, atol=1e-4)
        assert output.choices[0].score == pytest.approx(float(ours.amax(-1).sum()), abs=1e-3)


KERNELS = [(backend, attention) for attention in ("paged", "dense") for backend in ("triton", "cuda")]
WAYS = [("gpt2", "continuous"), ("llama-3", "naive"), ("gpt2", "static"), ("llama-3", "continuous"), ("gpt2", "naive")]


# Each kind of attention in two of the ways, and with PAGEWISE_FULL=1 in all.
@pytest.mark.slow
@pytest.mark.parametrize(("kernels", "way"), dict.fromkeys(in_turns(KERNELS * 2, WAYS)), ids=str)
def test_kernels_write_the_same(kernels, way, tmp_path, kernel_device):
    """On the CPU kernels are slow: two prompts of a few tokens, the longer one in chunks."""
    (backend, attention), (architecture, scheduler) = kernels, way
    peer = save_random(architecture, tmp_path)
    model, _ = load_model(tmp_path, device=kernel_device)
    prompts = random_prompts((11, 3))
    kind = {"backend": backend, "attention": attention, "scheduler": scheduler}
    llm = LLM(model, num_blocks=16, block_size=8, max_num_batched_tokens=8, **kind)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=5, temperature=0.0))
    assert [output.token_ids for output in outputs] == [written(peer, p, max_new_tokens=5)[0] for p in prompts]


@pytest.mark.slow
@pytest.mark.parametrize("num_ends", [1, 3])
@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_end_tokens_and_repetition_penalty_are_those_of_transformers(num_ends, penalty, tmp_path, shapes_unchecked):
    """The end tokens are those of generation_config.json. Each of them ends one of the texts half-way."""
    peer, prompts = random_peer("qwen2"), random_prompts()
    options = {"repetition_penalty": penalty, "max_new_tokens": 40}
    ends = [written(peer, prompt, **options)[0][20] for prompt in prompts[:num_ends]]
    peer = save_random("qwen2", tmp_path, eos_token_id=ends)
    texts = [written(peer, prompt, **options)[0] for prompt in prompts]
    params = SamplingParams(max_tokens=40, temperature=0.0, repetition_penalty=penalty)
    outputs = LLM(load_model(tmp_path)[0], num_blocks=64, backend="torch").generate(prompts, params)
    assert [output.token_ids for output in outputs] == texts
    ended = [text[-1] in ends for text in texts]
    assert [output.finish_reason == "stop" for output in outputs] == ended
    assert sum(ended) >= num_ends


# ------------------------------------------------------------------------------------------------ beams


def found_beams(peer, prompt: list[int], width: int, **options) -> list[tuple[list[int], float]]:
    """Return transformers' beams: their tokens without padding, and their scores."""
    ids = torch.tensor([prompt])
    fixed = {"do_sample": False, "length_penalty": 1.0, "early_stopping": False, "pad_token_id": 0}
    out = peer.generate(
        ids, attention_mask=torch.ones_like(ids), num_beams=width, num_return_sequences=width, **fixed,
        return_dict_in_generate=True, output_scores=True, **options,
    )  # fmt: skip
    lengths = (out.beam_indices >= 0).sum(dim=1).tolist()
    starts = [sequence[len(prompt) :].tolist() for sequence in out.sequences]
    return [
        (start[:length], score)
        for start, length, score in zip(starts, lengths, out.sequences_scores.tolist(), strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "width", "ends", "penalty"),
    [
        ("gpt2", 2, [], 1.0),
        ("qwen3", 4, [3], 1.0),
        ("llama-3", 4, [], 1.3),
        ("gpt2", 5, [3, 8, 20, 40, 41, 60, 61, 62], 1.2),
        ("qwen3", 3, list(range(0, 90, 2)), 1.0),
    ],
)
def test_beams_are_those_of_transformers(architecture, width, ends, penalty, tmp_path, shapes_unchecked):
    peer = save_random(architecture, tmp_path, eos_token_id=ends or None)
    prompts = random_prompts((1, 5, 17, 40))
    llm = LLM(load_model(tmp_path)[0], num_blocks=128, block_size=4, backend="torch")
    params = SamplingParams(max_tokens=20, beam_width=width, repetition_penalty=penalty)
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        theirs = found_beams(peer, prompt, width, max_new_tokens=20, repetition_penalty=penalty)
        assert [choice.token_ids for choice in output.choices] == [tokens for tokens, _ in theirs]
        assert [choice.score for choice in output.choices] == pytest.approx([score for _, score in theirs], abs=1e-4)
        assert len(output.choices) == width
