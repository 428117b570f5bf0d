"""The engine under pressure: too little memory for the running requests, cancellations, failures in any step.

The model computes in exact arithmetic (`exact_model`), so every token is known beforehand, whatever the batch.
PAGEWISE_FULL=1 runs more and longer schedules.
"""

import contextlib
import functools
import itertools
import random
import signal
import sys
from collections import defaultdict
from unittest import mock

import pytest
from covering import is_full
from exact_model import VOCAB, ExactModel, Job, continued
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from conftest import ROOT
from pagewise.engine import LLM, SamplingParams, paged_memory
from pagewise.engine import llm as llm_module
from pagewise.engine.paged_memory import PagedMemory

FULL = is_full()
MODEL = ExactModel()
ENGINE = str(ROOT / "src" / "pagewise" / "engine")

pytestmark = pytest.mark.usefixtures("shapes_unchecked")  # in tens of thousands of calls; other tests check them


def engine(num_blocks=64, block_size=8, **options):
    return LLM(MODEL, num_blocks=num_blocks, block_size=block_size, **options)


def assert_sound(llm):
    """Assert the invariants of scheduler and memory, between two steps."""
    scheduler, memory = llm.scheduler, llm.memory
    running, waiting = list(scheduler.running), list(scheduler.waiting)
    ids = [request.id for request in running + waiting]
    assert ids == sorted(set(ids)), "oldest first, each once, who runs before who waits"
    held = [sequence for request in running for sequence in (request.live if request.forked else request.live[:1])]
    assert (
        sum(max(len(request.live), request.sampling.beam_width) for request in running) <= scheduler.config.max_num_seqs
    )
    assert all(sequence.num_computed == 0 for request in waiting for sequence in request.live)
    assert all(sequence.num_computed < len(sequence.tokens) for sequence in held)
    if not hasattr(memory, "num_free_blocks"):
        assert set(memory._kv) == set(held)
        assert set(memory._requests.values()) == set(running)
        assert memory.num_reserved <= memory.num_tokens
        return
    for request in running + waiting:
        for sequence in request.live + request.finished:
            assert bool(sequence.block_table) == (sequence in held)
    blocks = [block for sequence in held for block in sequence.block_table]
    counts = [blocks.count(block) for block in range(memory.num_blocks)]
    assert counts == [memory.ref_count(block) for block in range(memory.num_blocks)]
    assert memory.num_free_blocks == counts.count(0)
    for sequence in held:
        assert sequence.num_computed <= len(sequence.block_table) * memory.block_size
        assert len(sequence.block_table) <= -(-len(sequence.tokens) // memory.block_size)


def assert_empty(llm):
    """Assert that no request holds anything."""
    assert_sound(llm)
    assert not llm.has_unfinished
    assert not [*llm.scheduler.running, *llm.scheduler.waiting]
    if hasattr(llm.memory, "num_free_blocks"):
        assert llm.memory.num_free_blocks == llm.memory.num_blocks
    assert llm.memory.used_nbytes == 0


def assert_right(outputs, sampling):
    """Assert that every choice has the tokens that its prompt has alone. `sampling` has an entry per request."""
    assert sorted(output.request_id for output in outputs) == sorted(sampling)
    jobs = [
        (o, Job(tuple(o.prompt_token_ids), sampling[o.request_id], i)) for o in outputs for i in range(len(o.choices))
    ]
    expected = defaultdict(list)
    for (output, _), result in zip(jobs, continued(MODEL, [job for _, job in jobs]), strict=True):
        expected[output.request_id].append(result)
    for output in outputs:
        assert len(output.choices) == sampling[output.request_id].n
        assert [(c.token_ids, c.finish_reason) for c in output.choices] == expected[output.request_id]


# ------------------------------------------------------------------------------------------ hundreds of requests


def requests(number, seed=0):
    """Return greedy and sampled requests, some of several samples. Many prompts begin alike."""
    draw = random.Random(seed)
    beginnings = [[draw.randrange(VOCAB) for _ in range(draw.randrange(1, 40))] for _ in range(20)]
    drawn = []
    for i in range(number):
        prompt = draw.choice(beginnings) + [draw.randrange(VOCAB) for _ in range(draw.randrange(1, 20))]
        n = draw.choice([1, 1, 1, 1, 1, 1, 2, 3])
        temperature = draw.choice([0.0, 0.7, 1.5]) if n == 1 else 1.0
        tokens = {"max_tokens": draw.randrange(1, 20), "ignore_eos": draw.random() < 0.5}
        penalties = {"presence_penalty": (0.0, 1.0)[i % 2], "frequency_penalty": (0.0, -0.5, 0.5)[i % 3]}
        kind = {"temperature": temperature, "top_k": draw.choice([0, 5]), "min_p": (0.0, 0.2)[i % 5 == 0], **penalties}
        drawn.append((prompt, SamplingParams(**tokens, n=n, seed=i, **kind)))
    return drawn


@pytest.mark.slow
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_hundreds_of_requests_through_few_blocks(prefix_cache):
    llm = engine(31, prefix_cache=prefix_cache, max_num_seqs=64, max_num_batched_tokens=128)
    drawn = requests(1000 if FULL else 200)
    ids = {llm.add_request(*one): one[1] for one in drawn}
    outputs, steps = [], 0
    while llm.has_unfinished:
        outputs += llm.step()
        steps += 1
        if steps % 10 == 0:
            assert_sound(llm)
    assert_empty(llm)
    assert_right(outputs, ids)
    assert llm.scheduler.num_preemptions > 10
    assert (sum(output.num_cached_tokens for output in outputs) > 1000) == prefix_cache


@pytest.mark.slow
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_blocks_that_stay_free_spare_preemptions_and_change_no_token(prefix_cache, monkeypatch, shapes_unchecked):
    """A request that would take the last blocks waits, and the requests behind it wait with it."""
    draw, drawn, found, preemptions, computed = random.Random(1), [], [], [], []
    for seed in range(60):
        prompt = [draw.randrange(VOCAB) for _ in range(draw.randrange(4, 60))]
        params = SamplingParams(max_tokens=draw.randrange(4, 40), seed=seed, ignore_eos=True)
        drawn.append((prompt, params))
    for share in (0.0, paged_memory.WATERMARK):
        monkeypatch.setattr(paged_memory, "WATERMARK", share)
        llm = engine(100, block_size=4, prefix_cache=prefix_cache)
        ids = [llm.add_request(*one) for one in drawn]
        commit, num_tokens = llm.memory.commit, 0

        def counted(sequence, stop, commit=commit):
            nonlocal num_tokens
            num_tokens += stop - sequence.num_computed
            commit(sequence, stop)

        llm.memory.commit = counted
        outputs = {output.request_id: output for output in finished(llm)}
        found.append([outputs[i].choices for i in ids])
        preemptions.append(llm.scheduler.num_preemptions)
        computed.append(num_tokens)
        del llm.memory.commit
        assert_empty(llm)
    assert found[0] == found[1]
    assert 3 * preemptions[1] <= 2 * preemptions[0]
    assert computed[1] < computed[0]


def test_a_request_that_needs_all_blocks_runs_when_no_other_holds_any():
    """No block can stay free beside it. New requests that would fit wait behind it."""
    llm = engine(40, block_size=2)
    small = [llm.add_request([i] * 4, SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)) for i in range(4)]
    llm.step()
    large = llm.add_request([5] * 78, SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    late = [llm.add_request([i] * 4, SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)) for i in range(4)]
    ended = [output.request_id for output in finished(llm)]
    assert ended == [*small, large, *late]
    assert llm.scheduler.num_preemptions == 0


