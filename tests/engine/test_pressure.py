"""The engine under pressure: memory for a fraction of what runs, cancellations, failures in any step.

The model computes in exact arithmetic (`exact_model`), so every token is known beforehand, whatever the batch.
PAGEWISE_FULL=1 runs more and longer schedules.
"""

import os
import random
from collections import defaultdict

import pytest
from exact_model import VOCAB, ExactModel, Job, continued

from pagewise.engine import LLM, SamplingParams

FULL = os.environ.get("PAGEWISE_FULL") == "1"
MODEL = ExactModel()

pytestmark = pytest.mark.usefixtures("shapes_unchecked")  # in tens of thousands of calls; other tests check them


def engine(num_blocks=64, block_size=8, **options):
    return LLM(MODEL, num_blocks=num_blocks, block_size=block_size, **options)


def assert_sound(llm):
    """The invariants of scheduler and memory, between two steps."""
    scheduler, memory = llm.scheduler, llm.memory
    running, waiting = list(scheduler.running), list(scheduler.waiting)
    ids = [request.id for request in running + waiting]
    assert ids == sorted(set(ids)), "oldest first, each once, who runs before who waits"
    held = [sequence for request in running for sequence in request.in_memory()]
    assert sum(request.width for request in running) <= scheduler.max_num_seqs
    assert all(sequence.num_computed == 0 for request in waiting for sequence in request.live)
    if not hasattr(memory, "manager"):
        assert set(memory._kv) == set(held)
        assert set(memory._reserved) == set(running)
        assert sum(memory._reserved.values()) <= memory.num_tokens
        return
    manager = memory.manager
    assert set(manager.sequences) == set(held)
    blocks = [block for sequence in held for block in manager.block_table(sequence)]
    counts = [blocks.count(block) for block in range(manager.num_blocks)]
    assert counts == [manager.ref_count(block) for block in range(manager.num_blocks)]
    assert manager.num_free_blocks == counts.count(0)
    for sequence in held:
        assert sequence.tokens[: manager.num_tokens(sequence)] == manager.tokens(sequence)
        assert sequence.num_computed <= manager.num_tokens(sequence)


def assert_empty(llm):
    """Nothing is left of anybody."""
    assert_sound(llm)
    assert not llm.has_unfinished
    assert (llm.num_running, llm.num_waiting) == (0, 0)
    if hasattr(llm.memory, "manager"):
        assert llm.memory.manager.num_free_blocks == llm.memory.manager.num_blocks
    assert llm.memory.used_nbytes == 0


def assert_right(outputs, sampling):
    """Every choice has the tokens that its prompt has by itself; `sampling` is of each request."""
    jobs = [
        (o, Job(tuple(o.prompt_token_ids), sampling[o.request_id], i)) for o in outputs for i in range(len(o.choices))
    ]
    expected = defaultdict(list)
    for (output, _), result in zip(jobs, continued(MODEL, [job for _, job in jobs]), strict=True):
        expected[output.request_id].append(result)
    for output in outputs:
        assert len(output.choices) == sampling[output.request_id].n
        assert sorted((c.token_ids, c.finish_reason) for c in output.choices) == sorted(expected[output.request_id])


# ------------------------------------------------------------------------------------------ a thousand requests


def requests(number, seed=0):
    """Prompts that often begin alike, greedy and drawn, some of them several samples."""
    draw = random.Random(seed)
    beginnings = [[draw.randrange(VOCAB) for _ in range(draw.randrange(1, 40))] for _ in range(20)]
    drawn = []
    for i in range(number):
        prompt = draw.choice(beginnings) + [draw.randrange(VOCAB) for _ in range(draw.randrange(1, 20))]
        n = draw.choice([1, 1, 1, 1, 1, 1, 2, 3])
        temperature = draw.choice([0.0, 0.7, 1.5]) if n == 1 else 1.0
        tokens = {"max_tokens": draw.randrange(1, 20), "ignore_eos": draw.random() < 0.5}
        drawn.append(
            (prompt, SamplingParams(**tokens, n=n, temperature=temperature, seed=i, top_k=draw.choice([0, 5])))
        )
    return drawn


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_thousand_requests_through_64_blocks(prefix_cache):
    llm = engine(prefix_cache=prefix_cache, max_num_seqs=32, max_num_batched_tokens=64)
    drawn = requests(1000)
    ids = {llm.add_request(*one): one[1] for one in drawn}
    outputs, steps = [], 0
    while llm.has_unfinished:
        outputs += llm.step()
        steps += 1
        if steps % 10 == 0:
            assert_sound(llm)
    assert_empty(llm)
    assert sorted(output.request_id for output in outputs) == sorted(ids)
    assert_right(outputs, ids)
    assert llm.scheduler.num_preemptions > 100
    assert (sum(output.num_cached_tokens for output in outputs) > 1000) == prefix_cache


