"""The table of claims: one format, no empty cell, every source named."""

import pytest

from pagewise.tools.claims import claims

SOURCES = {"KV": "notes on the KV cache", "HW": "a blog"}
ROWS = [("a | b", "KV", "4 of 4", "true"), ("c", "KV, HW", "9 %", "depends on P")]


def test_a_table_folded_with_its_sources():
    text = claims(SOURCES, *ROWS)._repr_markdown_()
    assert text.startswith("<details><summary>The claims, and what was found: 2 of them</summary>\n\n")
    assert "**[KV]** notes on the KV cache; **[HW]** a blog." in text
    assert (
        "| claim | source | found here | verdict |\n| --- | --- | --- | --- |\n| a \\| b | KV | 4 of 4 | true |" in text
    )


@pytest.mark.parametrize("row", [("a", "KV", "", "true"), ("a", "KV", " ", "true"), ("a", "KV", "true")])
def test_no_cell_is_empty(row, shapes_unchecked):
    with pytest.raises(ValueError, match="no cell empty"):
        claims(SOURCES, *ROWS, row)


def test_sources_are_those_that_are_named():
    with pytest.raises(ValueError, match="source must be among KV, HW, got 'QI'"):
        claims(SOURCES, *ROWS, ("a", "QI", "b", "true"))
    with pytest.raises(ValueError, match="no claim is from HW"):
        claims(SOURCES, ROWS[0])