# ------------------------------------------------------------------------------------------ narrow places


def finished(llm, most=2000):
    """Return all outputs, in the order of their requests. The invariants hold after every step, and nothing is left."""
    outputs = []
    for _ in range(most):
        if not llm.has_unfinished:
            assert_empty(llm)
            return sorted(outputs, key=lambda output: output.request_id)
        outputs += llm.step()
        assert_sound(llm)
    raise AssertionError(f"not done after {most} steps")


NARROW = {
    "one sequence at a time": {"max_num_seqs": 3},  # as many as the samples of a prompt
    "blocks of one token": {"num_blocks": 200, "block_size": 1},
    "a budget smaller than the prompts": {"max_num_batched_tokens": 3},
    "one block more than the largest request": {"num_blocks": 31},
    "one by one": {"scheduler": "naive"},
    "batch by batch": {"scheduler": "static", "num_blocks": 40},
    "dense": {"attention": "dense"},
    "blocks that are tensors of their own": {"attention": "block_tensors"},
    "dense, batch by batch": {"attention": "dense", "scheduler": "static", "max_num_batched_tokens": 5},
}


@pytest.mark.parametrize("options", NARROW.values(), ids=NARROW)
def test_narrow_places_change_no_token(options):
    llm = engine(**options)
    ids = {llm.add_request(*one): one[1] for one in requests(24, seed=1)}
    assert_right(finished(llm), ids)


