"""Speculation: the same tokens in fewer steps, whatever the drafts, the memory and the way to serve."""

import contextlib
import functools
import itertools
import random
from unittest import mock

import pytest
import torch
from covering import in_turns
from engine_cases import for_backend
from exact_model import VOCAB, ExactModel, Job, continued
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from test_pressure import (
    NARROW,
    WALK,
    AnyOrder,
    Letters,
    Planted,
    assert_empty,
    assert_failures_of_the_tokenizer_end_their_sequences,
    assert_right,
    assert_sound,
    broken,
    finished,
    requests,
)

from pagewise.engine import LLM, SamplingParams, scheduler
from pagewise.engine.model_runner import DecodeGraphs
from pagewise.engine.request import Request, Sequence
from pagewise.engine.sampling_params import Pick
from pagewise.engine.speculation import Drafter
from pagewise.models import tiny_model
from pagewise.paged_blocks.prefix_cache import TokenBlocks

MODEL = ExactModel()
TINY, TOKENIZER = tiny_model()
REPETITIVE = "The block table maps blocks. " * 4

pytestmark = pytest.mark.usefixtures("shapes_unchecked")  # in thousands of calls; other tests check them


def engine(num_blocks=64, block_size=8, speculate=4, **options):
    return LLM(MODEL, num_blocks=num_blocks, block_size=block_size, speculate=speculate, **options)


class Planned:
    """A drafter that knows how its sequence goes on, and that is wrong from a draft on that it chooses at random."""

    known: dict[tuple[int, ...], list[int]] = {}  # noqa: RUF012  the first tokens of a sequence → all its tokens
    numbers = itertools.count()

    def __init__(self, tokens):
        self.tokens, self.random = tokens, random.Random(next(self.numbers))

    def draft(self, most):
        done = len(self.tokens)
        (whole, *_) = [whole for whole in self.known.values() if whole[:done] == self.tokens] or [[]]
        right = whole[done : done + most]
        drafts = right + [self.random.randrange(VOCAB) for _ in range(most - len(right))]
        wrong = self.random.randrange(most + 2)
        return tuple(token if i < wrong else (token + 1) % VOCAB for i, token in enumerate(drafts))


@pytest.fixture
def planned(monkeypatch):
    """Let sequences of [(prompt, sampling)] be drafted for with the tokens that they will have, some of them wrong."""
    monkeypatch.setattr("pagewise.engine.scheduler.Drafter", Planned)
    monkeypatch.setattr(Planned, "known", {})
    monkeypatch.setattr(Planned, "numbers", itertools.count())

    def expect(drawn):
        jobs = [Job(tuple(prompt), sampling, choice) for prompt, sampling in drawn for choice in range(sampling.n)]
        for job, (ids, _) in zip(jobs, continued(MODEL, jobs), strict=True):
            Planned.known[(*job.prompt, *ids[:1], job.choice)] = [*job.prompt, *ids]

    return expect


def greedy(max_tokens, **options):
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, **options)


def serve(llm, drawn, expect):
    expect(drawn)
    return {llm.add_request(prompt, sampling): sampling for prompt, sampling in drawn}


# ------------------------------------------------------------------------------------------ drafts


@pytest.mark.parametrize(
    ("tokens", "most", "drafts"),
    [
        ([1, 2, 3, 4], 3, ()),
        ([5], 3, ()),
        ([1, 2, 3, 9, 8, 1, 2, 3], 2, (9, 8)),
        ([7, 3, 4, 5, 3, 6, 7, 3], 1, (4,)),  # (7, 3) matches longer than the later 3
        ([1, 2, 6, 1, 2, 7, 1, 2], 1, (7,)),  # of equal matches the latest
        ([0, 4, 4], 4, (4, 4, 4, 4)),  # what follows is repeated
        ([1, 2, 3, 1, 2, 3, 1], 5, (2, 3, 1, 2, 3)),
    ],
)
def test_drafts_are_what_followed_the_latest_of_the_longest_matches(tokens, most, drafts):
    assert Drafter(tokens).draft(most) == drafts


def test_a_drafter_whose_tokens_grow_drafts_as_one_that_sees_them_all():
    draw = random.Random(0)
    tokens = []
    growing = Drafter(tokens)
    for _ in range(300):
        tokens += draw.choices(range(4), k=draw.randrange(1, 4))
        assert growing.draft(5) == Drafter(tokens.copy()).draft(5)


