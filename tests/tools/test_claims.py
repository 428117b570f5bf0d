"""The table of claims: one format, no empty cell, every source and verdict known; and the ledger made of all tables."""

import json

import pytest

from conftest import ROOT
from pagewise.tools.claims import SOURCES, claims, ledger, slug, stored

ROWS = [("a | b", "KV", "4 of 4", "true", "Rows"), ("c", "KV, HW", "9 %", "open: it depends on P", "The Cost: $P$")]


def test_a_table_folded_with_its_sources():
    text = claims(*ROWS)._repr_markdown_()
    assert text.startswith("<details><summary>The claims, and what was found: 2 of them</summary>\n\n")
    assert f"Sources: **[KV]** {SOURCES['KV']}; **[HW]** {SOURCES['HW']}.\n" in text
    assert "| claim | source | found here | verdict | section |\n| --- | --- | --- | --- | --- |\n" in text
    assert "\n| a \\| b | KV | 4 of 4 | true | Rows |\n" in text


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("a", "KV", "", "true", "b"), "no cell empty"),
        (("a", "KV", " ", "true", "b"), "no cell empty"),
        (("a", "KV", "b", "true"), "no cell empty"),
        (("a", "QI", "b", "true", "c"), "source must be among KV, .*, got 'QI'"),
        (("a", "KV", "b", "right", "c"), "verdict must begin with one of true, .*, got 'right'"),
    ],
)
def test_a_row_that_is_not_whole_or_names_what_is_not_known_is_refused(row, message, shapes_unchecked):
    with pytest.raises(ValueError, match=message):
        claims(*ROWS, row)


def test_the_bibliography_has_every_source():
    page = (ROOT / "lessons" / "bibliography.md").read_text()
    assert [short for short, full in SOURCES.items() if f"**[{short}]** {full}" not in page] == []


def notebook(path, title, *rows):
    output = {"output_type": "display_data", "data": {"text/markdown": claims(*rows)._repr_markdown_()}}
    cells = [{"cell_type": "markdown", "source": [f"# {title}\n", "text"]}, {"cell_type": "code", "outputs": [output]}]
    path.write_text(json.dumps({"cells": cells}))


def test_the_ledger_counts_all_tables_and_links_to_sections(tmp_path):
    notebook(tmp_path / "01_a.ipynb", "Lesson 1: A", *ROWS)
    notebook(tmp_path / "02_b.ipynb", "Lesson 2: B", ("d", "HW", "1", "true: mostly", "Costs"))
    assert stored(tmp_path / "01_a.ipynb")[0] == ["a \\| b", *ROWS[0][1:]]
    page = ledger(tmp_path)
    assert "test 3 claims" in page
    assert "| source | true | open | all |" in page
    assert "| [KV](bibliography.md) | 1 | 1 | 2 |" in page
    assert "| [HW](bibliography.md) | 1 | 1 | 2 |" in page
    assert "| all claims | 2 | 1 | 3 |" in page
    assert "| c | KV, HW | 9 % | [open: it depends on P](01_a.ipynb#the-cost-p) |" in page
    assert page.index("## Lesson 1: A") < page.index("| a \\| b |") < page.index("## Lesson 2: B")


def test_slugs_are_those_of_the_book():
    assert slug("Two passes, and `one`: O(N²)") == "two-passes-and-one-on²"
