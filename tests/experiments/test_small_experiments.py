"""The small experiments of lessons 1 and 3 in depth: options count what they move, and sums stop where they must."""

import pytest
import torch

from pagewise.experiments.free_changes import (
    OPTIONS,
    cycles_by_change,
    cycles_per_score,
    moved_by_option,
)
from pagewise.experiments.precision import BFLOAT16, FLOAT16, errors, errors_of_stored, in_tiles


@pytest.mark.slow
def test_an_option_moves_bytes_as_an_operation_and_none_in_a_kernel():
    apart, fused = moved_by_option()
    assert list(apart) == list(fused) == list(OPTIONS)
    for name in list(OPTIONS)[2:]:
        assert apart[name] > apart["causal"] > apart["no option"]
        assert fused[name] == pytest.approx(fused["no option"], rel=1e-4)


def test_the_exponential_and_the_tanh_take_as_long_as_the_products_of_a_head_of_128():
    cycles = {part: cycles for part, (_, cycles) in cycles_per_score(128).items()}
    assert cycles["exp of the softmax"] + cycles["softcap: tanh"] == cycles["two products"] == 0.125
    rest = cycles["rest of the softmax: maximum, multiply-add, sum"]
    assert rest + cycles["ALiBi: a multiply-add"] == 0.25 * cycles["two products"]


@pytest.mark.parametrize(("head_size", "factor"), [(128, 1.0), (64, 2.0)])
def test_softcap_is_the_one_change_that_a_small_head_pays_for(head_size, factor):
    longest = {name: max(units.values()) for name, units in cycles_by_change(head_size).items()}
    assert longest["softcap"] == factor * longest["no change"]
    assert longest["ALiBi"] == longest["window"] == longest["no change"]


def test_the_loop_in_float32_is_the_softmax():
    scores, values = torch.randn(2, 300, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(in_tiles(scores, values), torch.softmax(scores, dim=0) @ values)


@pytest.mark.slow
def test_sums_of_few_bits_stop_and_the_maximum_may_have_few():
    ones = torch.ones(64 * 1024)  # 1024 tiles of 64 equal scores
    assert in_tiles(ones, ones, l=BFLOAT16).item() == 4  # l stops at 256 tiles
    assert in_tiles(ones, ones, l=BFLOAT16, acc=BFLOAT16).item() == 1  # acc stops there, too
    assert in_tiles(10.3 * ones, ones, m=BFLOAT16).item() == pytest.approx(1, abs=1e-6)
    assert in_tiles(ones[: 64 * 512], ones[: 64 * 512], l=FLOAT16).item() == 1
    found = errors([2**14])
    assert found["m in bfloat16"][0] < 1e-5 < 1e-4 < found["l in bfloat16"][0]


def test_lse_loses_the_logarithm_beside_a_large_maximum():
    found = errors_of_stored([1.0, 6e4])
    assert found["from lse"][1] > 1e-4 > 1e-5 > found["from lse"][0]
    assert max(found["from m and l"]) < 1e-6