def test_a_draft_looks_at_a_bounded_number_of_places():
    """Where one token is frequent, and the others never come again."""
    tokens = [token for i in range(1, 5000) for token in (i, 0)]
    drafter = Drafter(tokens)
    drafter.draft(1)
    drafter._earlier = mock.MagicMock(wraps=drafter._earlier, __len__=lambda _: len(tokens))
    drafter._earlier.__getitem__.side_effect = lambda at: -2 + at if at >= 0 else len(tokens) - 3
    assert drafter.draft(1) == (4999,)
    assert drafter._earlier.__getitem__.call_count < 100


@pytest.mark.parametrize(
    ("tokens", "drafts", "ends", "longest", "kept", "right", "reason"),
    [
        ((4, 5, 6), (4, 5), (), 9, [4, 5, 6], 2, None),
        ((4, 5, 6), (4, 0), (), 9, [4, 5], 1, None),
        ((4, 5, 6), (0, 5), (), 9, [4], 0, None),
        ((4,), (), (), 9, [4], 0, None),
        ((4, None, 6), (4, 5), (), 9, [4], 1, "error"),
        ((0, None, 6), (4, 5), (), 9, [0], 0, None),  # what follows a wrong draft is not looked at
        ((4, 5, 6), (4, 5), (4,), 9, [4], 1, "stop"),
        ((4, 5, 6), (4, 0), (5,), 9, [4, 5], 1, "stop"),
        ((4, 5, 6), (4, 5), (), 3, [4, 5], 2, "length"),
        ((4, 5, 6), (4, 5), (5,), 3, [4, 5], 2, "stop"),
        ((4,), (), (), 1, [], 0, "length"),
        ((None,), (), (), 1, [], 0, "error"),
    ],
)
def test_the_first_pick_that_differs_from_its_draft_is_the_last_to_be_kept(
    tokens, drafts, ends, longest, kept, right, reason
):
    sequence = Sequence([1])
    picks = [None if token is None else Pick(token, 0.0) for token in tokens]
    assert sequence.take(picks, drafts, frozenset(ends), longest) == right
    assert sequence.tokens[1:] == [pick.token for pick in sequence.untold] == kept
    assert sequence.finish_reason == reason
    assert (sequence.error is not None) == (reason == "error")


# ------------------------------------------------------------------------------------------ the same tokens


SAMPLINGS = {
    "greedy": {"temperature": 0},
    "drawn": {"seed": 3},
    "top-k and top-p": {"seed": 5, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
    "repetition penalty": {"temperature": 0, "repetition_penalty": 1.3},
    "repetition penalty, drawn": {"seed": 1, "temperature": 0.8, "repetition_penalty": 1.1},
    "samples": {"n": 3, "seed": 2, "temperature": 0.5},
    "logprobs": {"temperature": 0, "logprobs": 2},
    "a stop string": {"temperature": 0, "stop": ("blo", "tor")},
    "beams": {"beam_width": 3},
}
WAYS = {
    "paged": {},
    "dense": {"attention": "dense"},
    "no prefix cache": {"prefix_cache": False},
    "naive": {"scheduler": "naive"},
    "static": {"scheduler": "static", "block_size": 4, "num_blocks": 200},
    "chunks": {"max_num_batched_tokens": 7},
}


@functools.cache
def written(sampling, way, speculate):
    """Return the sampling and the outputs of two prompts."""
    params = SamplingParams(max_tokens=20, **SAMPLINGS[sampling])
    llm = LLM(TINY, tokenizer=TOKENIZER, **({"num_blocks": 64} | WAYS[way]), speculate=speculate)
    return params, llm.generate([REPETITIVE, "def f(x):\n    return x\n\ndef g(x):\n"], params, progress=False)


# Each sampling in two of the ways, and with PAGEWISE_FULL=1 in all.
@pytest.mark.parametrize(("sampling", "way"), [*dict.fromkeys(in_turns([*SAMPLINGS] * 2, [*WAYS]))])
def test_text_of_the_tiny_model_is_the_same(sampling, way):
    params, outputs = written(sampling, way, speculate=3)
    for one, other in zip(written(sampling, "paged", speculate=0)[1], outputs, strict=True):
        assert [c[:3] for c in other.choices] == [c[:3] for c in one.choices]
        assert [c.score for c in other.choices] == pytest.approx([c.score for c in one.choices], abs=1e-4)
        if params.logprobs is not None:
            for was, now in zip(one.logprobs[0], other.logprobs[0], strict=True):
                assert now == pytest.approx(was, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "attention"), in_turns(["triton", "cuda"], ["dense", "paged"]))
