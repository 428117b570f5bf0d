"""`make bench`: every comparison is right before it is timed, and each has its table."""

import pytest
import torch

from pagewise.experiments import cpu_speed
from pagewise.tools.benchmark import ratios


@pytest.fixture(autouse=True)
def _short_and_with_as_many_threads_as_before(monkeypatch):
    monkeypatch.setattr(cpu_speed, "TOKENS", 20)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_every_way_is_right_and_in_the_table(capsys):
    cpu_speed.main(seconds=0.0, repeats=1)
    out = capsys.readouterr().out
    assert len(out.strip().split("\n\n")) == 6
    for name in (
        "list.append",
        "BlockManager, alone",
        "paged, gathered",
        "paged, streamed",
        "paged, packed",
        "observed",
        "checked",
        "triton",
        "flash_decoding, 4 splits",
    ):
        assert f"\n{name}" in out
    assert "×" in out
    assert "–" not in out  # nothing failed


def test_a_wrong_way_has_a_row_without_a_ratio(monkeypatch, capsys):
    right = torch.ones(2, 2)
    planted = ("title", {"first": right.clone, "second": right.neg}, right)
    monkeypatch.setattr(cpu_speed, "contests", lambda: [lambda: planted])
    cpu_speed.main(seconds=0.0, repeats=1)
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("second"))
    assert "–  wrong: relative error 2" in row


def test_growing_a_sequence_leaves_the_pool_as_it_was():
    _, functions, _ = cpu_speed.block_manager()
    for run in functions.values():
        run()
        run()
    assert ratios(functions, seconds=0.0, repeats=1)
