"""Mixed requests of every kind through small memories: each answer is that of its prompt alone.

The logits are four whole numbers, so most of them are equal, as those of a model in bfloat16 often are. `make
test-full` serves 5000 answers.
"""

import functools
import itertools
import random
from collections import Counter

import pytest
from covering import is_full
from exact_model import VOCAB, ExactModel, Job, continued
from test_pressure import Letters, Planted, assert_empty, assert_sound, broken

from pagewise.engine import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("shapes_unchecked")  # in thousands of calls; other tests check them


class Tied(ExactModel):
    """The exact model with logits 0, 1, 2 and 3 only."""

    def forward(self, token_ids, positions, attend, *, logits_for=None):
        return super().forward(token_ids, positions, attend, logits_for=logits_for).floor()


MODEL, LETTERS = Tied(), Letters()
KINDS = [
    {"temperature": 0},
    {},
    {"top_k": 5},
    {"top_k": 20, "top_p": 0.7},
    {"top_p": 0.5, "min_p": 0.1},
    {"n": 2, "top_k": 7},
    {"n": 3, "temperature": 1.5},
    {"beam_width": 3},
    {"repetition_penalty": 1.3, "top_p": 0.9},
    {"presence_penalty": 0.7, "frequency_penalty": -0.4, "temperature": 0},
    {"logit_bias": {3: 2.5, 9: -100.0}, "top_k": 9},
    {"logprobs": 3, "top_k": 12},
    {"min_tokens": 4, "stop_token_ids": (3, 11)},
    {"stop": ("ab", "k")},
    {"stop": ("q", 5), "min_tokens": 3, "n": 2},
]
LIMITS = [
    {"max_tokens": 4, "seed": 0},
    {"max_tokens": 9, "seed": 1},
    {"max_tokens": 13, "seed": 2},
    {"max_tokens": 12, "seed": 3, "ignore_eos": True},
]
ENGINES = {
    "paged": {},
    "no prefix cache": {"prefix_cache": False},
    "blocks of 1": {"num_blocks": 100, "block_size": 1},
    "drafts": {"speculate": 3},
    "a small budget, drafts": {"speculate": 2, "max_num_batched_tokens": 7},
    "dense": {"attention": "dense", "num_blocks": 30},
    "block tensors": {"attention": "block_tensors", "speculate": 1},
    "static": {"scheduler": "static"},
}
BEGINNINGS = [[draw * i % VOCAB for i in range(1, 25)] for draw in (3, 7, 7)]


def drawn_request(draw):
    """Return a prompt, many of which begin alike, and how it shall be continued."""
    prompt = draw.choice(BEGINNINGS)[: draw.choice([1, 5, 8, 23])] + draw.choice([[], [1]])
    return tuple(prompt), SamplingParams(**draw.choice(LIMITS), **draw.choice(KINDS))


@functools.cache
def roomy_engine():
    """Return an engine with enough memory, which serves one request after the other."""
    return LLM(MODEL, tokenizer=LETTERS, num_blocks=64, prefix_cache=False, scheduler="naive")


@functools.cache
def alone(prompt, sampling):
    """Return the choices and log p of a request that runs alone with enough memory, one step after the other."""
    (output,) = roomy_engine().generate([list(prompt)], sampling, progress=False)
    if sampling.beam_width == 1 and not sampling.stop_strings:  # by a loop that shares only `sample` with the engine
        jobs = [Job(prompt, sampling, i) for i in range(sampling.n)]
        assert [(c.token_ids, c.finish_reason) for c in output.choices] == continued(MODEL, jobs)
    return output.choices, output.logprobs


def serve_mixed(draw, options, num_answers):
    """Serve requests that come and go, some of them aborted, with steps that fail. Return the answers and the engine.

    Every answer is compared with that of its prompt alone, and what listeners heard with the answer.
    """
    llm = LLM(MODEL, tokenizer=LETTERS, **{"num_blocks": 18, "block_size": 4, "max_num_seqs": 6} | options)
    wanted, heard, ends, answers = {}, {}, Counter(), 0

    def hear(piece):
        ends[piece.request_id, piece.choice] += piece.finish_reason is not None
        ids, text = heard.get((piece.request_id, piece.choice), ([], ""))
        heard[piece.request_id, piece.choice] = ids + piece.token_ids, text + piece.text

    for step in itertools.count():
        assert step < 40 * num_answers + 1000
        while answers + len(wanted) < num_answers and len(wanted) < 12 and draw.random() < 0.6:
            prompt, sampling = drawn_request(draw)
            wanted[llm.add_request(list(prompt), sampling, listener=hear)] = prompt, sampling
        if wanted and draw.random() < 0.03:
            aborted = draw.choice(list(wanted))
            llm.abort(aborted)
            del wanted[aborted]
        outputs = []
        if draw.random() < 0.05:
            fault = draw.choice(["model", "write", "sampling", "resize", "fork", "commit", "admit"])
            with broken(llm, fault, Planted, draw.randrange(3)):
                try:
                    outputs = llm.step()
                except Planted:
                    assert_sound(llm)
        else:
            outputs = llm.step()
        for output in outputs:
            if output.request_id not in wanted:  # it had ended, but no step had returned it yet
                continue
            choices, logprobs = alone(*wanted.pop(output.request_id))
            assert output.choices == choices
            assert output.logprobs == logprobs
            assert [heard[output.request_id, i] for i in range(len(choices))] == [
                (c.token_ids, c.text) for c in choices
            ]
            answers += 1
        if step % 20 == 0:
            assert_sound(llm)
        if answers >= num_answers and not wanted:
            break
    while llm.has_unfinished:
        llm.step()
    assert_empty(llm)
    return llm


@pytest.mark.slow
@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_every_answer_is_that_of_its_prompt_alone(options):
    rarely = options.get("scheduler") == "static" or options.get("block_size") == 1  # preempted
    few = 40 if rarely else 24
    llm = serve_mixed(random.Random(repr(options)), options, 640 if is_full() else few)
    if options.get("attention") != "dense":
        assert llm.scheduler.num_preemptions > 0