def test_prompts_that_begin_alike_arrive_in_one_step():
    """The prompts are each prefix of a prompt, the prompt twice, and one with another end. All come twice."""
    llm = engine(block_size=4)
    prompt = [(i * 17) % VOCAB for i in range(25)]
    prompts = [prompt, prompt, prompt[:1], prompt[:4], prompt[:5], prompt[:8], prompt[:24], [*prompt[:12], 3, 1, 4]]
    sampling = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    for cached in (0, 24):
        ids = {llm.add_request(prompt, sampling): sampling for prompt in prompts}
        outputs = finished(llm)
        assert_right(outputs, ids)
        assert outputs[0].num_cached_tokens == cached
        assert outputs[1].num_cached_tokens == 24  # computed once, though both came in one step
        assert outputs[6].num_cached_tokens == 20  # the last token is computed always


def test_a_large_request_behind_a_stream_of_small_ones_is_served():
    llm = engine(num_blocks=16, block_size=4, max_num_seqs=4)
    small = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    for token in range(6):
        llm.add_request([token, 1], small)
    large = llm.add_request(list(range(40)), SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    for step in range(100):
        llm.add_request([step % VOCAB, 2], small)
        if large in [output.request_id for output in llm.step()]:
            break
    else:
        raise AssertionError("the large request starves")
    finished(llm)


# ------------------------------------------------------------------------------------------ aborted


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("steps", range(8))
def test_a_request_may_be_aborted_at_any_time_and_twice(steps, n):
    """The request waits, is in the middle of its prompt, runs, or has ended."""
    llm = engine(max_num_batched_tokens=8)
    sampling = SamplingParams(max_tokens=3, n=n, seed=5)
    others = {llm.add_request([1, 2, 3], sampling): sampling}
    aborted = llm.add_request(list(range(20)), sampling)
    others[llm.add_request(list(range(18)), sampling)] = sampling
    outputs = [output for _ in range(steps) for output in llm.step()]
    llm.abort(aborted)
    llm.abort(aborted)
    assert_sound(llm)
    outputs = [output for output in outputs + finished(llm) if output.request_id != aborted]
    assert_right(outputs, others)


@pytest.mark.parametrize("budget", [3, 5, 7])
def test_what_an_aborted_prompt_has_computed_is_shared_and_no_more(budget):
    llm = engine(block_size=4, max_num_batched_tokens=budget)
    sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    for steps in range(1, 6):
        prompt = [steps] * 2 + list(range(30))
        request = llm.add_request(prompt, sampling)
        for _ in range(steps):
            llm.step()
        llm.abort(request)
        again = llm.add_request(prompt, sampling)
        outputs = finished(llm)
        assert outputs[0].num_cached_tokens == min(budget * steps, 31) // 4 * 4  # the last token is computed always
        assert_right(outputs, {again: sampling})


# ------------------------------------------------------------------------------------------ text


class Letters:
    """A tokenizer whose tokens are letters. After `failing = n`, the n-th next call fails."""

    failing = 0

    def encode(self, text):
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, ids, skip_special_tokens=False):
        self.failing -= 1
        if self.failing == 0:
            raise RuntimeError("planted")
        return "".join(chr(ord("a") + token) for token in ids)


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["continuous", "naive"])
def test_stop_strings_across_tokens_are_found_whatever_preempts(scheduler):
    """The stop string is three letters of the text, from three tokens. The stream shows none of these letters."""
    letters = Letters()
    llm = engine(num_blocks=15, block_size=4, tokenizer=letters, scheduler=scheduler)
    drawn = [("".join(random.Random(i).choices("abcdefgh", k=12)), 5 + i % 9) for i in range(20)]
    expected, shown = {}, defaultdict(str)
    for i, (prompt, at) in enumerate(drawn):
        sampling = SamplingParams(max_tokens=30, seed=i, ignore_eos=True)
        ((ids, _),) = continued(MODEL, [Job(tuple(letters.encode(prompt)), sampling)])
        text = letters.decode(ids)
        stop = text[at : at + 3]
        sampling = SamplingParams(max_tokens=30, seed=i, ignore_eos=True, stop=stop)
        request = llm.add_request(
            prompt,
            sampling,
            listener=lambda piece: shown.__setitem__(piece.request_id, shown[piece.request_id] + piece.text),
        )
        ends = text.find(stop)
        expected[request] = (text[:ends], ids[: ends + 3], "stop")
    outputs = finished(llm)
    assert {o.request_id: (o.text, o.token_ids, o.finish_reason) for o in outputs} == expected
    assert shown == {request: text for request, (text, *_) in expected.items()}
    assert (llm.scheduler.num_preemptions > 5) == (scheduler == "continuous")