# ------------------------------------------------------------------------------------------ narrow places


def finished(llm, most=2000):
    """All outputs, in order of their requests; the invariants hold after every step."""
    outputs = []
    for _ in range(most):
        if not llm.has_unfinished:
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
    "dense, batch by batch": {"attention": "dense", "scheduler": "static", "max_num_batched_tokens": 5},
}


@pytest.mark.parametrize("options", NARROW.values(), ids=NARROW)
def test_narrow_places_change_no_token(options):
    llm = engine(**options)
    ids = {llm.add_request(*one): one[1] for one in requests(60, seed=1)}
    outputs = finished(llm)
    assert [output.request_id for output in outputs] == sorted(ids)
    assert_right(outputs, ids)
    assert_empty(llm)


def test_prompts_that_begin_alike_arrive_in_one_step():
    """Each prefix of a prompt, itself twice, and it with another end; then all of them again, fully cached."""
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
    assert_empty(llm)


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
    assert_empty(llm)


# ------------------------------------------------------------------------------------------ aborted, refused


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("steps", range(8))
def test_a_request_may_be_aborted_at_any_time_and_twice(steps, n):
    """Waiting, in the middle of its prompt, running, ended."""
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
    assert {output.request_id for output in outputs} == others.keys()
    assert_right(outputs, others)
    assert_empty(llm)


REFUSED = {
    "an empty prompt": ([], {}, "at least 1 token"),
    "longer than the context": ([1] * 100, {"max_tokens": 29}, "context of 128 tokens"),
    "larger than the memory": ([1] * 60, {"n": 3, "max_tokens": 68}, "the memory has 32"),
    "no token of the model's": ([3, VOCAB], {}, f"got {VOCAB} in the prompt"),
    "a negative token": ([3, -1], {}, "got -1 in the prompt"),
    "more samples than seats": ([3], {"n": 9, "max_tokens": 1}, "max_num_seqs = 8"),
    "a stop string without a tokenizer": ([3], {"stop": "x"}, "give token ids"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_disturbs_nobody_who_runs(case):
    prompt, sampling, message = REFUSED[case]
    llm = engine(num_blocks=32, max_num_seqs=8)
    ids = {llm.add_request(*one): one[1] for one in requests(6, seed=2)}
    outputs = llm.step()
    with pytest.raises(ValueError, match=message):
        llm.add_request(prompt, SamplingParams(**sampling))
    assert_right(outputs + finished(llm), ids)
    assert_empty(llm)


# ------------------------------------------------------------------------------------------ text


class Letters:
    """Each token is a letter. Decoding fails when it is told to: the next time, or the one after, …"""

    failing = 0

    def encode(self, text):
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, ids, skip_special_tokens=False):
        self.failing -= 1
        if self.failing == 0:
            raise RuntimeError("planted")
        return "".join(chr(ord("a") + token) for token in ids)


@pytest.mark.parametrize("scheduler", ["continuous", "naive"])
def test_stop_strings_across_tokens_are_found_whatever_preempts(scheduler):
    """Three letters of the text itself: of three tokens. Streamed, not a letter of it is shown."""
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
    assert_empty(llm)


def test_a_tokenizer_that_fails_once_costs_no_letter():
    """Neither of the text nor of what listeners are shown; in a step in which others, and twins of its own, go on."""
    letters, shown = Letters(), defaultdict(str)
    llm = engine(block_size=4, tokenizer=letters)
    params = {}
    for i in range(4):
        params[i] = SamplingParams(max_tokens=12, seed=i, ignore_eos=True, n=1 + i % 2)

        def listen(piece):
            shown[piece.request_id, piece.choice] += piece.text

        llm.add_request("abc"[i % 3 :], params[i], listener=listen)
    outputs = []
    for step in range(300):
        letters.failing = 1 + step // 5 % 9 if step % 5 == 4 else 0
        try:
            outputs += llm.step()
        except RuntimeError:
            assert_sound(llm)
        if not llm.has_unfinished:
            break
    assert_right(outputs, params)
    for output in outputs:
        texts = {letters.decode(choice.token_ids) for choice in output.choices}
        assert {choice.text for choice in output.choices} == texts
        assert {shown[output.request_id, i] for i in range(len(output.choices))} == texts
    assert_empty(llm)