def test_kernels_give_the_same_tokens(backend, attention):
    """On the CPU they are slow: a few tokens of a short prompt."""
    params = greedy(6)
    prompt = TOKENIZER.encode("one two one two")
    options = {"num_blocks": 4, "attention": attention}
    (expected,) = LLM(TINY, **options).generate([prompt], params, progress=False)
    llm = LLM(for_backend(TINY, backend), **options, backend=backend, speculate=3)
    (output,) = llm.generate([prompt], params, progress=False)
    assert output.token_ids == expected.token_ids
    assert llm.scheduler.num_drafted > 0


def test_repetitive_text_takes_less_than_half_of_the_steps():
    llm = LLM(TINY, tokenizer=TOKENIZER, num_blocks=64, speculate=4)
    llm.add_request(REPETITIVE, greedy(100))
    steps = 0
    while llm.has_unfinished:
        llm.step()
        steps += 1
    assert steps < 50
    assert steps + llm.scheduler.num_accepted == 100
    assert llm.scheduler.num_accepted < llm.scheduler.num_drafted < 4 * steps


# ------------------------------------------------------------------------------------------ right and wrong drafts


@pytest.mark.slow
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_hundreds_of_requests_under_pressure(prefix_cache, planned):
    llm = engine(34, prefix_cache=prefix_cache, max_num_seqs=16, max_num_batched_tokens=64)
    ids = serve(llm, requests(200), planned)
    assert_right(finished(llm), ids)
    assert llm.scheduler.num_preemptions > 5
    assert llm.scheduler.num_drafted > llm.scheduler.num_accepted > 300


@pytest.mark.parametrize("options", NARROW.values(), ids=NARROW)
def test_narrow_places_change_no_token(options, planned):
    llm = engine(**options)
    ids = serve(llm, requests(24, seed=1), planned)
    assert_right(finished(llm), ids)
    if options.get("max_num_batched_tokens", 64) > 5:  # else the budget leaves next to nothing
        assert llm.scheduler.num_accepted > 20


@pytest.mark.parametrize("num_blocks", [15, 20])
def test_samples_that_have_come_to_differ_in_length_are_preempted_and_resumed(num_blocks, planned):
    llm = engine(num_blocks, block_size=4, max_num_batched_tokens=24)
    temperatures = 1.0, 0.01  # the colder samples are equal: one is then the beginning of another
    params = [
        SamplingParams(max_tokens=16, n=1 + i % 3, seed=i, ignore_eos=True, temperature=temperatures[i % 2])
        for i in range(12)
    ]
    ids = serve(llm, [([i % 4] * (1 + i % 5), one) for i, one in enumerate(params)], planned)
    lengths = set()
    usual = scheduler.Scheduler.preempt

    def preempt(self, request):
        lengths.add(len({len(sequence.tokens) for sequence in request.live}))
        usual(self, request)

    with mock.patch.object(scheduler.Scheduler, "preempt", preempt):
        assert_right(finished(llm), ids)
    assert max(lengths) > 1


def test_a_sequence_that_others_are_ahead_of_computes_its_newest_token_itself():
    request = Request([1, 2], SamplingParams(n=2), None)
    first, second = request.live
    first.tokens += [3, 4]
    second.tokens += [3, 4]
    assert request.common_tokens() == [1, 2, 3, 4]
    second.tokens += [5]
    assert request.common_tokens() == [1, 2, 3]
    first.tokens += [5, 6, 7]
    assert request.common_tokens() == [1, 2, 3, 4]


class AnyOrderOfDrafts(AnyOrder):
    speculate = 3


@pytest.mark.slow
def test_any_order_of_requests_steps_failures_and_aborts():
    run_state_machine_as_test(AnyOrderOfDrafts, settings=settings(WALK, max_examples=15, derandomize=True))