def assert_failures_of_the_tokenizer_end_their_sequences(llm, drawn, failing):
    """Serve prompts with a call of the tokenizer that fails in each step: call number `failing(step)`, 0 for none.

    A failure ends one choice. It keeps the tokens and letters that it had. All other choices are right.
    """
    letters, shown = llm.tokenizer, defaultdict(str)

    def listen(piece):
        shown[piece.request_id, piece.choice] += piece.text

    ids = {llm.add_request(*one, listener=listen): one[1] for one in drawn}
    outputs, num_failures = [], 0
    for step in range(300):
        letters.failing = failing(step)
        outputs += llm.step()
        num_failures += letters.failing < 0 < failing(step)
        assert_sound(llm)
        if not llm.has_unfinished:
            break
    letters.failing = 0
    num_ended, num_whole = 0, 0
    for output in outputs:
        jobs = [Job(tuple(output.prompt_token_ids), ids[output.request_id], i) for i in range(len(output.choices))]
        for i, (choice, (whole, reason)) in enumerate(zip(output.choices, continued(MODEL, jobs), strict=True)):
            ended = choice.finish_reason == "error"
            assert choice.token_ids == (whole[: len(choice.token_ids)] if ended else whole)
            assert choice.finish_reason in ("error", reason)
            assert choice.text == shown[output.request_id, i] == letters.decode(choice.token_ids)
            num_ended, num_whole = num_ended + ended, num_whole + (not ended)
        assert (output.error is not None) == any(choice.finish_reason == "error" for choice in output.choices)
    assert len(outputs) == len(drawn)
    assert 0 < num_ended <= num_failures
    assert num_whole > 0
    assert_empty(llm)


def test_a_tokenizer_that_fails_ends_the_sequence_whose_text_it_makes():
    params = [SamplingParams(max_tokens=12, seed=i, ignore_eos=True, n=1 + i % 2) for i in range(8)]
    drawn = [("abc"[i % 3 :], one) for i, one in enumerate(params)]
    llm = engine(block_size=4, tokenizer=Letters())
    assert_failures_of_the_tokenizer_end_their_sequences(llm, drawn, lambda step: 1 + step % 9 if step % 5 == 4 else 0)


# ------------------------------------------------------------------------------------------ any order of events


