"""The table of claims: one format, no empty cell, every source known; the lessons' own tables are whole."""

import json

import pytest

from conftest import ROOT
from pagewise.tools.claims import SOURCES, claims

ROWS = [("a | b", "KV", "4 of 4", "true"), ("c", "KV, HW", "9 %", "depends on P")]


def test_a_table_folded_with_its_sources():
    text = claims(*ROWS)._repr_markdown_()
    assert text.startswith("<details><summary>The claims, and what was found: 2 of them</summary>\n\n")
    assert f"Sources: **[KV]** {SOURCES['KV']}; **[HW]** {SOURCES['HW']}.\n" in text
    assert "| claim | source | found here | verdict |\n| --- | --- | --- | --- |\n" in text
    assert "\n| a \\| b | KV | 4 of 4 | true |\n" in text


@pytest.mark.parametrize("row", [("a", "KV", "", "true"), ("a", "KV", " ", "true"), ("a", "KV", "true")])
def test_no_cell_is_empty(row, shapes_unchecked):
    with pytest.raises(ValueError, match="no cell empty"):
        claims(*ROWS, row)


def test_sources_are_those_that_are_known():
    with pytest.raises(ValueError, match=r"source must be among KV, .*, got 'QI'"):
        claims(*ROWS, ("a", "QI", "b", "true"))


def test_the_bibliography_has_every_source():
    page = (ROOT / "lessons" / "bibliography.md").read_text()
    assert [short for short, full in SOURCES.items() if f"**[{short}]** {full}" not in page] == []


@pytest.mark.parametrize("lesson", sorted((ROOT / "lessons").glob("*.ipynb")), ids=lambda path: path.stem)
def test_every_lesson_ends_with_its_claims(lesson):
    outputs = [out for cell in json.loads(lesson.read_text())["cells"] for out in cell.get("outputs", [])]
    shown = ["".join(out.get("data", {}).get("text/markdown", "")) for out in outputs]
    (table,) = [text for text in shown if text.startswith("<details><summary>The claims")]
    rows = [line for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 5
    for row in rows:
        cells = row.strip("| ").replace("\\|", "/").split(" | ")
        assert len(cells) == 4, row
        assert all(cell.strip() for cell in cells), row
