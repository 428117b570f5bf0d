"""The scheduler over real block tables, without a model."""

from collections import Counter

import pytest
import torch

from pagewise.engine.config import EngineConfig, KVSizes
from pagewise.engine.request import Request
from pagewise.engine.sampling_params import SamplingParams
from pagewise.engine.scheduler import Scheduler
from pagewise.paged_blocks import prefix_cache

SIZES = KVSizes(num_hidden_layers=1, num_key_value_heads=1, head_dim=2)


def scheduler(num_blocks=64, block_size=4, *, prefix_cache=False, dense=False, policy="continuous", **options):
    config = EngineConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        prefix_cache=prefix_cache,
        attention="dense" if dense else "paged",
        backend="torch",
        scheduler=policy,
        **options,
    )
    return Scheduler(config.new_memory(SIZES, torch.device("cpu"), torch.float32), config)


def add(scheduler, prompt, name=0, **sampling):
    """Add a request for these tokens, or for a prompt of this many tokens."""
    prompt = [100 * name + i for i in range(prompt)] if isinstance(prompt, int) else prompt
    request = Request(prompt, SamplingParams(**({"max_tokens": 50} | sampling)), None)
    request.id = name
    scheduler.waiting.append(request)
    return request


def step(scheduler):
    """Run a step and add a token to each of its sequences. Return {request: [(start, stop), …]}."""
    chunks = scheduler.schedule()
    assert sum(chunk.stop - chunk.start for chunk in chunks) <= scheduler.config.max_num_batched_tokens
    scheduler.computed(chunks)
    for request, sequence, _, stop, _, _ in chunks:
        if stop == len(sequence.tokens):
            for one in [sequence] if len(request.live) == 1 else request.live:
                if len(one.tokens) == stop:
                    one.tokens.append(9000 + 10 * one.index + len(one.tokens) % 10)
    done = {}
    for request, _, start, stop, _, _ in chunks:
        done.setdefault(request.id, []).append((start, stop))
    return done


def end(scheduler, request):
    for sequence in request.live.copy():
        scheduler.finish(request, sequence)


def names(requests):
    return [request.id for request in requests]


def test_sequences_that_decode_come_first_and_prompts_share_what_is_left():
    s = scheduler(max_num_batched_tokens=10)
    add(s, 3, 0), add(s, 4, 1)
    assert step(s) == {0: [(0, 3)], 1: [(0, 4)]}
    add(s, 30, 2), add(s, 5, 3)
    assert step(s) == {0: [(3, 4)], 1: [(4, 5)], 2: [(0, 8)]}
    assert step(s) == {0: [(4, 5)], 1: [(5, 6)], 2: [(8, 16)]}


def test_a_long_prompt_is_computed_in_chunks_and_the_next_one_starts_in_its_last_step():
    s = scheduler(max_num_batched_tokens=8)
    add(s, 20, 0), add(s, 6, 1)
    assert [step(s) for _ in range(2)] == [{0: [(0, 8)]}, {0: [(8, 16)]}]
    assert names(s.running) == [0]  # the other holds nothing before it is computed
    assert step(s) == {0: [(16, 20)], 1: [(0, 4)]}
    assert step(s) == {0: [(20, 21)], 1: [(4, 6)]}


def test_a_step_may_be_full_of_sequences_that_decode_but_not_fuller():
    s = scheduler(max_num_batched_tokens=3)
    add(s, 1, 0), add(s, 1, 1, n=2), add(s, 1, 2, n=2)
    assert step(s) == {0: [(0, 1)], 1: [(0, 1)], 2: [(0, 1)]}
    add(s, 1, 3)
    assert step(s) == {0: [(1, 2)], 1: [(1, 2)] * 2}


def test_samples_for_which_one_token_is_missing_wait_for_the_next_step():
    s = scheduler(max_num_batched_tokens=2)
    first = add(s, 1, 0)
    add(s, 1, 1, n=2)
    assert step(s) == {0: [(0, 1)], 1: [(0, 1)]}
    assert step(s) == {0: [(1, 2)]}
    end(s, first)
    assert step(s) == {1: [(1, 2)] * 2}


def test_when_blocks_run_out_the_youngest_waits_again_before_all_others_and_keeps_its_tokens():
    s = scheduler(num_blocks=5)
    old, middle, young = add(s, 4, 0), add(s, 4, 1), add(s, 7, 2)
    late = add(s, 1, 3)
    assert step(s) == {0: [(0, 4)], 1: [(0, 4)], 2: [(0, 7)], 3: [(0, 1)]}
    tokens = [*young.live[0].tokens]
    assert step(s) == {0: [(4, 5)], 1: [(4, 5)]}  # one block was free; the late request gave up one, the young one two
    assert names(s.running) == [0, 1]
    assert names(s.waiting) == [2, 3]
    assert young.live[0].tokens == tokens
    assert young.live[0].num_computed == 0
    assert s.num_preemptions == 2
    end(s, middle)
    assert step(s) == {0: [(5, 6)], 2: [(0, 8)], 3: [(0, 2)]}
    end(s, old), end(s, young), end(s, late)
    assert s.memory.num_free_blocks == 5


