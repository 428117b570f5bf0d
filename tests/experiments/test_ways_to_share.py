"""The ways of sharing: a ring sends less than tensor parallelism for a prompt, and more for a token."""

import pytest

from pagewise.exercises import solutions
from pagewise.experiments.ways_to_share import (
    LLAMA_3_8B,
    LLAMA_3_405B,
    all_reduce_bytes,
    arithmetic_seconds,
    over_a_network,
    table_rows,
    token_seconds,
    ways,
)
from pagewise.kv_cache import kv_cache_bytes
from pagewise.tools.roofline import H100


def test_they_hold_the_cache_together():
    sizes = {"num_layers": 32, "num_kv_heads": 8, "head_size": 128}
    assert {way.cache * 8 for way in ways(LLAMA_3_8B, 8, 2**20)} == {kv_cache_bytes(2**20, **sizes)}


def test_a_ring_sends_less_for_a_prompt_and_more_for_a_token():
    tensor, ring, gather, heads = ways(LLAMA_3_8B, 8, 2**17)
    assert tensor.prompt == 8 * ring.prompt == 8 * gather.prompt > 8 * heads.prompt
    assert tensor.token < ring.token == gather.token
    assert heads.token is None
    assert len(table_rows(LLAMA_3_8B, 8, 2**17)) == 4


def test_a_million_tokens_of_the_largest_llama_take_a_minute_of_the_peak_of_128_gpus():
    seconds = LLAMA_3_405B.layers * arithmetic_seconds(LLAMA_3_405B, 128, 10**6, H100)
    assert 38 < seconds < 40


def test_the_exercises_count_the_same_bytes():
    tensor, ring, _, heads = ways(LLAMA_3_8B, 8, 2**17)
    sent = solutions["sent_bytes"](8, 2**17, 32, 8, 128)
    assert (ring.prompt, heads.prompt, ring.token) == (sent["ring"], sent["all-to-all"], sent["decode"])
    assert tensor.prompt == all_reduce_bytes(8, 2**17, 4096) == solutions["all_reduce_bytes"](8, 2**17, 4096)


def test_the_slowest_way_for_a_prompt_is_the_fastest_for_a_token():
    found = over_a_network(LLAMA_3_8B, 8, 2**17)
    assert max(found["prompt"], key=found["prompt"].get) == "tensor parallel"
    assert min(found["token"], key=lambda way: sum(found["token"][way])) == "tensor parallel"
    assert found["prompt"]["ring"] < found["arithmetic"] < found["prompt"]["tensor parallel"]


def test_a_token_reads_weights_and_keys_and_waits_for_each_exchange():
    weights, cache = 2 * LLAMA_3_8B.weights / H100.bandwidth, 4 * 32 * 2**17 * 8 * 128 / H100.bandwidth
    tensor, split = token_seconds(LLAMA_3_8B, 8, 2**17, H100, latency=1e-5).values()
    assert tensor == (weights / 8, cache / 8, 64 * 1e-5)
    assert split == (weights, cache / 8, 32 * 1e-5)


@pytest.mark.parametrize(("n", "wins"), [(8, "tensor parallel"), (64, "split decode")])
def test_split_decode_pays_beyond_the_kv_heads_only(n, wins):
    seconds = token_seconds(LLAMA_3_8B, n, 10**7, H100, latency=1e-5)
    assert min(seconds, key=lambda way: sum(seconds[way])) == wins
