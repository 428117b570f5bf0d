"""Turns the lessons into the book: `make book`, or `make lessons` to run them first.

Notebooks are rendered from their stored outputs. Links from a lesson to the package, ../src/…,
../kernels/… and ../tests/…, lead to pages with the highlighted source, which are made here.
"""

import html
import os
import re
import sys
from pathlib import Path

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename
from sphinx.util import logging

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src" / "repository"))  # which has book.py

project = "Attention, Page by Page"
author = "the pagewise authors"
copyright = "the pagewise authors, Apache-2.0"

extensions = ["myst_nb", "sphinx-mathjax-offline", "book"]
nb_execution_mode = "off"
nb_merge_streams = True
nb_render_markdown_format = "myst"
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3
exclude_patterns = ["measurements", "**.ipynb_checkpoints"]

html_theme = "sphinx_book_theme"
html_title = project
html_static_path = [str(ROOT / "lessons" / "_static")]
html_css_files = ["pagewise.css"]
html_js_files = ["pagewise.js", "print.js"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "use_download_button": False,
    "use_fullscreen_button": False,
    "show_toc_level": 2,
    "home_page_in_toc": False,
    "navbar_persistent": [],
}
# GitHub names the repository. There, each lesson has a button that opens it on Colab. The
# workflow of the book writes the branch colab with src/repository/colab.py.
if "GITHUB_REPOSITORY" in os.environ:
    html_theme_options |= {
        "repository_url": f"https://github.com/{os.environ['GITHUB_REPOSITORY']}",
        "repository_branch": "colab",
        "launch_buttons": {"colab_url": "https://colab.research.google.com"},
    }

_LINK = re.compile(r"\[([^\]\n]+)\]\(\.\./((?:src|kernels|tests)/[\w./-]+)\)")
_linked: set[str] = set()


def link_sources(app, docname: str, text: list[str]) -> None:
    """Point links to the package at their source pages, in markdown or in a notebook's JSON."""

    def replace(match: re.Match) -> str:
        label, path = match.groups()
        if not (ROOT / path).is_file():
            logging.getLogger(__name__).warning(
                "%s links to %s, which does not exist", docname, path, location=docname
            )
            return match.group()
        _linked.add(path)
        return f"<a href='source/{path}.html'>{label}</a>"

    text[0] = _LINK.sub(replace, text[0])


def source_pages(app):
    """One page per linked source file, in the book's frame."""
    formatter = HtmlFormatter(linenos="inline", cssclass="highlight")
    for path in sorted(_linked):
        code = highlight((ROOT / path).read_text(), get_lexer_for_filename(path), formatter)
        yield (
            f"source/{path}",
            {"title": path, "body": f"<h1>{html.escape(path)}</h1>{code}"},
            "page.html",
        )


def describe_pictures(app, doctree: nodes.document) -> None:
    """Give each picture in an output the words that the notebook stores beside it as text/plain."""
    for image in doctree.findall(nodes.image):
        beside = image.parent.parent.children if "mime_type" in image.parent else []
        words = [each.astext() for each in beside if each["mime_type"] == "text/plain"]
        if words:
            image["alt"] = words[0]


def highlight_cuda(app, doctree: nodes.document) -> None:
    """A cell of CUDA C++ is no Python."""
    for block in doctree.findall(nodes.literal_block):
        if block.astext().startswith("%%cuda"):
            block["language"] = "cpp"


def setup(app) -> None:
    app.connect("source-read", link_sources)
    app.connect("doctree-read", describe_pictures)
    app.connect("doctree-read", highlight_cuda)
    app.connect("html-collect-pages", source_pages)