def test_a_request_that_finds_no_block_gives_up_its_own_if_it_is_the_youngest():
    s = scheduler(num_blocks=3, block_size=2)
    add(s, 4, 0), add(s, 2, 1)
    assert step(s) == {0: [(0, 4)], 1: [(0, 2)]}
    assert step(s) == {0: [(4, 5)]}
    assert names(s.waiting) == [1]


@pytest.mark.parametrize("policy", ["naive", "static", "continuous"])
@pytest.mark.parametrize("dense", [False, True])
def test_who_joins_a_batch(policy, dense):
    s = scheduler(policy=policy, dense=dense, max_num_seqs=2)
    first, second, third, fourth = (add(s, 2, name, max_tokens=5) for name in range(4))
    seen = [sorted(step(s))]
    end(s, first)
    late = add(s, 2, 9, max_tokens=5)
    seen.append(sorted(step(s)))
    running = [request for request in (second, third) if request in s.running]
    end(s, running[0])
    seen.append(sorted(step(s)))
    assert (
        seen
        == {
            "naive": [[0], [1], [2]],
            "static": [[0, 1], [1], [2, 3]],
            "continuous": [[0, 1], [1, 2], [2, 3]],
        }[policy]
    )
    assert fourth in [*s.waiting, *s.running]
    assert late in s.waiting


def test_a_static_batch_is_closed_to_those_who_come_while_its_prompts_are_read():
    s = scheduler(policy="static", max_num_batched_tokens=4)
    add(s, 4, 0), add(s, 4, 1)
    assert sorted(step(s)) == [0]
    add(s, 4, 2)
    assert sorted(step(s)) == [0, 1]
    assert [sorted(step(s)) for _ in range(3)] == [[0, 1]] * 3
    assert names(s.waiting) == [2]


def test_a_static_batch_that_memory_has_cut_short_is_closed():
    s = scheduler(policy="static", num_blocks=5)
    first, _ = add(s, 8, 0), add(s, 4, 1)
    add(s, 12, 2)
    assert sorted(step(s)) == [0, 1]
    end(s, first)
    assert [sorted(step(s)) for _ in range(2)] == [[1]] * 2
    assert names(s.waiting) == [2]


def test_who_is_preempted_keeps_the_place_in_a_static_batch():
    s = scheduler(policy="static")
    add(s, 4, 0), add(s, 4, 1)
    step(s)
    add(s, 4, 2)
    s.preempt(s.running[-1])
    assert [sorted(step(s)) for _ in range(2)] == [[0, 1]] * 2
    assert names(s.waiting) == [2]


def test_a_prompt_waits_for_the_prefix_that_another_is_computing_and_then_finds_it():
    shared = [*range(10)]
    s = scheduler(prefix_cache=True)
    add(s, [*shared, 50], 0), add(s, [*shared, 60, 61], 1), add(s, [*shared, 70], 2)
    assert step(s) == {0: [(0, 11)]}
    assert step(s) == {0: [(11, 12)], 1: [(8, 12)], 2: [(8, 11)]}


def test_a_prompt_that_waits_is_checked_and_hashed_once(monkeypatch):
    counts, digest, as_token = Counter(), prefix_cache.block_digest, prefix_cache.as_token
    monkeypatch.setattr(prefix_cache, "block_digest", lambda *a: counts.update(["hashed"]) or digest(*a))
    monkeypatch.setattr(prefix_cache, "as_token", lambda token: counts.update(["checked"]) or as_token(token))
    s = scheduler(num_blocks=8, prefix_cache=True)
    first = add(s, [*range(20)], 0)
    assert step(s) == {0: [(0, 20)]}
    add(s, [*range(16), *range(50, 66)], 1)
    step(s)
    counts.clear()
    assert [list(step(s)) for _ in range(6)] == [[0]] * 6
    assert counts["hashed"] <= 2  # blocks that the first request fills, one to look up and one to register
    assert counts["checked"] == 0
    end(s, first)
    assert step(s) == {1: [(16, 32)]}


