"""The benchmark of split decode: lengths equal and mixed, dense and paged. `test_every_experiment` has the rules."""

import json

import pytest
import torch
from in_process import CPU, planted, records

from conftest import ROOT
from pagewise.experiments import flash_decoding_speed
from pagewise.experiments.decode_inputs import Shape, exact, random_inputs
from pagewise.experiments.flash_decoding_speed import MIXED, SHAPES, Trials, draw, draw_mixed
from pagewise.flash_decoding import Splits
from pagewise.naive_attention import attention
from pagewise.tools import tuning

DENSE, PAGED = (Shape(2, 5, 40, 0, paged, 4, 2, 32) for paged in (0, 1))
OURS = ("Flash-Decoding", "not split", "the heuristic's splits", "splits of 512 keys")


# ------------------------------------------------------------------------------------------------ shapes and inputs


def test_the_shapes_are_those_of_the_targets():
    assert {s.longest for s in SHAPES if s.num_seqs == 1} == {512 * 4**i for i in range(6)}
    assert {s.paged for s in SHAPES} == {0, 1}
    assert len(set(SHAPES)) == len(SHAPES)
    assert all(s.paged for s in SHAPES[:7])
    assert {shape._replace(paged=1) for shape in MIXED} <= set(SHAPES[:7])
    assert SHAPES[0].bytes(2) == 2**29
    assert Shape(8, 4096, 4096).flops == 4 * 8 * 4096 * 64 * 128


def test_mixed_lengths_have_no_order_and_their_equals_as_many_tokens():
    mixed, one_long, _ = MIXED
    lengths = mixed.seq_lens
    assert (min(lengths), max(lengths), len(lengths)) == (512, 65536, 16)
    assert lengths != sorted(lengths)
    assert lengths == mixed.seq_lens
    assert one_long.seq_lens == [131072] + [1024] * 31
    for shape in MIXED:
        assert shape.equal.seq_lens == [shape.equal.longest] * shape.num_seqs
        assert shape.equal.bytes(2) == pytest.approx(shape.bytes(2), rel=1e-3)
    assert Shape(1, 7, 7).seq_lens == [7]