FAULTS = ["model", "write", "sampling", "resize", "fork", "commit", "admit"]


class Planted(Exception):
    """The exception of a planted fault."""


def broken(llm, fault, error, after):
    """Return a patch. The `after`-th next call of a part of the engine then raises."""
    memory = llm.memory
    if isinstance(memory, PagedMemory):
        writes = paged_memory, "kv_writer"
    else:
        writes = (memory.cache, "write") if hasattr(memory, "cache") else (memory, "attention")
    owner, name = {
        "model": (MODEL, "forward"),
        "write": writes,
        "sampling": (llm_module, "sample"),
        "resize": (memory, "resize"),
        "fork": (memory, "fork"),
        "commit": (memory, "commit"),
        "admit": (memory, "admit"),
    }[fault]
    usual, calls = getattr(owner, name), itertools.count()

    def fails(*args, **kwargs):
        if next(calls) == after:
            raise error("planted")
        return usual(*args, **kwargs)

    if name == "writer":  # which is called once for all layers
        writer = usual

        def fails_in_a_layer(*args, **kwargs):
            nonlocal usual
            usual = writer(*args, **kwargs)
            return fails

        return mock.patch.object(owner, name, fails_in_a_layer)
    return mock.patch.object(owner, name, fails)


@functools.cache
def served_alone(prompt, sampling):
    """Return the choices of a request that runs alone, one after the other, with enough memory for all."""
    (output,) = engine(512, prefix_cache=False, scheduler="naive").generate([list(prompt)], sampling, progress=False)
    return output.choices


BEGINNINGS = [[draw * i % VOCAB for i in range(1, 25)] for draw in (3, 7, 7)]

prompts = st.builds(
    lambda beginning, length, end: beginning[:length] + end,
    st.sampled_from(BEGINNINGS),
    st.integers(1, 24),
    st.lists(st.integers(0, 2), max_size=3),
)
samplings = st.builds(
    lambda kind, max_tokens, seed, ignore_eos: SamplingParams(
        **kind, max_tokens=max_tokens, seed=seed, ignore_eos=ignore_eos
    ),
    st.sampled_from([{"temperature": 0}, {}, {"top_p": 0.5, "stop": (4, 11)}, {"n": 2}, {"n": 3}, {"beam_width": 3}]),
    st.integers(1, 9),
    st.integers(0, 3),
    st.booleans(),
)


WALK = settings(  # of random walks through the rules of `AnyOrder`
    stateful_step_count=30, deadline=None, database=None, derandomize=not FULL, suppress_health_check=list(HealthCheck)
)


