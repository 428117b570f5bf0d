"""Published times over their shapes: marks, the model through them, the least time, and one GPU at a time."""

import drawn
import pytest

from pagewise import figures
from pagewise.experiments import published


def test_marks_are_measured_and_the_model_runs_through_them(shown):
    rows = published.rows(table="flash_decoding")
    figures.published(rows, constants={"FlashAttention-2": 0.5}, title="Where do 2,300 µs go?", level="67 MB")
    (ax,) = shown[0].axes
    measured, modelled, _, other, least = ax.lines
    assert [*measured.get_ydata()] == pytest.approx([1e6 * row.seconds for row in rows[::2]])
    assert [*modelled.get_ydata()] == pytest.approx([1e6 * row.model(0.5) for row in rows[::2]])
    assert [*other.get_ydata()] == pytest.approx([1e6 * row.seconds for row in rows[1::2]])
    assert 32 < min(least.get_ydata()) < max(least.get_ydata()[:9]) < 35
    assert [label.get_text() for label in ax.get_xticklabels()][:2] == ["256 × 256", "128 × 512"]
    assert drawn.titles(shown[0]) == ["Where do 2,300 µs go?"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "FlashAttention-2", "the model, 0.50 of the peak", "Flash-Decoding", "67 MB",
    ]  # fmt: skip


def test_the_words_say_the_first_and_the_last_time(shown):
    figures.published(published.rows(table="flash_decoding"))
    words = shown[0]._repr_mimebundle_()["text/plain"]
    assert "FlashAttention-2 takes 390 µs at 256 × 256 and 4,592 µs at 1 × 131,072" in words
    assert "the least time is 34 µs and 66 µs" in words
    assert shown[0].axes[0].get_legend().get_texts()[-1].get_text() == "least time, A100"


@pytest.mark.parametrize(
    ("rows", "message"),
    [([], "got no rows"), (published.rows(kernel="FlashMLA"), "got H100, H20")],
    ids=["none", "two"],
)
def test_rows_are_of_one_gpu(rows, message):
    with pytest.raises(ValueError, match=message):
        figures.published(rows)
