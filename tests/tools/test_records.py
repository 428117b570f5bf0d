"""Records: kept as they come, read again as they were, and not believed when they were changed."""

import json

import pytest
import torch

from pagewise.tools import records
from pagewise.tools.records import Record, keep, recorded, surroundings, table, table_of

ABOUT = {
    "device": "GPU",
    "driver": "580",
    "versions": {"torch": "2", "cuda": None},
    "date": "2026-01-02",
    "commit": "c0",
}
TIMED = Record("a", {"B": 8}, "bfloat16", **ABOUT, how="cold L2", bytes=10**9, flops=10**10, limit="copy",
               limit_rate=4e12, seconds=5e-4, spread=1e-5)  # fmt: skip
REFUSED = TIMED._replace(what="b", seconds=None, spread=None, refused="too long")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "measurements" / "x.json"


def test_nothing_recorded_is_none(path):
    assert recorded(path) is None


def test_what_was_kept_is_read_again(path):
    keep(path, TIMED)
    keep(path, REFUSED)
    assert recorded(path) == [TIMED, REFUSED]
    assert len(path.read_text().splitlines()) == 4  # a record per line


def test_a_newer_record_of_the_same_takes_the_place_of_the_older(path):
    for record in (TIMED, REFUSED, TIMED._replace(seconds=1e-3, date="2026-01-03")):
        keep(path, record)
    assert [record.date for record in recorded(path)] == ["2026-01-03", "2026-01-02"]
    for other in ({"what": "c"}, {"shape": {"B": 9}}, {"dtype": "float16"}, {"device": "another"}):
        keep(path, TIMED._replace(**other))
    assert len(recorded(path)) == 6


def test_a_run_that_is_cut_off_keeps_what_it_has(path, monkeypatch):
    keep(path, TIMED)

    def cut_off(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(records.os, "replace", cut_off)
    with pytest.raises(KeyboardInterrupt):
        keep(path, REFUSED)
    assert recorded(path) == [TIMED]


def test_the_fraction_is_that_of_the_limit():
    assert TIMED.fraction == 0.5
    assert TIMED._replace(limit="matmul").fraction == 5.0
    assert TIMED._replace(limit_rate=None).fraction is None
    assert REFUSED.fraction is None


@pytest.mark.parametrize("field", [*Record._fields, "digest"])
def test_a_missing_field_is_noticed(path, field):
    changed(path, lambda entry: entry.pop(field))
    with pytest.raises(ValueError, match=f"x.json, record 1: {field} missing; measure it again"):
        recorded(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("seconds", 2.5e-4), ("spread", 0.0), ("date", "2026-09-09"), ("device", "H200"), ("shape", {"B": 64}),
     ("versions", {"torch": "3", "cuda": None}), ("commit", "d0"), ("digest", "0" * 16), ("what", 1), ("shape", []),
     ("bytes", True), ("flops", None), ("limit", "wish"), ("seconds", "0.5"), ("wish", 1)],
)  # fmt: skip
def test_a_record_that_was_edited_by_hand_is_noticed_and_nothing_is_added_to_its_file(path, field, value):
    changed(path, lambda entry: entry.update({field: value}))
    message = "wish unknown" if field == "wish" else "changed by hand"
    with pytest.raises(ValueError, match=message):
        recorded(path)
    with pytest.raises(ValueError, match=message):
        keep(path, REFUSED)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"limit_rate": -4e12}, "limit_rate must be above 0"),
        ({"seconds": 0.0}, "seconds must be above 0"),
        ({"spread": -1e-5}, "spread at least 0"),
        ({"refused": "and timed"}, "or the reason"),
        ({"seconds": None}, "or the reason"),
        ({"spread": None}, "or the reason"),
        ({"date": "yesterday"}, "isoformat"),
        ({"seconds": float("nan")}, "not JSON compliant"),
        ({"limit_rate": float("inf")}, "not JSON compliant"),
    ],
)
def test_a_record_that_contradicts_itself_is_not_kept(path, fields, message):
    with pytest.raises(ValueError, match=message):
        keep(path, TIMED._replace(**fields))
    assert not path.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "x.json, record 1: it must be an object, got int"),
        ("{}", "x.json must hold a list of records, got dict"),
        ('[{"what": ', "x.json is not JSON"),
    ],
)
def test_what_is_no_record_is_noticed(path, text, message):
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        recorded(path)


def test_surroundings_make_a_record(path, device):
    about = surroundings(device)
    keep(path, TIMED._replace(**about))
    (found,) = recorded(path)
    assert found.versions["torch"] == torch.__version__
    assert {"python", "cuda", "triton", "pagewise"} <= set(found.versions)
    assert found.device.startswith("CPU") == (device.type == "cpu")


@pytest.mark.parametrize(
    ("git", "commit"), [(None, None), ("false", None), ("true", None), ("echo d0; echo more", "d0")]
)
def test_the_commit_is_what_git_prints_and_none_without_git(git, commit, tmp_path, monkeypatch):
    if git:
        (tmp_path / "git").write_text(f"#!/bin/sh\n{git}\n")
        (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert surroundings(torch.device("cpu"))["commit"] == commit


def test_a_table_is_aligned():
    assert table(("what", "time", "note"), [("ab", "1", "x"), ("c", "22", "long")]) == (
        "what  time  note\n"
        "ab       1  x\n"
        "c       22  long"
    )  # fmt: skip


def test_a_table_of_records_has_a_line_for_each_and_a_part_for_each_shape():
    other = TIMED._replace(shape={"B": 9}, limit="matmul", limit_rate=1e14)
    text = table_of([TIMED, REFUSED, other])
    first, second = (part.splitlines() for part in text.split("\n\n"))
    assert first[0].startswith("B 8, bfloat16")
    assert " ".join(first[1].split()) == "a 500.0 µs 2.0% 2,000.0 GB/s 50.0% copy cold L2"
    assert " ".join(first[2].split()) == "b – – – – too long"
    assert " ".join(second[1].split()) == "a 500.0 µs 2.0% 20,000.0 GFLOP/s 20.0% matmul cold L2"


def changed(path, change):
    """A file with one record that was changed by hand."""
    keep(path, TIMED)
    (entry,) = json.loads(path.read_text())
    change(entry)
    path.write_text(json.dumps([entry]))
