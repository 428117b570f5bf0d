"""The glossary's links, the map and the link to report a mistake, on small pages."""

import re
from types import SimpleNamespace

import pytest

pytest.importorskip("sphinx", reason="the book is rendered with the extra `book`")

from docutils import nodes

import book
from conftest import ROOT

LESSONS = {path.stem for path in (ROOT / "lessons").glob("*.ipynb")}
TERMS = book.terms_of((ROOT / "lessons" / "glossary.md").read_text())


def page(*paragraphs: nodes.Node) -> nodes.document:
    document = nodes.document(None, None)
    document += [nodes.paragraph("", "", *(p if isinstance(p, list) else [p])) for p in paragraphs]
    return document


def linked(document: nodes.document) -> list[tuple[str, str]]:
    return [(link.astext(), link["refuri"]) for link in document.findall(nodes.reference) if "term" in link["classes"]]


def test_every_row_of_the_glossary_is_a_term_with_a_meaning_and_a_lesson():
    rows = (ROOT / "lessons" / "glossary.md").read_text().count("\n| ") - 1  # the head
    assert len(TERMS) == rows > 50
    assert {term.lesson for term in TERMS} <= LESSONS
    assert len({term.anchor for term in TERMS}) == rows
    names = [name.lower() for term in TERMS for name in term.names + term.searched]
    assert len(set(names)) == len(names)
    assert [term.names[0].lower() for term in TERMS] == sorted(term.names[0].lower() for term in TERMS)


def test_names_in_parentheses_are_searched_for_and_never_linked():
    (term,) = book.terms_of("| PTX, asm (and NVRTC, page) | an *assembly* `language` | [5](05_x.ipynb) |")
    assert term == (("PTX", "asm"), ("NVRTC", "page"), "an assembly language", "05_x")


def test_a_search_finds_terms_on_pages_that_are_not_rendered_anew():
    app = SimpleNamespace(srcdir=ROOT / "lessons")
    env = SimpleNamespace(found_docs={"glossary", "05_paged_attention"}, _search_index_index_entries={})
    book.keep_search_entries(app, env)
    kept = env._search_index_index_entries
    assert ("NVRTC", "term-ptx", "main") in kept["glossary"]
    assert ("warp", "", "main") in kept["05_paged_attention"]
    assert ("window", "", "main") not in kept["05_paged_attention"]


def test_the_first_use_on_a_page_is_linked_and_no_other():
    document = page(nodes.Text("Shared memory is fast. Shared memory has banks."), nodes.Text("Two warps share it."))
    book.link_terms(document, TERMS)
    assert linked(document) == [
        ("Shared memory", "glossary.html#term-shared-memory"),
        ("warps", "glossary.html#term-warp"),
    ]
    assert document.astext() == "Shared memory is fast. Shared memory has banks.\n\nTwo warps share it."


def test_headings_code_links_and_outputs_are_left_alone():
    output = nodes.container("", nodes.paragraph("", "a warp"), classes=["cell_output"])
    document = page([nodes.literal("", "warp")], [nodes.reference("", "warp", refuri="x")], [nodes.strong("", "warp")])
    document.insert(0, nodes.section("", nodes.title("", "The warp")))
    document += output
    book.link_terms(document, TERMS)
    assert linked(document) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a long prompt: chunked prefill", ["chunked prefill"]),  # not the term inside
        ("overlaps, swarm, warped, sub-warp", []),
        ("grouped-query attention (GQA) and GQA", ["grouped-query attention"]),  # two names of one term
        ("An SM, a sm", ["SM"]),
        ("batches", ["batches"]),
        ("shared\nmemory", ["shared\nmemory"]),
    ],
    ids=["longest", "whole words", "one link", "capitals", "plural", "line break"],
)
def test_what_counts_as_a_use(text, expected):
    document = page(nodes.Text(text))
    book.link_terms(document, TERMS)
    assert [words for words, _ in linked(document)] == expected


def test_every_lesson_is_a_box_of_the_map():
    links = re.findall(r'<a href="(\w+)\.html"', (ROOT / "lessons" / "map.svg").read_text())
    lessons = sorted(name for name in LESSONS if name[0].isdigit() and not name.endswith("_in_depth"))
    assert sorted(set(links)) == lessons
    assert links.count("01_naive_attention") == 2  # its box, and the start


def test_the_link_to_report_a_mistake_names_the_page(monkeypatch):
    monkeypatch.setenv("GITHUB_REPOSITORY", "ada/pages")
    context = {"body": "<p>text</p>", "title": "Lesson 5: <em>Q &amp; K</em>"}
    book.report_mistake(SimpleNamespace(), "05", "page.html", context, None)
    address = "https://github.com/ada/pages/issues/new?template=mistake.yml&amp;page=Lesson+5%3A+Q+%26+K"
    assert f'<a href="{address}">' in context["body"]
    assert (ROOT / ".github" / "ISSUE_TEMPLATE" / "mistake.yml").read_text().count("id: page\n") == 1
