"""The reader's copy in JupyterLab: figures are alive, links open code, and a solved exercise stays solved."""

import itertools
import json
import os
import re

import pytest
from browser import BROWSER
from covering import is_full
from lab import lab

from conftest import ROOT

pytest.importorskip("jupyterlab", reason="JupyterLab comes with the extra `lessons`")
pytest.importorskip("nbformat", reason="notebooks are read with the extra `lessons`")

import nbformat
from again import SET_UP
from my_lessons import GIVEN, update

from pagewise.exercises.checkers import BY_NAME

pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")]

LESSON = "my_lessons/03_online_softmax.ipynb"
FIGURE = """(() => {
    const root = document.querySelector(".jp-Notebook .jp-OutputArea .pw-stepper, .jp-Notebook .jp-OutputArea p + img")
        ?.closest(".jp-RenderedHTMLCommon");
    return root && {
        pictures: [...root.querySelectorAll("img")].filter((img) => img.offsetParent && img.naturalWidth).length,
        controls: root.querySelectorAll("button, input, svg").length,
        said: root.textContent,
    };
})()"""
# The part of each file's name that fits its column, in the order of the list.
SEEN_NAMES = """(() => {
    const pen = document.createElement("canvas").getContext("2d");
    return [...document.querySelectorAll(".jp-DirListing-itemName")].map((item) => {
        const text = item.textContent, width = item.getBoundingClientRect().width;
        pen.font = getComputedStyle(item).font;
        if (pen.measureText(text).width <= width) return text;
        let end = text.length;
        while (end && pen.measureText(text.slice(0, end) + "…").width > width) end -= 1;
        return text.slice(0, end);
    });
})()"""
SHOWN = "jupyterapp.shell.currentWidget.context.path"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """JupyterLab with a folder like the repository's, in which a reader has run `make lab`."""
    root, scratch = tmp_path_factory.mktemp("repository"), tmp_path_factory.mktemp("lab")
    for folder in ("src", "kernels", "tests"):
        (root / folder).symlink_to(ROOT / folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_DATA_DIR", str(scratch / "data"))
        update(ROOT / "lessons", root / "my_lessons")
    (root / "foreign.ipynb").write_text((root / LESSON).read_text().replace("m rises", "m\\u00a0rises"))
    with lab(root, scratch) as page:
        page.root = root
        yield page


def figure(page):
    page.run("document.querySelectorAll('.jp-Notebook .jp-RenderedHTMLCommon').forEach((e) => e.scrollIntoView())")
    page.wait(f"{FIGURE}?.pictures")
    return page.run(FIGURE)


def test_a_figure_is_alive_when_the_copy_is_opened(page):
    page.open(LESSON)
    seen = figure(page)
    assert (seen["pictures"], seen["controls"]) == (1, 3)
    page.run("document.querySelector('.pw-stepper [data-move=\"1\"]').click()")
    assert page.run("document.querySelector('.pw-stepper output').textContent").startswith("2 of ")


def test_a_foreign_notebook_shows_one_picture_and_a_sentence(page):
    page.open("foreign.ipynb")
    seen = figure(page)
    assert (seen["pictures"], seen["controls"]) == (1, 0)
    assert re.search(r"You can .* in the book", seen["said"])


def test_the_overview_opens_as_a_page_with_its_pictures_and_leads_to_lesson_1(page):
    page.show("my_lessons/index.md")
    pictures = "[...document.querySelectorAll('.jp-MarkdownViewer img')]"
    page.wait(f"{pictures}.filter((img) => img.naturalWidth > 0).length == 2")
    start = "[...document.querySelectorAll('.jp-MarkdownViewer a')].find((a) => a.textContent == 'Start with lesson 1')"
    page.run(f"{start}.click()")
    page.wait(f"{SHOWN} == 'my_lessons/01_naive_attention.ipynb'")


def test_names_of_lessons_can_be_told_apart_and_nothing_is_asked(page):
    page.open(LESSON)
    page.wait("document.querySelectorAll('.jp-DirListing-itemName').length > 20")
    page.run("document.fonts.ready.then(() => 1)")
    names = page.run(SEEN_NAMES)
    lessons = [name for name in names if name[:1].isdigit()]
    assert len(lessons) == 20
    assert len(set(lessons)) == 20
    notices = "jupyterapp.serviceManager.settings.fetch('@jupyterlab/apputils-extension:notification')"
    assert page.run(f"{notices}.then((found) => found.schema.properties.fetchNews.default)") == "false"
    assert page.run("document.querySelectorAll('.jp-Dialog').length") == 0


def test_a_link_to_code_opens_the_file(page):
    page.open(LESSON)
    page.run("document.querySelector('.jp-Notebook').scrollTo(0, 1e6)")
    link = "document.querySelector('.jp-Notebook a[href*=\"kernels/\"]')"
    page.wait(link)
    page.run(f"{link}.click()")
    page.wait(f"{SHOWN}.startsWith('kernels/')")


def exercise_of(lesson):
    """The first exercise of a lesson: the file, its name, the cell, the solved cell, and the cell that judges it."""
    (path,) = (ROOT / "lessons").glob(f"{lesson:02}_*[!h].ipynb")
    sources = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    for before, source in itertools.pairwise(sources):
        if not (judge := re.search(r"check\.(\w+)\(", source)) or judge[1] not in BY_NAME:
            continue
        solution = BY_NAME[judge[1]].solution
        if before.startswith("%%cuda"):
            return f"my_lessons/{path.name}", judge[1], before, f"{before.splitlines()[0]}\n{solution}", source
        return f"my_lessons/{path.name}", judge[1], source, f"{solution}\n\n\n{source[judge.start() :]}", ""
    raise AssertionError(f"lesson {lesson} has no exercise")


@pytest.mark.parametrize("lesson", [1, 3, 5, 7, 9, 10] if is_full() else [3])
def test_an_exercise_is_solved_after_a_restart_and_stays_solved(page, lesson):
    path, name, given, right, judge = exercise_of(lesson)
    page.open(path)
    page.run("jupyterapp.shell.currentWidget.sessionContext.restartKernel()")
    assert page.run_cell("no cell begins so") == "no such cell"
    page.run_cell(SET_UP)
    said = page.run_cell(given)
    said = page.run_cell(judge) if judge else said
    assert said.startswith("**Not yet:** the smallest case that fails")
    page.run(
        "jupyterapp.shell.currentWidget.content.widgets.find((cell) => cell.model.sharedModel.source"
        f" === {json.dumps(given)}).model.sharedModel.setSource({json.dumps(right)})"
    )
    said = page.run_cell(right)
    said = page.run_cell(judge) if judge else said
    assert said.startswith("**Right:**")
    page.run("jupyterapp.commands.execute('docmanager:save')")
    page.wait("!jupyterapp.shell.currentWidget.context.model.dirty")
    page.run("jupyterapp.shell.currentWidget.sessionContext.restartKernel()")
    page.run_cell(SET_UP)
    assert f"✓ {name}" in page.run_cell("check.progress(")
    assert f"- [x] {name}" in (page.root / "my_lessons" / "progress.md").read_text()

    assert update(ROOT / "lessons", page.root / "my_lessons") == []  # make lab again
    cells = nbformat.read(page.root / path, as_version=4).cells
    assert any(cell.source == right for cell in cells)
    assert (page.root / "my_lessons" / GIVEN).is_dir()
    assert os.path.samefile(page.root / "kernels", ROOT / "kernels")