class AnyOrder(RuleBasedStateMachine):
    """Requests come, steps run or fail, requests are aborted. Every choice has the tokens of its prompt alone."""

    num_preemptions = 0
    speculate = 0

    @initialize(
        memory=st.sampled_from([(12, 4), (9, 8), (40, 1)]),
        seats=st.sampled_from([3, 4, 8]),
        budget=st.sampled_from([3, 7, 64]),
        scheduler=st.sampled_from(["continuous", "continuous", "continuous", "static", "naive"]),
        kind=st.sampled_from(
            [{"prefix_cache": True}, {"attention": "block_tensors"}, {"prefix_cache": False}, {"attention": "dense"}]
        ),
    )
    def begin(self, memory, seats, budget, scheduler, kind):
        limits = {"max_num_seqs": seats, "max_num_batched_tokens": budget}
        self.llm = engine(*memory, scheduler=scheduler, speculate=self.speculate, **limits, **kind)
        self.num_blocks, self.block_size = memory
        self.wanted, self.aborted, self.heard = {}, set(), defaultdict(list)

    @rule(prompt=prompts, sampling=samplings, several=st.integers(1, 3))
    def add(self, prompt, sampling, several):
        width, longest = max(sampling.n, sampling.beam_width), len(prompt) + sampling.max_tokens
        if width * -(-longest // self.block_size) > self.num_blocks:
            return
        for _ in range(several):
            self.wanted[self.llm.add_request(prompt, sampling, listener=self.hear)] = sampling

    def hear(self, piece):
        self.heard[piece.request_id, piece.choice] += piece.token_ids

    @rule(number=st.integers(1, 5))
    def steps(self, number):
        for _ in range(number):
            self.judge(self.llm.step())

    @rule(fault=st.sampled_from(FAULTS), error=st.sampled_from([Planted, KeyboardInterrupt]), after=st.integers(0, 3))
    def step_that_fails(self, fault, error, after):
        outputs = []
        with broken(self.llm, fault, error, after), contextlib.suppress(error):
            outputs = self.llm.step()
        self.judge(outputs)  # computes what is expected, which must not meet the fault

    @rule(pick=st.integers(0, 99))
    def abort(self, pick):
        if self.wanted:
            request = list(self.wanted)[pick % len(self.wanted)]
            self.llm.abort(request)
            del self.wanted[request]
            self.aborted.add(request)

    def judge(self, outputs):
        for output in outputs:
            if output.request_id in self.aborted:  # it had ended, but no step had returned it yet
                continue
            sampling = self.wanted.pop(output.request_id)
            expected = served_alone(tuple(output.prompt_token_ids), sampling)
            assert output.choices == expected
            told = [self.heard[output.request_id, i] for i in range(len(expected))]
            assert told == [choice.token_ids for choice in expected]

    @invariant()
    def sound(self):
        if hasattr(self, "llm"):
            assert_sound(self.llm)

    def teardown(self):
        if not hasattr(self, "llm"):
            return
        for _ in range(3000):
            if not self.llm.has_unfinished:
                break
            self.judge(self.llm.step())
        assert self.wanted == {}
        assert_empty(self.llm)
        AnyOrder.num_preemptions += self.llm.scheduler.num_preemptions


@pytest.mark.slow
def test_any_order_of_requests_steps_failures_and_aborts():
    chances = {"max_examples": 600, "stateful_step_count": 60} if FULL else {"max_examples": 24}
    run_state_machine_as_test(AnyOrder, settings=settings(WALK, **chances))
    assert AnyOrder.num_preemptions > 30


# ------------------------------------------------------------------------------------------ Ctrl-C


class Presses:
    """A tracer that counts the executed lines of the engine, and presses Ctrl-C at line number `at`."""

    def __init__(self, at=None):
        self.at, self.lines = at, 0

    def __call__(self, frame, event, arg):
        code = frame.f_code
        if not code.co_filename.startswith(ENGINE) or code.co_name == "step":  # whose caller would be hit as well
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                signal.raise_signal(signal.SIGINT)
        return self


def served_with(presses, speculate):
    """How often steps were interrupted until all of some requests, more than there is memory for, were served."""
    llm = engine(8, block_size=4, max_num_seqs=4, max_num_batched_tokens=10, speculate=speculate)
    sampling = SamplingParams(max_tokens=5, seed=1, ignore_eos=True)
    several = SamplingParams(max_tokens=5, seed=2, n=2)
    ids = {
        llm.add_request([i] * (3 + 5 * i), one): one for i, one in enumerate((sampling, several, sampling, sampling))
    }
    outputs, interrupted = [], 0
    for _ in range(100):
        if not llm.has_unfinished:
            break
        before = sys.gettrace()
        try:
            sys.settrace(presses)
            outputs += llm.step()
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(before)
        assert_sound(llm)
    assert_right(outputs, ids)
    assert_empty(llm)
    assert llm.scheduler.num_preemptions > 0
    return interrupted


@pytest.mark.slow
@pytest.mark.parametrize("speculate", [0, 2])
def test_ctrl_c_at_any_line_of_a_step_costs_a_step_and_no_more(speculate):
    served_with(counting := Presses(), speculate)
    # the first of these places is in the last step, after which nothing is left to compute
    places = range(counting.lines - 5, 0, -(1 + counting.lines // (2000 if FULL else 40)))
    assert {served_with(Presses(at), speculate) for at in places} == {1}
