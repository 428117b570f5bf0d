"""The notebooks that `make test` runs: every cell twice, each solution, and each exercise after a restart."""

import base64
import json

import pytest

from conftest import ROOT

pytest.importorskip("nbformat", reason="notebooks are read with the extra `lessons`")

import nbformat
from again import JUDGES, SET_UP, UNRENDERED, UNRENDERED_STEPS, again

NOTEBOOKS = sorted((ROOT / "lessons").glob("*.ipynb"))


def sources(path):
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_one_set_up_cell_and_it_is_the_first_after_the_first_screen(notebook):
    assert [i for i, source in enumerate(sources(notebook)) if SET_UP in source] == [1]
    assert sources(notebook)[1].startswith(SET_UP)


def test_a_stepper_that_comes_back_is_not_rendered(monkeypatch):
    pytest.importorskip("matplotlib", reason="steppers are drawn with the extra `lessons`")
    from pagewise.figures import steps

    monkeypatch.setattr(steps, "_png", steps._png)
    drawn = []
    exec(UNRENDERED_STEPS, {})
    frames = [("first", 1), ("second", 2)]
    shown = steps.stepper(frames, lambda figure, frame: drawn.append(frame), title="How?", alt="A step.")
    assert drawn == [1, 2]
    assert base64.b64encode(b"unrendered").decode() in shown._repr_html_()


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_comes_back_and_every_exercise_after_the_set_up_cell(notebook):
    code = sources(notebook)
    cells = [cell for cell in again(nbformat.read(notebook, as_version=4)).cells if cell.cell_type == "code"]
    assert [cell.source for cell in cells[: len(code) + 1]] == [code[0], UNRENDERED_STEPS, *code[1:]]
    first, *added = [cell.source for cell in cells[len(code) + 1 :]]
    assert first == UNRENDERED
    assert added[: len(code)] == code[::-1]
    restarted = added[added.index("%reset -f") + 1 :]
    assert restarted[0].startswith(SET_UP)
    names = JUDGES.findall("\n".join(code))
    assert JUDGES.findall("\n".join(restarted)) == names
    solved = added[len(code) : added.index("%reset -f")]
    assert [source.startswith("assert check.") for source in solved].count(True) == len(set(names))