@pytest.mark.parametrize("fault", ["model", "write", "sampling", "resize", "fork", "commit"])
@pytest.mark.parametrize("kind", [{}, {"attention": "dense"}])
def test_steps_that_fail_or_are_interrupted_cost_no_token(fault, kind, planned):
    llm = engine(30, block_size=4, max_num_batched_tokens=32, **kind)
    ids = serve(llm, requests(12, seed=4), planned)
    outputs = []
    for step in range(400):
        error = (Planted, KeyboardInterrupt)[step % 2]
        fails = broken(llm, fault, error, step % 7) if step % 5 == 1 else contextlib.nullcontext()
        with fails, contextlib.suppress(error):
            outputs += llm.step()
        assert_sound(llm)
        if not llm.has_unfinished:
            break
    assert_right(outputs, ids)
    assert_empty(llm)


# ------------------------------------------------------------------------------------------ limits


def chunks_of(llm):
    """The chunks of every step from now on, drafts included."""
    seen = []
    run = llm.runner.run
    llm.runner.run = lambda chunks: (seen.append(chunks), run(chunks))[1]
    return seen


def test_drafts_take_what_the_budget_leaves_the_oldest_first(planned):
    llm = engine(max_num_batched_tokens=8)
    seen = chunks_of(llm)
    params = greedy(20)
    ids = serve(llm, [([1, 2], params), ([3, 4], params), ([5, 6], params)], planned)
    llm.step(), llm.step()
    assert [len(chunk.drafts) for chunk in seen[1]] == [4, 1, 0]
    ids |= serve(llm, [(list(range(30)), params)], planned)
    llm.step()
    assert [chunk.stop - chunk.start for chunk in seen[2]] == [1, 1, 1, 5]  # the prompt has all that is left
    assert_right(finished(llm), ids)


def test_drafts_take_free_blocks_only_and_preempt_no_one(planned):
    llm = engine(num_blocks=5, block_size=4)
    seen = chunks_of(llm)
    params = greedy(5)
    ids = serve(llm, [([1] * 7, params), ([2] * 7, params)], planned)
    outputs = llm.step() + llm.step()
    assert [len(chunk.drafts) for chunk in seen[1]] == [3, 0]  # one block was free: the last slot and four more
    assert llm.scheduler.num_preemptions == 0
    assert_right(outputs + finished(llm), ids)


def test_no_draft_comes_after_the_last_token_but_one(planned):
    llm = engine(speculate=10)
    seen = chunks_of(llm)
    params = greedy(5)
    ids = serve(llm, [([1, 2, 3], params)], planned)
    assert_right(finished(llm), ids)
    assert max(chunk.stop for chunks in seen for chunk in chunks) == 7  # the eighth token is never computed


def test_beams_are_not_drafted_for():
    llm = LLM(TINY, tokenizer=TOKENIZER, num_blocks=64, speculate=4)
    llm.generate([REPETITIVE], SamplingParams(max_tokens=20, beam_width=2), progress=False)
    assert llm.scheduler.num_drafted == 0


