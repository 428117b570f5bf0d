"""The benchmark of paged decode: its shapes, inputs and figure. `test_every_experiment` has the common rules."""

import pytest
import torch
from in_process import CPU, planted, records

from pagewise.experiments import decode_inputs
from pagewise.experiments.decode_inputs import paged, random_inputs
from pagewise.experiments.paged_attention_speed import FIRST, SHAPES, SMALLEST, Trials, draw
from pagewise.paged_attention import paged_attention_grouped, paged_attention_v1, paged_attention_v2
from pagewise.tools.worker import Failed

TINY = paged(2, 64, 4, 2, head_size=32)


# ------------------------------------------------------------------------------------------------ trials


def test_the_cuda_methods_are_timed_under_their_own_names():
    batches = [random_inputs(TINY, torch.float32, CPU, seed=0)]
    versions = {"CUDA v1": paged_attention_v1, "CUDA v2": paged_attention_v2, "CUDA grouped": paged_attention_grouped}
    for name, version in versions.items():
        assert [run.func for run in Trials.methods(CPU, TINY)[name](batches)] == [version]


def test_small_inputs_rotate_and_large_ones_do_not(kernel_device, monkeypatch):
    trials = Trials(kernel_device, {"repeats": 1, "warmup": 0})
    trials(TINY, "gather + SDPA")
    assert len({batch.q.sum().item() for batch in trials.inputs}) == 3
    monkeypatch.setattr(decode_inputs, "ROTATED_BYTES", TINY.bytes(2))
    trials.shape = None
    trials(TINY, "gather + SDPA")
    assert len(trials.inputs) == 1


# ------------------------------------------------------------------------------------------------ shapes


def test_the_shapes_are_those_of_a_server_and_begin_with_those_that_have_targets():
    assert {(s.num_seqs, s.longest) for s in SHAPES} == {(B, S) for B in (1, 8, 64) for S in (1024, 8192, 32768)}
    assert {(s.num_heads, s.num_kv_heads) for s in SHAPES} == {(64, 8), (32, 32)}
    assert all((s.head_size, s.block_size) == (128, 16) for s in [*SHAPES, *SMALLEST])
    assert len(set(SHAPES)) == len(SHAPES) == 18
    assert SHAPES[:3] == FIRST
    assert [s.bytes(2) // 2**20 for s in FIRST] == [128, 256, 2048]


# ------------------------------------------------------------------------------------------------ figure


def test_records_can_be_drawn(shown):
    reached = {"Triton": 0.5, "CUDA v1": 0.25, "CUDA v1, again": 0.75}

    def seconds(shape, method):
        if method not in reached:
            raise Failed("refused")
        return shape.bytes(2) / reached[method]

    shapes = [paged(8, 1024, 64, 8), paged(1, 8192, 64, 8), paged(64, 1024, 32, 32)]
    draw(records(planted(Trials, seconds), shapes, rate=1.0))
    (ax,) = shown[0].axes
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1 × 8 k", "8 × 1 k"]
    assert [bar.get_height() for bars in ax.containers for bar in bars] == [25, 25, 50, 50]


def test_records_that_cannot_be_drawn_are_an_error_that_says_what_there_is():
    timed = records(planted(Trials, lambda shape, method: 1.0), [paged(8, 1024, 64, 8)], rate=1.0)
    with pytest.raises(ValueError, match=r"no record with a time has num_kv_heads=32; there are num_kv_heads=8$"):
        draw(timed, num_kv_heads=32)
    without_a_rate = [record._replace(limit_rate=None) for record in timed]
    for found in ([], without_a_rate):
        with pytest.raises(ValueError, match=r"has num_kv_heads=8; there are none$"):
            draw(found)
