"""A Sphinx extension with the parts of the book that Sphinx lacks: lessons/conf.py names it.

- The map of the lessons on the front page is part of the page, so that its boxes are links.
- Each page links a term of the glossary where the page first uses the term. A search for a term finds the glossary and
  the lesson that explains the term.
- Each page ends with a link to report a mistake.
"""

import html
import os
import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlencode

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

from address import repository

GLOSSARY = "glossary"
_ROW = re.compile(r"^\| (?P<names>[^|]+) \| (?P<meaning>[^|]+) \| \[\d+\]\((?P<lesson>\w+)\.ipynb\) \|$", re.MULTILINE)
# No term is linked inside of these.
_TEXTS = (nodes.title, nodes.reference, nodes.strong, nodes.caption)
_CODE = (nodes.literal, nodes.literal_block, nodes.math, nodes.math_block, nodes.raw)


class Term(NamedTuple):
    """A row of the glossary: its names, the names that only the search knows, the meaning, and the lesson about it."""

    names: tuple[str, ...]
    searched: tuple[str, ...]
    meaning: str
    lesson: str

    @property
    def anchor(self) -> str:
        """The id of the row on the page of the glossary."""
        return "term-" + re.sub(r"\W+", "-", self.names[0].lower()).strip("-")


def terms_of(text: str) -> list[Term]:
    """Return the terms of the glossary's Markdown. No page links the names in parentheses: they are everyday words."""
    terms = []
    for row in _ROW.finditer(text):
        linked, _, others = row["names"].partition(" (")
        searched = others.removeprefix("and ").rstrip(")")
        terms.append(Term(_split(linked), _split(searched), re.sub(r"[`*]", "", row["meaning"]), row["lesson"]))
    return terms


def _split(names: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in names.split(",") if name.strip())


def pattern_of(name: str) -> re.Pattern[str]:
    """Return what finds a name in a text: in singular or plural, and in lower case or at the start of a sentence."""
    first = f"[{name[0].upper()}{name[0].lower()}]" if name[1:].islower() or " " in name else re.escape(name[0])
    words = re.escape(name[1:]).replace(r"\ ", r"\s+")
    return re.compile(rf"(?<![\w-]){first}{words}(?:e?s)?(?![\w-])")


def link_terms(doctree: nodes.document, terms: list[Term]) -> None:
    """Link each term where the page first uses it, outside of headings, code, formulas and outputs."""
    waiting = {name: (pattern_of(name), term) for term in terms for name in term.names if len(name) > 1}
    for text in list(doctree.findall(nodes.Text)):
        if _is_left_alone(text):
            continue
        found = []
        for name, (pattern, term) in waiting.items():
            if match := pattern.search(text):
                found.append((match.start(), -match.end(), name, term))
        parts, end = [], 0
        for start, minus_stop, name, term in sorted(found):
            if start < end or name not in waiting:  # inside of a longer term, or linked by its other name
                continue
            parts += [nodes.Text(text[end:start]), _reference(text[start:-minus_stop], term)]
            end = -minus_stop
            waiting = {other: found for other, found in waiting.items() if found[1] is not term}
        if parts:
            text.parent.replace(text, [*parts, nodes.Text(text[end:])])


def _is_left_alone(text: nodes.Text) -> bool:
    node = text.parent
    while node is not None:
        if isinstance(node, _TEXTS + _CODE) or "cell_output" in node.get("classes", ()):
            return True
        node = node.parent
    return False


def _reference(words: str, term: Term) -> nodes.reference:
    uri = f"{GLOSSARY}.html#{term.anchor}"
    return nodes.reference("", words, internal=True, refuri=uri, reftitle=term.meaning, classes=["term"])


def name_rows(doctree: nodes.document, terms: list[Term]) -> None:
    """Give each row of the glossary its anchor."""
    rows = [row for row in doctree.findall(nodes.row) if isinstance(row.parent, nodes.tbody)]
    for row, term in zip(rows, terms, strict=True):
        next(row.findall(nodes.paragraph))["ids"].append(term.anchor)


def search_entries(docname: str, terms: list[Term]) -> list[tuple[str, str]]:
    """Return (name, anchor) of the terms that a search finds first on a page: on the glossary, and in its lesson."""
    if docname == GLOSSARY:
        return [(name, term.anchor) for term in terms for name in term.names + term.searched]
    return [(name, "") for term in terms if term.lesson == docname for name in term.names]


def terms_of_book(app: Sphinx) -> list[Term]:
    """Return the terms of the glossary that is being rendered."""
    return terms_of((Path(app.srcdir) / f"{GLOSSARY}.md").read_text(encoding="utf-8"))


def read_page(app: Sphinx, doctree: nodes.document) -> None:
    """Change a page before Sphinx writes it."""
    docname, terms = app.env.docname, terms_of_book(app)
    for file in (f"{GLOSSARY}.md", "map.svg"):
        app.env.note_dependency(Path(app.srcdir) / file)
    entries = search_entries(docname, terms)
    doctree.insert(0, addnodes.index(entries=[("single", name, anchor, "main", None) for name, anchor in entries]))
    if docname == GLOSSARY:
        name_rows(doctree, terms)
        return
    link_terms(doctree, terms)
    for image in list(doctree.findall(nodes.image)):
        if image["uri"].endswith("map.svg"):
            svg = (Path(app.srcdir) / "map.svg").read_text(encoding="utf-8")
            image.parent.replace(image, nodes.raw("", f'<div class="map">{svg}</div>', format="html"))


def keep_search_entries(app: Sphinx, env: BuildEnvironment) -> None:
    """Give the search the entries of the pages that are not rendered anew. Sphinx forgets them."""
    terms, kept = terms_of_book(app), getattr(env, "_search_index_index_entries", {})
    for docname in env.found_docs:
        kept[docname] = [(name, anchor, "main") for name, anchor in search_entries(docname, terms)]


def report_mistake(app: Sphinx, pagename: str, templatename: str, context: dict, doctree: object) -> None:
    """End the page with a link to report a mistake, which fills in the name of the page, and one to the repository."""
    if "body" not in context:
        return
    address = f"https://github.com/{os.environ.get('GITHUB_REPOSITORY') or repository()}"
    title = re.sub(r"<[^>]+>", "", context.get("title", pagename))
    query = urlencode({"template": "mistake.yml", "page": html.unescape(title)})
    context["body"] += (
        f'<p class="report"><a href="{address}/issues/new?{html.escape(query)}">Report a mistake on this page</a> · '
        f'<a href="{address}">The repository</a></p>'
    )


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the functions of this extension."""
    app.connect("doctree-read", read_page)
    app.connect("env-updated", keep_search_entries)
    app.connect("html-page-context", report_mistake)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
