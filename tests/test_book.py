"""The book: builds without warnings, needs no network, links lessons to sources, and looks right in a browser."""

import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sphinx", reason="the book is rendered with the extra `book`")
pytest.importorskip("myst_nb", reason="the book is rendered with the extra `book`")

from conftest import ROOT

LESSONS = sorted(path.stem for path in (ROOT / "lessons").glob("*.ipynb"))
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def book(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("book")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", "lessons", "lessons", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


def test_every_lesson_has_a_page_that_leads_on(book):
    for lesson, following in itertools.pairwise(LESSONS):
        assert f'class="right-next"\n       href="{following}.html"' in (book / f"{lesson}.html").read_text()
    index = (book / "index.html").read_text()
    assert all(f"{lesson}.html" in index for lesson in LESSONS)
    assert (book / "searchindex.js").exists()


def test_pages_load_nothing_from_the_network(book):
    loads = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=["'](https?:)?//[^"']+""")
    for page in book.rglob("*.html"):
        assert not (found := loads.search(page.read_text())), f"{page.name} loads {found.group()}"
    assert (book / "_static" / "mathjax" / "tex-chtml.js").exists()


@pytest.mark.parametrize("lesson", LESSONS)
def test_lesson_links_to_its_module_and_test(book, lesson):
    page = (book / f"{lesson}.html").read_text()
    sources = re.findall(r"href=['\"](source/[\w./-]+)['\"]", page)
    assert any("/src/pagewise/" in s for s in sources)
    assert any("/tests/test_" in s for s in sources)
    for source in sources:
        assert 'class="highlight"' in (book / source).read_text()


if BROWSER:
    PROBE = """<script>addEventListener("load", () => setTimeout(() => {
        const box = document.documentElement, maths = document.querySelectorAll("mjx-container");
        const seen = [...maths].filter(m => m.getBoundingClientRect().width > 2).length;
        const images = [...document.images].filter(i => i.src.includes("_images"));
        const broken = images.filter(i => !i.naturalWidth).length;
        document.title = `PROBE maths ${seen} of ${document.querySelectorAll(".math").length} broken ${broken} ` +
            `of ${images.length} overflow ${box.scrollWidth - box.clientWidth} END`;
    }, 3000))</script></body>"""

    @pytest.mark.parametrize("width", [1400, 420])
    @pytest.mark.parametrize("lesson", LESSONS)
    def test_page_looks_right_in_a_browser_without_network(book, tmp_path, lesson, width):
        """Maths is typeset, figures load, and nothing is wider than the window."""
        page = (book / f"{lesson}.html").read_text()
        probed = book / f"{lesson}-{width}-probe.html"
        probed.write_text(page.replace("</body>", PROBE).replace('loading="lazy"', ""))
        command = [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--dump-dom",
            "--no-first-run", "--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={tmp_path}", f"--window-size={width},1000", "--virtual-time-budget=20000",
            probed.as_uri(),
        ]  # fmt: skip
        dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
        found = re.search(r"PROBE maths (\d+) of (\d+) broken (\d+) of (\d+) overflow (-?\d+) END", dom)
        assert found, "the page did not run"
        maths, expected, broken, images, overflow = map(int, found.groups())
        assert maths >= expected > 0
        assert broken == 0 < images
        assert overflow <= 0
