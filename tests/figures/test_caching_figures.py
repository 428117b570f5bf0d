"""Figures of lessons 1 to 3: where a cache pays, who fits on a GPU, what is free, and what needs float32."""

import drawn
import pytest

from pagewise.experiments.cached_steps import Times
from pagewise.figures import caching
from pagewise.figures.attention import busy_units, free_changes
from pagewise.figures.caching import next_token_times, users_until_full
from pagewise.figures.dataflow import decoder_shapes, three_kernels
from pagewise.figures.merges import precision_errors
from pagewise.tools.roofline import standard_attention_bytes


def test_each_machine_has_a_panel_with_two_curves_and_its_ridge(shown):
    lengths = [1, 8, 64]
    machines = [Times(name, lengths, [0.001, 0.002, 0.016], [0.001] * 3, 12.0) for name in ("a CPU", "a GPU")]
    next_token_times(*machines)
    assert drawn.titles(shown[0]) == ["a CPU", "a GPU"]
    assert "up to the ridge at 12 tokens, a step without a cache takes at most 2.0 times" in caching._said(machines)
    for ax in shown[0].axes:
        without, cached, ridge = ax.get_lines()
        assert without.get_ydata().tolist() == pytest.approx([1, 2, 16])
        assert cached.get_ydata().tolist() == pytest.approx([1, 1, 1])
        assert list(ridge.get_xdata()) == [12.0, 12.0]


def test_every_model_ends_with_the_users_that_fill_the_memory(shown):
    users_until_full({"large": [10.0, 20.0, 40.0], "small": [5.0, 40.0]}, 42.1)
    (ax,) = shown[0].axes
    assert ax.get_title(loc="left") == "A full GPU takes 42 ms for a token, whatever the model"
    names = ax.get_legend_handles_labels()[1]
    assert names[1:] == ["large: 3 users fit", "small: 2 users fit"]


def test_a_size_that_decode_changes_is_bold(shown):
    prefill = {"q": (1, 8, 6, 32), "K": (1, 2, 6, 32)}
    decoder_shapes(prefill, {"q": (1, 8, 1, 32), "K": (1, 2, 7, 32)})
    texts = drawn.texts(shown[0].axes[0])
    assert r"q [1, 8, $\mathbf{6 \to 1}$, 32]" in texts
    assert r"KV cache: $\mathbf{6 \to 7}$ tokens" in texts


def test_the_title_of_three_kernels_is_the_share_of_scores_and_p(shown):
    three_kernels(standard_attention_bytes(B=1, H=12, Hkv=12, T=1024, S=1024, D=64))
    assert shown[0].get_suptitle().startswith("94% of the bytes are scores and P")


def test_a_change_of_the_scores_has_two_bars(shown):
    free_changes({"no option": 600.0, "softcap": 1000.0}, {"no option": 12.0, "softcap": 12.0})
    widths = [patch.get_width() for patch in shown[0].axes[0].patches]
    assert widths == [600.0, 1000.0, 12.0, 12.0]


def test_each_unit_has_a_bar_for_each_change(shown):
    busy_units({"no change": {"tensor cores": 2.0, "lanes": 1.0}, "softcap": {"tensor cores": 2.0, "lanes": 4.0}}, 64)
    assert [patch.get_width() for patch in shown[0].axes[0].patches] == [2.0, 2.0, 1.0, 4.0]


def test_each_precision_is_a_curve(shown):
    precision_errors([256, 512], {"float32": [1e-7, 2e-7], "bfloat16": [1e-3, 1e-1]})
    curves = [line.get_ydata().tolist() for line in shown[0].axes[0].get_lines()]
    assert curves == [[1e-7, 2e-7], [1e-3, 1e-1]]
