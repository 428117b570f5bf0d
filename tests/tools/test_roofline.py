"""The roofline and the least cost of attention, by hand."""

import pytest
import torch

from pagewise.naive_attention import query_positions, visibility
from pagewise.options import ScoreOptions
from pagewise.tools.roofline import A100, GPUS, H100, H200, AttentionCost, Gpu, standard_attention_bytes

TOY = Gpu("toy", peak_flops=100.0, bandwidth=10.0, num_sms=1, memory=1.0)


def test_ridges_of_the_data_sheets():
    assert [round(gpu.ridge) for gpu in (TOY, A100, H100, H200)] == [10, 153, 295, 206]
    assert [gpu.num_sms for gpu in GPUS] == [108, 132, 132]


@pytest.mark.parametrize(
    ("intensity", "flops_per_second"), [(1.0, 10), (9.0, 90), (10.0, 100), (11.0, 100), (1e6, 100)]
)
def test_attainable_rises_to_the_ridge_and_stays(intensity, flops_per_second):
    assert TOY.attainable(intensity) == flops_per_second


@pytest.mark.parametrize(
    ("flops", "bytes_moved", "seconds"), [(100.0, 1.0, 1.0), (1.0, 100.0, 10.0), (300.0, 30.0, 3.0)]
)
def test_time_is_that_of_the_slower_of_arithmetic_and_memory(flops, bytes_moved, seconds):
    assert TOY.seconds(flops, bytes_moved) == seconds


def test_cost_of_attention_by_hand():
    cost = AttentionCost(B=2, H=8, Hkv=2, T=3, S=5, D=16, itemsize=4)
    assert cost.flops == 2 * 8 * (2 * 3 * 5 * 16 + 2 * 3 * 16 * 5)
    q_and_out, k_and_v = 2 * (2 * 8 * 3 * 16), 2 * (2 * 2 * 5 * 16)
    assert cost.bytes_moved == 4 * (q_and_out + k_and_v)
    assert cost.intensity == cost.flops / cost.bytes_moved


@pytest.mark.parametrize(("T", "S"), [(1, 5), (3, 5), (5, 5), (5, 3)])
def test_causal_attention_costs_the_pairs_that_may_look_at_each_other(T, S):
    visible = visibility(query_positions(T, S)[:, None] - torch.arange(S), ScoreOptions(causal=True))
    assert AttentionCost(1, 1, 1, T, S, 16, causal=True).pairs == visible.sum()


def test_a_causal_prompt_costs_about_half_and_moves_as_much():
    whole, causal = (AttentionCost(1, 32, 8, 4096, 4096, 128, causal=c) for c in (False, True))
    assert causal.flops / whole.flops == pytest.approx(0.5, abs=1e-3)
    assert causal.bytes_moved == whole.bytes_moved


def test_decode_has_an_intensity_of_heads_per_kv_head():
    """Each byte of K and V in a 16-bit cache serves H / Hkv operations, however long the context."""
    assert AttentionCost(1, 32, 8, 1, 10**6, 128).intensity == pytest.approx(4, rel=1e-4)
    assert AttentionCost(64, 32, 8, 1, 10**6, 128).intensity == pytest.approx(4, rel=1e-4)


def test_prefill_has_an_intensity_that_grows_with_its_length():
    short, long = (AttentionCost(1, 32, 32, n, n, 128).intensity for n in (128, 4096))
    assert long == 32 * short


def test_standard_attention_moves_eight_matrices():
    moved = standard_attention_bytes(B=2, H=8, Hkv=2, T=3, S=5, D=16, itemsize=4)
    q, kv, scores = 4 * 2 * 8 * 3 * 16, 4 * 2 * 2 * 5 * 16, 4 * 2 * 8 * 3 * 5
    expected = {
        "read Q": q, "read K": kv, "write S": scores,
        "read S": scores, "write P": scores,
        "read P": scores, "read V": kv, "write O": q,
    }  # fmt: skip
    assert list(moved.items()) == list(expected.items())
    assert sum(moved.values()) == AttentionCost(B=2, H=8, Hkv=2, T=3, S=5, D=16, itemsize=4).bytes_moved + 4 * scores