@pytest.mark.parametrize(("first", "second"), [(8, 8), (9, 5), (4, 4)])
def test_nobody_waits_for_a_block_that_would_not_be_his(first, second):
    """A prompt's last token is always computed anew, so a request does not wait for the block that it ends."""
    s = scheduler(prefix_cache=True)
    add(s, [*range(first)], 0), add(s, [*range(second)], 1)
    wait = min(first // 4, (second - 1) // 4) > 0
    assert sorted(step(s)) == ([0] if wait else [0, 1])


def test_samples_share_the_blocks_of_their_prompt_until_they_write():
    s = scheduler(num_blocks=20)
    request = add(s, 10, 0, n=3)
    assert step(s) == {0: [(0, 10)]}
    manager = s.memory
    assert manager.stats().used == 3
    assert [manager.ref_count(block) for block in request.live[2].block_table] == [3, 3, 3]
    assert step(s) == {0: [(10, 11)] * 3}
    assert manager.stats().used == 2 + 3
    assert len(manager.take_copies()) == 2


def test_samples_that_were_preempted_share_again_what_they_have_in_common_and_decode_together():
    s = scheduler(num_blocks=12, max_num_batched_tokens=20)
    old, samples = add(s, 4, 0, max_tokens=20), add(s, 9, 1, n=3, max_tokens=9)
    for _ in range(5):
        step(s)
    before = [[*one.tokens] for one in samples.live]
    s.preempt(samples)
    manager = s.memory
    assert manager.stats().used == len(old.live[0].block_table)
    assert step(s)[1] == [(0, 9)]  # what all begin with
    assert step(s)[1] == [(9, 13)] * 3  # what each has of its own, but for the newest token
    assert [one.tokens for one in samples.live] == before
    assert step(s)[1] == [(13, 14)] * 3
    assert [one.tokens[:-1] for one in samples.live] == before
    assert manager.ref_count(samples.live[0].block_table[0]) == 3


def test_samples_that_drew_the_same_tokens_so_far_are_computed_once_when_they_resume():
    s = scheduler(num_blocks=20)
    request = add(s, 5, 0, n=2)
    step(s)
    for one in request.live:
        one.tokens[-1] = 7
    s.preempt(request)
    assert step(s) == {0: [(0, 6)]}
    assert [one.num_computed for one in request.live] == [6, 6]


def test_samples_that_differ_in_their_newest_two_tokens_count_as_many_tokens_when_they_resume():
    s = scheduler(max_num_batched_tokens=5)
    request = add(s, 3, 0, n=3)
    step(s), step(s)
    s.preempt(request)
    assert [step(s)[0] for _ in range(3)] == [[(0, 3)], [(3, 4)] * 3, [(4, 5)] * 3]


def test_the_number_of_cached_tokens_is_that_of_the_first_admission():
    s = scheduler(prefix_cache=True)
    request = add(s, 9, 0)
    step(s)
    s.preempt(request)
    assert step(s) == {0: [(8, 10)]}
    assert request.num_cached_tokens == 0


def test_a_sample_that_has_ended_gives_its_seat_back_at_once():
    s = scheduler(max_num_seqs=3)
    samples = add(s, 2, 0, n=3)
    add(s, 2, 1)
    assert [sorted(step(s)) for _ in range(2)] == [[0], [0]]
    s.finish(samples, samples.live[1])
    assert sorted(step(s)) == [0, 1]


@pytest.mark.parametrize("several", ["n", "beam_width"])
def test_no_more_sequences_run_than_allowed_counting_those_to_come(several):
    s = scheduler(max_num_seqs=4)
    add(s, 2, 0, **{several: 3}), add(s, 2, 1, n=2), add(s, 2, 2)
    assert sorted(step(s)) == [0]
    assert names(s.waiting) == [1, 2]  # no request overtakes another


def test_dense_memory_is_reserved_for_all_tokens_that_a_request_may_have():
    s = scheduler(num_blocks=9, block_size=1, dense=True)
    first, second = add(s, 3, 0, max_tokens=3), add(s, 2, 1, max_tokens=4)
    assert sorted(step(s)) == [0]
    assert s.memory.used_nbytes == 2 * 5 * 2 * 4  # K and V, tokens but the last, D, bytes
    end(s, first)
    assert s.memory.used_nbytes == 0
    assert sorted(step(s)) == [1]
    s.preempt(second)
    assert s.memory.used_nbytes == 0


JUST_FITS = {  # a prompt of 5 tokens and 3 new ones, in blocks of 4
    "one": ({}, False, 2),
    "samples, which have a block in common": ({"n": 2}, False, 3),
    "dense": ({}, True, 2),
    "dense samples, which have nothing in common": ({"n": 2}, True, 4),
}


@pytest.mark.parametrize("case", JUST_FITS)
def test_a_request_that_just_fits_is_served_and_with_a_block_less_it_is_refused(case):
    sampling, dense, num_blocks = JUST_FITS[case]
    s = scheduler(num_blocks, dense=dense)
    request = add(s, 5, max_tokens=3, **sampling)
    s.memory.check_fits(request)
    step(s), step(s), step(s)
    assert [len(one.tokens) for one in request.live] == [8] * request.width
    assert s.num_preemptions == 0
    with pytest.raises(ValueError, match="and the memory has"):
        scheduler(num_blocks - 1, dense=dense).memory.check_fits(request)


@pytest.mark.parametrize("dense", [False, True])
def test_samples_wait_until_there_is_memory_for_each_of_them(dense):
    """The memory would be enough for the first sample alone."""
    s = scheduler(num_blocks=5 if dense else 3, dense=dense)
    first, _ = add(s, 4, 0, max_tokens=4), add(s, 5, 1, n=2, max_tokens=3)
    assert sorted(step(s)) == [0]
    assert names(s.waiting) == [1]
    end(s, first)
    assert sorted(step(s)) == [1]


def test_blocks_that_a_prompt_finds_need_not_be_free():
    s = scheduler(num_blocks=6, prefix_cache=True)
    add(s, [*range(17)], 0)
    step(s)
    add(s, [*range(16), 50], 1)
    assert step(s) == {0: [(17, 18)], 1: [(16, 17)]}
