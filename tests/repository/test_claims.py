"""The claims in notebooks: rows of tables and argued sections are found, faults are refused, and all are listed."""

import json

import pytest

from claims import COLUMNS, SOURCES, broken_links, claims_of, ledger, slug
from conftest import ROOT
from pagewise import figures

ROWS = [
    ("a | b", "KV", "4 of 4", "true", "[lesson 2](02_b.ipynb)"),
    ("c", "KV, HW", "9 %", "open: it depends on P", ""),
]
ARGUED = """### Which is it?

> **[HW]** The first sentence,
> which is long.

Some text. **Not** a verdict.

**Verdict: partly true.** Because of x. And of y.

### The other claims"""


def notebook(path, title, *parts):
    """Write a notebook of texts and of tables of claims."""
    cells = [{"cell_type": "markdown", "source": [f"# {title}\n", "text"], "metadata": {}}]
    for part in parts:
        if isinstance(part, str):
            cells.append({"cell_type": "markdown", "source": [part], "metadata": {}})
        else:
            shown = {"text/markdown": figures.table(COLUMNS, part)._repr_markdown_(), "text/plain": "x"}
            output = {"output_type": "execute_result", "data": shown, "metadata": {}}
            cells.append({"cell_type": "code", "source": [], "outputs": [output], "metadata": {}})
    path.write_text(json.dumps({"cells": cells}))
    return path


def test_rows_and_argued_claims_are_found_in_order(tmp_path):
    argued, first, second = claims_of(notebook(tmp_path / "s.ipynb", "S", ARGUED, ROWS))
    assert argued[:5] == ("The first sentence, which is long", ("HW",), "Because of x", "partly true", "")
    assert argued.address == "s.ipynb#which-is-it"
    assert first == ("a \\| b", ("KV",), "4 of 4", "true", "[lesson 2](02_b.ipynb)", "s.ipynb#the-other-claims")
    assert second[1:] == (("KV", "HW"), "9 %", "open: it depends on P", "", "s.ipynb#the-other-claims")
    assert [claim.kind for claim in (argued, first, second)] == ["partly true", "true", "open"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("", "KV", "b", "true", ""), "s.ipynb: a claim must have .*, none of them empty"),
        (("a", "KV", "", "true", ""), "none of them empty"),
        (("a", "QI", "b", "true", ""), "a source must be among KV, .*, got 'QI': a"),
        (("a", "KV", "b", "right", ""), "a verdict must begin with one of true, .*, got 'right': a"),
    ],
    ids=["no claim", "nothing found", "source", "verdict"],
)
def test_a_row_that_is_not_whole_or_names_what_is_not_known_is_refused(tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        claims_of(notebook(tmp_path / "s.ipynb", "S", [*ROWS, row]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("## A\n> **[KV]** a\n\n## B\n", "the section 'A' has no verdict for 'a'"),
        ("## A\n> **[KV]** a", "the section 'A' has no verdict for 'a'"),
        ("## A\n**Verdict: true.** b", "the section 'A' has a verdict and no quotation"),
        ("## A\n> **[KV]** a\n\n**Verdict: right.** b", "a verdict must begin with"),
    ],
    ids=["before a heading", "at the end", "no quotation", "unknown"],
)
def test_a_quotation_and_its_verdict_stand_in_one_section(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        claims_of(notebook(tmp_path / "s.ipynb", "S", text))


def test_code_in_a_text_has_no_headings(tmp_path):
    text = "## A\n> **[KV]** a\n\n```\n# no heading\n```\n\n**Verdict: true.** b"
    assert claims_of(notebook(tmp_path / "s.ipynb", "S", text))[0].address == "s.ipynb#a"


def test_the_bibliography_has_every_source():
    page = (ROOT / "lessons" / "bibliography.md").read_text()
    assert [short for short, full in SOURCES.items() if f"**[{short}]** {full}" not in page] == []


def test_the_ledger_counts_all_claims_and_links_to_their_tests(tmp_path):
    notebook(tmp_path / "sources.ipynb", "The sources", ARGUED, ROWS)
    notebook(tmp_path / "02_b.ipynb", "Lesson 2: B", "## Costs", [("d", "HW", "1", "a slip: mostly", "")])
    page = ledger(tmp_path)
    assert "tests 4 claims" in page
    assert "| source | true | partly true | a slip | open | all |" in page
    assert "| [KV](bibliography.md) | 1 | 0 | 0 | 1 | 2 |" in page
    assert "| [HW](bibliography.md) | 0 | 1 | 1 | 1 | 3 |" in page
    assert "| all claims | 1 | 1 | 1 | 1 | 4 |" in page
    assert "- [d](02_b.ipynb#costs) [HW]" in page
    row = "| a \\| b | KV | 4 of 4 | [true](sources.ipynb#the-other-claims) | [lesson 2](02_b.ipynb) |"
    assert row in page
    assert page.index("## Lesson 2: B") < page.index("## The sources") < page.index("| a \\| b |")


def test_a_link_to_what_does_not_exist_is_named_with_the_headings_that_do(tmp_path):
    notebook(tmp_path / "02_b.ipynb", "Lesson 2: B", "## Costs: `N²`")
    text = "[a](02_b.ipynb), [b](02_b.ipynb#costs-n²), [c](02_b.ipynb#cost), [d](03_c.ipynb), [e](#s), [f](#t)"
    page = notebook(tmp_path / "s.ipynb", "S", text)
    cost, missing, own = broken_links(page)
    assert cost.startswith("s.ipynb links to 02_b.ipynb#cost, but 02_b.ipynb has no such heading. Link to the page")
    assert cost.endswith("alone, or to one of its headings: lesson-2-b, costs-n²")
    assert missing == "s.ipynb links to 03_c.ipynb, which does not exist"
    assert own.startswith("s.ipynb links to s.ipynb#t, but")


def test_slugs_are_those_of_the_book():
    assert slug("Two passes, and `one`: O(N²)") == "two-passes-and-one-on²"