def test_refused_drafts_are_not_shared_and_hold_no_block(planned):
    llm = engine(block_size=4)
    seen = chunks_of(llm)
    params = greedy(24)
    serve(llm, [([9, 8, 7], params)], planned)
    manager, refused = llm.memory, 0
    (request,) = llm.scheduler.waiting
    while True:
        llm.step()
        if not llm.has_unfinished or not llm.scheduler.running:
            break
        (chunk,), tokens = seen[-1], request.live[0].tokens
        assert request.live[0].num_computed == len(tokens) - 1
        assert len(request.live[0].block_table) == -(-(len(tokens) - 1) // 4)
        guessed = [*tokens[: chunk.stop - len(chunk.drafts)], *chunk.drafts]
        if guessed != tokens[: len(guessed)]:
            refused += 1
            right = next(i for i, token in enumerate(guessed) if token != tokens[i])
            assert manager.num_cached(TokenBlocks([*guessed, 0], 4)) == right // 4 * 4
    assert refused > 2


@pytest.mark.slow
def test_a_step_with_drafts_is_not_replayed_from_a_graph(monkeypatch):
    replayed = []

    def run(graphs, batch):
        replayed.append(batch)
        with mock.patch.object(llm.runner, "_graphs", None):
            return llm.runner.step(batch)

    monkeypatch.setattr(DecodeGraphs, "run", run)
    monkeypatch.setattr(DecodeGraphs, "_capture", lambda *_: (None, None))
    llm = engine()
    llm.runner._graphs = DecodeGraphs(llm.runner, llm.config)
    ids = {llm.add_request(*one): one[1] for one in requests(6)}
    assert_right(finished(llm), ids)
    assert llm.scheduler.num_drafted > 0
    assert replayed
    assert all(len(batch.token_ids) == len(batch.seq_lens) for batch in replayed)


# ------------------------------------------------------------------------------------------ ends and pieces


def test_an_end_token_among_right_drafts_ends_the_sequence(planned):
    """Each token of an answer in turn. A piece may hold tokens before the end, none after it."""
    params = greedy(12)
    ((whole, _),) = continued(MODEL, [Job((1, 2, 3), params)])
    for end in whole:
        llm, heard = engine(speculate=6), []
        sampling = greedy(12, stop=end)
        planned([([1, 2, 3], params)])  # which knows the tokens after the end, too
        llm.add_request([1, 2, 3], sampling, listener=heard.append)
        (output,) = finished(llm)
        assert output.token_ids == whole[: whole.index(end) + 1]
        assert [token for piece in heard for token in piece.token_ids] == output.token_ids
        assert [piece.finish_reason for piece in heard] == [None] * (len(heard) - 1) + ["stop"]


def test_a_stop_string_that_right_drafts_complete_ends_the_text(planned):
    letters = Letters()
    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
    ((ids, _),) = continued(MODEL, [Job((0, 1, 2), params)])
    text = letters.decode(ids)
    planned([([0, 1, 2], params)])
    for at in range(15):
        heard, llm = [], engine(speculate=6, tokenizer=letters)
        stop = text[at : at + 3]
        sampling = SamplingParams(max_tokens=20, seed=1, ignore_eos=True, stop=stop)
        llm.add_request("abc", sampling, listener=heard.append)
        (output,) = finished(llm)
        ends = text.index(stop)
        assert (output.text, output.token_ids) == (text[:ends], ids[: ends + 3])
        assert "".join(piece.text for piece in heard) == output.text


def test_a_step_tells_of_all_its_tokens_of_a_choice_in_one_piece(planned):
    llm, heard = engine(tokenizer=Letters()), []
    params = greedy(30, logprobs=1)
    planned([([1, 2, 3], params)])
    llm.add_request([1, 2, 3], params, listener=heard.append)
    outputs, steps = [], 0
    while llm.has_unfinished:
        outputs += llm.step()
        steps += 1
    assert len(heard) == steps < 30
    assert max(len(piece.token_ids) for piece in heard) == 5
    assert "".join(piece.text for piece in heard) == outputs[0].text
    assert [one for piece in heard for one in piece.logprobs] == outputs[0].logprobs[0]


def test_a_tokenizer_that_fails_ends_the_sequence_whose_text_it_makes(planned):
    """In the middle of a step's tokens: the listener hears of those before."""
    params = [SamplingParams(max_tokens=16, seed=i, ignore_eos=True, n=1 + i % 2) for i in range(8)]
    drawn = [([i, 1, 2], one) for i, one in enumerate(params)]
    planned(drawn)
    llm = engine(block_size=4, tokenizer=Letters())
    assert_failures_of_the_tokenizer_end_their_sequences(llm, drawn, lambda step: 2 + step % 12 if step % 4 == 1 else 0)


def test_logits_that_are_not_finite_after_a_right_draft_end_the_sequence_there(planned, monkeypatch):
    params = greedy(12)
    ((whole, _),) = continued(MODEL, [Job((1, 2, 3), params)])
    planned([([1, 2, 3], params)])
    usual = ExactModel.forward

    def forward(self, token_ids, positions, attend, *, logits_for=None):
        logits = usual(self, token_ids, positions, attend, logits_for=logits_for)
        at = positions if logits_for is None else positions[:, logits_for]
        return logits.masked_fill((at == 9)[..., None], torch.nan)

    monkeypatch.setattr(ExactModel, "forward", forward)
    llm = engine()
    (output,) = llm.generate([[1, 2, 3]], params, progress=False)
    assert (output.token_ids, output.finish_reason) == (whole[:7], "error")
    assert_empty(llm)
