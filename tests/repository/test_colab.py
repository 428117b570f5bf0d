"""The lessons for Colab: a first cell installs pagewise, and all other cells are the lesson's."""

import re

import pytest

from conftest import ROOT

nbformat = pytest.importorskip("nbformat", reason="notebooks are written with the extra `lessons`")


def test_each_lesson_gets_a_first_cell_that_installs_the_repository(tmp_path):
    from colab import prepare

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old.ipynb").touch()
    prepare("https://example.org/owner/name", ROOT / "lessons", tmp_path / "out")
    lessons = sorted((ROOT / "lessons").glob("*.ipynb"))
    assert [path.name for path in sorted((tmp_path / "out").iterdir())] == [path.name for path in lessons]
    for path in lessons:
        first, *rest = nbformat.read(tmp_path / "out" / path.name, as_version=4).cells
        assert "!git clone -q --depth 1 https://example.org/owner/name pagewise\n%pip install" in first.source
        assert [(cell.source, cell.get("outputs")) for cell in rest] == [
            (cell.source, cell.get("outputs")) for cell in nbformat.read(path, as_version=4).cells
        ]


def test_the_button_opens_a_lesson_on_the_branch_that_the_workflow_pushes():
    """The address itself can be tried only after the first publication."""
    readme, workflow = (ROOT / "README.md").read_text(), (ROOT / ".github" / "workflows" / "book.yml").read_text()
    branch, file = re.search(r"colab\.research\.google\.com/github/[^/]+/[^/]+/blob/(\w+)/(\S+)\)", readme).groups()
    assert f"git push -q --force origin {branch}\n" in workflow
    assert "colab.py" in workflow
    assert (ROOT / "lessons" / file).exists()
