"""The records of measurements that pages quote: whole, of one machine, and with the numbers that the pages name."""

from pathlib import Path

import pytest

from pagewise.tools.records import recorded

FOLDER = Path(__file__).parents[2] / "lessons" / "measurements"
RECORDS = [path for path in sorted(FOLDER.glob("*.json")) if path.read_text(encoding="utf-8").startswith("[")]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_records_are_as_they_were_written_and_say_where_they_come_from(path):
    records = recorded(path)
    assert records
    for record in records:
        assert record.device.startswith("NVIDIA")
        assert record.driver
        assert record.commit
        assert record.versions["triton"]


def test_a_decode_step_as_a_graph_takes_the_time_that_lesson_9_names():
    of = {record.what: record.seconds for record in recorded(FOLDER / "engine.json")}
    one_by_one, as_graph = (
        of[f"gpt2-small, identical prompts, online, paged{x}: decode step"] for x in (", no graphs", "")
    )
    text = (FOLDER.parent / "09_engine.ipynb").read_text(encoding="utf-8")
    assert f"one by one in {1e3 * one_by_one:.1f} ms" in text
    assert f"took {1e3 * as_graph:.1f} ms as a graph" in text