@pytest.mark.parametrize("shape", [DENSE, PAGED], ids=["dense", "paged"])
def test_the_oracle_sees_each_sequence_to_its_end_and_no_further(shape):
    inputs = random_inputs(shape, torch.float64, CPU, seed=1)
    for b, length in enumerate(shape.seq_lens):
        if shape.paged:
            slots = [(inputs.block_tables[b, t // 16], t % 16) for t in range(length)]
            k, v = (torch.stack([c[slot] for slot in slots], dim=1) for c in (inputs.k_cache, inputs.v_cache))
        else:
            k, v = (x[b, :, :length] for x in (inputs.k, inputs.v))
        right = attention(inputs.q[b].reshape(1, 4, 1, 32), k[None], v[None])
        torch.testing.assert_close(exact(inputs)[b].reshape(1, 4, 1, 32), right)


def test_sequences_do_not_share_blocks():
    tables, lens = random_inputs(PAGED, torch.float32, CPU, seed=0)[3:5]
    rows = zip(tables.tolist(), lens.tolist(), strict=True)
    used = [block for table, length in rows for block in table[: -(-length // 16)]]
    assert sorted(used) == list(range(len(used)))


# ------------------------------------------------------------------------------------------------ trials


@pytest.mark.parametrize("method", ["unified max", "lazy rescale"])
def test_both_softmaxes_of_lesson_8_take_one_length(method, kernel_device):
    trials = Trials(kernel_device, {"repeats": 1, "warmup": 0})
    assert trials(DENSE, method) == "ValueError: it takes sequences of one length"


def test_each_way_to_split_is_asked_for(monkeypatch):
    asked, of_plans, plan = [], [], flash_decoding_speed.plan

    def noted_plan(step, backend):
        of_plans.append((step.splits, backend))
        return plan(step, backend)

    monkeypatch.setattr(flash_decoding_speed, "plan", noted_plan)
    monkeypatch.setattr(flash_decoding_speed, "flash_decoding", lambda *a, **options: asked.append(options))
    for shape in (DENSE, PAGED):
        batches = [random_inputs(shape, torch.float32, CPU, seed=0)]
        for method in OURS:
            (run,) = Trials.methods(CPU, shape)[method](batches)
            run()
    splits = [{name: o[name] for name in ("num_splits", "split_size") if name in o} for o in asked]
    assert splits == [{}, {"num_splits": 1}, {"num_splits": 1}, {"split_size": 512}]
    assert all(o["backend"] == "triton" and o["check"] is False for o in asked)
    wanted = (None, Splits("num", 1), Splits("num", 1), Splits("size", 512))
    assert of_plans == [(splits, "triton") for splits in wanted]


# ------------------------------------------------------------------------------------------------ figures


# A method takes a nanosecond per byte.
PLANTED = planted(Trials, lambda shape, method: shape.bytes(2) / 1e9)


def test_the_time_over_the_context_can_be_drawn(shown):
    shapes = [Shape(B, S, S) for S in (2048, 512) for B in (1, 8)]
    draw(records(PLANTED, [*shapes, Shape(1, 8, 9), PAGED]))
    (ax,) = shown[0].axes
    assert ax.get_legend_handles_labels()[1] == ["Flash-Decoding", "not split", "SDPA flash"]
    for line in ax.lines[:3]:
        assert list(line.get_xdata()) == [512, 2048]
        assert list(line.get_ydata()) == pytest.approx([Shape(1, S, S).bytes(2) / 1e3 for S in (512, 2048)])


def test_mixed_batches_can_be_drawn_beside_equal_ones(shown):
    draw_mixed(records(PLANTED, SHAPES[1:7], rate=2e9))
    (ax,) = shown[0].axes
    labels = [label.get_text() for label in ax.get_xticklabels()]
    assert labels[:3] == ["16 of 0.5–64 k", "16 of 14.4 k", "1 of 128 k, 31 of 1 k"]
    assert [bar.get_height() for bars in ax.containers for bar in bars] == pytest.approx([50.0] * 24)
    assert len(ax.containers) == len(OURS)


def test_records_that_cannot_be_drawn_are_an_error_that_says_what_there_is():
    found = records(PLANTED, [SHAPES[1], Shape(1, 8, 8, paged=1)], rate=2e9)
    with pytest.raises(ValueError, match=r"has num_seqs=16 paged=1; there are num_seqs=1 paged=1$"):
        draw(found, num_seqs=16, paged=True)  # the lengths of these 16 are mixed
    with pytest.raises(ValueError, match="has num_seqs=1 paged=0"):
        draw(found)
    dense = [record for record in found if not record.shape["paged"]]
    with pytest.raises(ValueError, match=r"has paged=1; there are none$"):
        draw_mixed(dense)
    with pytest.raises(ValueError, match=r"has paged=1; there are none$"):
        draw_mixed(found, methods=["unknown"])
    with pytest.raises(ValueError, match=r"has paged=1; there are none$"):
        draw_mixed([record._replace(limit_rate=None) for record in found])


def test_the_caption_is_that_of_the_records_that_are_drawn(shown):
    found = records(PLANTED, [Shape(8, 8, 8), Shape(1, 8, 8)])
    found = [r._replace(device="drawn" if r.shape["num_seqs"] == 1 else "not drawn") for r in found]
    draw(found)
    assert "drawn, " in shown[0].axes[0].get_xlabel()
    assert "not drawn" not in shown[0].axes[0].get_xlabel()


# ------------------------------------------------------------------------------------------------ what was measured


def test_the_choices_of_tuning_say_what_the_measurements_say():
    said = " ".join(tuning.__doc__.split())
    records = json.loads((ROOT / "lessons/measurements/flash_decoding.json").read_text())
    times = {
        (record["shape"]["num_seqs"], record["shape"]["longest"], record["what"]): record["seconds"]
        for record in records
    }
    ratios = {
        (n, longest): seconds / times[n, longest, "the heuristic's splits"]
        for (n, longest, what), seconds in times.items()
        if what == "Flash-Decoding"
    }
    equal = {(1, 131072): "one sequence of", (16, 14737): "16 of", (32, 5088): "32 of", (64, 7897): "64 of"}
    for (n, keys), words in equal.items():
        assert f"{words} {keys:,}" in said
        assert f"{keys:,} {'keys ' * (n == 1)}took {ratios[n, keys]:.2f}" in said
    mixed = [ratio for shape, ratio in ratios.items() if shape not in equal]
    assert f"equal shares of all keys took {min(mixed):.2f} to {max(mixed):.2f} of the time" in said
    assert times[64, 7897, "not split"] == pytest.approx(times[64, 7897, "the heuristic's splits"], rel=0.01)


def test_the_tiles_of_decoding_are_within_four_percent_of_the_fastest():
    found = json.loads((ROOT / "lessons/measurements/tile_times.json").read_text())
    cases = [case for case in found["cases"] if case["direction"] == "decode"]
    assert sorted((case["batch"], case["tokens"]) for case in cases) == [(1, 8192), (8, 8192)]
    for case in cases:
        assert tuple(case["default"]) == tuning.decode_tiles(8, 128, torch.bfloat16, torch.bfloat16)
        assert min(each.get("of_default", 1.0) for each in case["tiles"]) > 0.96
        assert len(case["tiles"]) == 24
