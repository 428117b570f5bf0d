"""The book: builds without warnings, needs no network, links lessons to sources, and looks right in a browser."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from browser import BROWSER, probe

pytest.importorskip("sphinx", reason="the book is rendered with the extra `book`")
pytest.importorskip("myst_nb", reason="the book is rendered with the extra `book`")

from conftest import ROOT

pytestmark = pytest.mark.slow  # without $PAGEWISE_BOOK, the book is rendered first

NOTEBOOKS = sorted(path.stem for path in (ROOT / "lessons").glob("*.ipynb"))
LESSONS = [name for name in NOTEBOOKS if name[0].isdigit() and not name.endswith("_in_depth")]


@pytest.fixture(scope="module")
def book(tmp_path_factory) -> Path:
    """The book as `make test` has just built it ($PAGEWISE_BOOK), or one of our own; with pages of ours beside its."""
    out = tmp_path_factory.mktemp("book")
    if built := os.environ.get("PAGEWISE_BOOK"):
        return shutil.copytree(built, out, dirs_exist_ok=True)
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", "lessons", "lessons", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


def test_every_lesson_has_a_page_that_leads_on(book):
    for lesson, following in itertools.pairwise(NOTEBOOKS):
        assert f'class="right-next"\n       href="{following}.html"' in (book / f"{lesson}.html").read_text()
    index = (book / "index.html").read_text()
    assert all(f"{lesson}.html" in index for lesson in NOTEBOOKS)
    assert (book / "searchindex.js").exists()


def test_the_front_page_starts_the_course_and_its_map_is_clickable(book):
    page = (book / "index.html").read_text()
    assert re.search(r'<strong><a [^>]*href="01_naive_attention\.html"[^>]*>.*?Start with lesson 1', page)
    assert all(f'<a href="{lesson}.html"><rect' in page for lesson in LESSONS)
    minutes = [
        int(number) for number in re.findall(r"ipynb\), (\d+) min \|", (ROOT / "lessons" / "index.md").read_text())
    ]
    lessons = minutes[::2]
    assert f"A lesson takes {min(lessons)} to {max(lessons)} minutes" in page


@pytest.mark.parametrize("lesson", NOTEBOOKS)
def test_a_page_links_its_terms_and_a_form_for_mistakes(book, lesson):
    page = (book / f"{lesson}.html").read_text()
    anchors = re.findall(r'class="term[^"]*" href="glossary\.html#([\w-]+)"', page)
    assert len(anchors) > (4 if lesson in LESSONS else 2)
    assert len(set(anchors)) == len(anchors)
    glossary = (book / "glossary.html").read_text()
    assert [anchor for anchor in anchors if f'id="{anchor}"' not in glossary] == []
    assert re.search(r"issues/new\?template=mistake.yml&amp;page=(Lesson|What)\+", page)


def test_a_search_for_a_term_finds_the_glossary_and_the_lesson_first(book):
    index = (book / "searchindex.js").read_text()
    index = json.loads(index.removeprefix("Search.setIndex(").rstrip().removesuffix(")"))
    found = [(index["docnames"][number], is_main) for number, _, is_main in index["indexentries"]["shared memory"]]
    assert sorted(found) == [("05_paged_attention", True), ("glossary", True)]


def test_pages_load_nothing_from_the_network(book):
    loads = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=["'](https?:)?//[^"']+""")
    for page in book.rglob("*.html"):
        assert not (found := loads.search(page.read_text())), f"{page.name} loads {found.group()}"
    assert (book / "_static" / "mathjax" / "tex-chtml.js").exists()


@pytest.mark.parametrize("lesson", NOTEBOOKS)
def test_every_picture_says_what_it_shows(book, lesson):
    alts = re.findall(r'<img alt="([^"]*)" src="_images/', (book / f"{lesson}.html").read_text())
    assert len(alts) > (1 if lesson in LESSONS else 0)
    for alt in alts:
        assert len(alt) > 20
        assert not re.search(r"_images|\.png|^&lt;Figure|^<Figure", alt)


@pytest.mark.parametrize("lesson", LESSONS)
def test_lesson_links_to_its_module_and_test(book, lesson):
    page = (book / f"{lesson}.html").read_text()
    sources = re.findall(r"href=['\"](source/[\w./-]+)['\"]", page)
    assert any("/src/pagewise/" in s for s in sources)
    assert any("/tests/" in s for s in sources)
    for source in sources:
        assert 'class="highlight"' in (book / source).read_text()


if BROWSER:
    LOOK = """
        const box = document.documentElement, maths = document.querySelectorAll("mjx-container");
        const images = [...document.images].filter((image) => image.src.includes("_images"));
        return {
            maths: [...maths].filter((one) => one.getBoundingClientRect().width > 2).length,
            expected: document.querySelectorAll(".math").length,
            images: images.length,
            broken: images.filter((image) => !image.naturalWidth).length,
            width: innerWidth,
            overflow: box.scrollWidth - box.clientWidth,
        };
    """

    @pytest.mark.parametrize(("lesson", "width"), [*((lesson, 420) for lesson in NOTEBOOKS), (LESSONS[-1], 1400)])
    def test_page_looks_right_in_a_browser_without_network(book, lesson, width):
        """Maths is typeset, figures load, nothing is wider than the window, and the console is silent."""
        page = book / f"{lesson}-eager.html"
        page.write_text((book / f"{lesson}.html").read_text().replace('loading="lazy"', ""))
        seen, errors = probe(page, LOOK, width=width, wait=3000)
        assert seen["width"] == width
        assert seen["maths"] >= seen["expected"]
        assert seen["broken"] == 0 < seen["images"]
        assert seen["overflow"] <= 0
        assert errors == []

    SCALE = """
        return document.querySelector("img[src$='published.svg']").getBoundingClientRect().width / 740;
    """

    def test_the_words_of_the_picture_of_the_front_page_can_be_read_on_a_phone(book):
        scale, _ = probe(book / "index.html", SCALE, width=420)
        assert 12 * scale > 9  # pixels of its smallest words

    def test_no_other_page_is_wider_than_a_phone(book):
        pages = [book / "index.html", max(book.glob("source/**/*.html"), key=lambda path: len(path.name))]
        for page in pages:
            seen, _ = probe(page, LOOK, width=420)
            assert seen["overflow"] <= 0, page.name
