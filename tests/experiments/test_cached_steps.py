"""What a cache saves of a step: the bounds of a GPU, and calls that compute the same with a cache and without."""

import pytest
import torch

from pagewise.experiments.cached_steps import (
    LLAMA_2_70B,
    LLAMA_13B,
    MODELS,
    SERVED,
    least_step,
    least_steps,
    ms_until_full,
    new_caches,
    next_token,
    random_model,
    shapes_of_call,
    users_that_fit,
)
from pagewise.tools.roofline import A100, H100, MEMORY


def test_the_sizes_are_those_of_the_published_models():
    assert LLAMA_13B.layers + 2 * LLAMA_13B.head + 5120 == 13_015_864_320
    assert LLAMA_13B.cache_bytes(1) == 819_200
    assert LLAMA_2_70B.cache_bytes(1) == 327_680


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("batch", [1, 16])
def test_a_cache_gains_nothing_below_the_ridge_and_much_above(model, batch):
    ridge = H100.ridge / batch
    below, above = int(0.8 * ridge), int(4 * ridge)
    ways = (False, True)
    slow, fast = ([least_step(model, H100, n, cached=way, batch=batch) for n in (below, above)] for way in ways)
    assert slow[0] == pytest.approx(model.weight_bytes / H100.bandwidth)
    assert slow[0] <= fast[0] <= 1.05 * slow[0]  # the cache itself is read
    assert slow[1] > 3 * fast[1]


def test_a_full_gpu_takes_the_time_of_its_memory():
    full = 1e3 * MEMORY[A100] / A100.bandwidth
    for model in SERVED.values():
        ms = ms_until_full(model, A100)
        assert len(ms) == users_that_fit(model, A100, 2048)
        assert 0.97 * full < ms[-1] <= full
    assert users_that_fit(LLAMA_13B, A100, 2048) == 35
    assert users_that_fit(LLAMA_2_70B, A100, 2048) == 0


def test_the_lengths_of_a_gpu_have_times_for_both_ways():
    times = least_steps(LLAMA_13B, H100, "an H100")
    assert len(times.lengths) == len(times.without) == len(times.cached)
    assert times.ridge == pytest.approx(295.2, abs=0.1)


@torch.no_grad()
@pytest.mark.parametrize("n", [1, 2, 9])
def test_the_next_token_has_the_same_logits_with_a_cache_and_without_any_number_of_times(n):
    torch.manual_seed(0)
    model = random_model(torch.device("cpu"), 64)
    without, cached = (next_token(model, n, cached=way) for way in (False, True))
    for _ in range(2):
        torch.testing.assert_close(cached(), without())


@torch.no_grad()
def test_shapes_of_a_prefill_and_of_a_decode():
    model = random_model(torch.device("cpu"), 128)
    caches = new_caches(model, 8)
    assert [each.nbytes for each in caches] == [2 * 8 * 64 * 4] * 4
    new, prefill = shapes_of_call(model, torch.arange(5)[None], caches)
    _, decode = shapes_of_call(model, new, caches)
    assert new.shape == (1, 1)
    assert (prefill["q"], prefill["K"], prefill["scores"]) == ((1, 2, 5, 64), (1, 1, 5, 64), (1, 2, 5, 5))
    assert (decode["q"], decode["K"], decode["scores"]) == ((1, 2, 1, 64), (1, 1, 6, 64), (1, 2, 1, 6))
    assert decode["logits"] == (1, 1, 257)
