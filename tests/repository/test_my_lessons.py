"""The reader's copy of the lessons keeps what the reader wrote, follows the course elsewhere, and is trusted."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from conftest import ROOT

pytest.importorskip("nbformat", reason="notebooks are copied with the extra `lessons`")

import my_lessons
import nbformat
from my_lessons import GIVEN, changes, update
from nbformat.sign import NotebookNotary

from pagewise.exercises.checkers import LESSONS

FIRST = "01_naive.ipynb"


def save(path: Path, *sources: str) -> None:
    cells = [nbformat.v4.new_markdown_cell(f"# Lesson {int(path.stem[:2])}: a title")]
    cells += [nbformat.v4.new_code_cell(source, id=f"cell-{i}") for i, source in enumerate(sources)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)


def sources(path: Path) -> list[str]:
    return [cell.source for cell in nbformat.read(path, as_version=4).cells[1:]]


@pytest.fixture
def folders(tmp_path, monkeypatch) -> tuple[Path, Path]:
    """A course of ten lessons and some texts, and the reader's copy of it."""
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    course, mine = tmp_path / "lessons", tmp_path / "my_lessons"
    (course / "measurements").mkdir(parents=True)
    (course / "_static").mkdir()
    for number in LESSONS:
        save(course / f"{number:02}_naive.ipynb", "1 + 1")
    for name in ("index.md", "conf.py", "measurements/tiles.json", "_static/page.css"):
        (course / name).write_text(name)
    assert update(course, mine) == []
    return course, mine


def test_the_copy_has_the_lessons_and_what_they_read_and_every_notebook_is_trusted(folders):
    _, mine = folders
    copied = {str(path.relative_to(mine)) for path in mine.rglob("*") if path.is_file() and GIVEN not in path.parts}
    lessons = {f"{number:02}_naive.ipynb" for number in LESSONS}
    assert copied == lessons | {"index.md", "measurements/tiles.json", "progress.md"}
    for lesson in lessons:
        assert NotebookNotary().check_signature(nbformat.read(mine / lesson, as_version=4))


def test_a_lesson_that_was_only_run_follows_the_course(folders):
    course, mine = folders
    notebook = nbformat.read(mine / FIRST, as_version=4)
    notebook.cells[1].outputs = [nbformat.v4.new_output("stream", text="2\n")]
    notebook.metadata["kernelspec"] = {"name": "mine", "display_name": "mine"}
    nbformat.write(notebook, mine / FIRST)
    assert update(course, mine) == []
    assert nbformat.read(mine / FIRST, as_version=4).cells[1].outputs, "an unchanged course replaces nothing"
    save(course / FIRST, "2 + 2")
    assert update(course, mine) == []
    assert sources(mine / FIRST) == ["2 + 2"]
    assert NotebookNotary().check_signature(nbformat.read(mine / FIRST, as_version=4))


def test_what_the_reader_wrote_stays_and_the_change_of_the_course_can_be_seen(folders):
    course, mine = folders
    save(mine / FIRST, "1 + 1", "mine = 3")
    save(mine / "notes.ipynb".replace("notes", "11_notes"), "my own")
    assert update(course, mine) == []
    assert changes(course, mine) == ""
    save(course / FIRST, "2 + 2")
    for _ in range(2):  # asked again, it says the same
        assert update(course, mine) == [FIRST]
        assert sources(mine / FIRST) == ["1 + 1", "mine = 3"]
        assert [line for line in changes(course, mine).splitlines() if line[0] in "+-"] == [
            f"--- your copy of {FIRST}", f"+++ {FIRST}", "-1 + 1", "+2 + 2"
        ]  # fmt: skip
    assert sources(mine / "11_notes.ipynb") == ["my own"]
    (mine / FIRST).rename(mine / "old.ipynb")
    assert update(course, mine) == []
    assert sources(mine / FIRST) == ["2 + 2"]
    assert changes(course, mine) == ""


def test_solved_exercises_and_lessons_stay_ticked(folders):
    course, mine = folders
    text = (mine / "progress.md").read_text()
    names = [exercise.name for exercise in LESSONS[1]]
    assert "## [Lesson 1: a title](01_naive.ipynb)\n" in text
    for name in names:
        text = text.replace(f"- [ ] {name}\n", f"- [x] {name}\n")
    (mine / "progress.md").write_text(text)
    update(course, mine)
    text = (mine / "progress.md").read_text()
    assert all(f"- [x] {name}\n" in text for name in names)
    assert [line for line in text.splitlines() if "✓" in line] == ["## ✓ [Lesson 1: a title](01_naive.ipynb)"]


def test_git_ignores_the_copy():
    done = subprocess.run(["git", "check-ignore", "my_lessons/01_naive_attention.ipynb"], cwd=ROOT, capture_output=True)
    assert done.returncode in (0, 128)  # 128: this is not a checkout


def test_the_folder_is_named_when_it_is_made_and_when_it_is_opened_again(folders, monkeypatch, capsys):
    course, mine = folders
    monkeypatch.setattr(my_lessons, "COURSE", course)
    for folder, words in ((mine.parent / "new", "your own copy"), (mine, "your lessons, with what you wrote")):
        monkeypatch.setattr(my_lessons, "MINE", folder)
        my_lessons.main([])
        said = capsys.readouterr().out
        assert said.startswith(words)
        assert said.endswith(f": {folder}\n")


@pytest.mark.slow
def test_lab_serves_the_repository_and_opens_the_copy_with_the_readers_options(folders, monkeypatch, capsys):
    labapp = pytest.importorskip("jupyterlab.labapp", reason="JupyterLab comes with the extra `lessons`")
    course, mine = folders
    started = []
    monkeypatch.setattr(labapp.LabApp, "launch_instance", started.append)
    monkeypatch.setattr(my_lessons, "COURSE", course)
    monkeypatch.setattr(my_lessons, "MINE", mine)
    monkeypatch.setattr(my_lessons, "ROOT", mine.parent)
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", "/mine")
    my_lessons.main(["lab", "--no-browser"])
    assert os.environ["JUPYTER_CONFIG_PATH"] == f"{my_lessons.SETTINGS}{os.pathsep}/mine"
    assert str(mine) in capsys.readouterr().out
    (options,) = started
    assert options == [
        f"--ServerApp.root_dir={mine.parent}",
        "--LabApp.default_url=/lab/tree/my_lessons/01_naive_attention.ipynb",
        "--no-browser",
    ]
    assert (ROOT / "lessons" / options[1].rpartition("/")[2]).exists()


@pytest.mark.parametrize(
    "file",
    ["README.md", "CONTRIBUTING.md", "lessons/index.md", "Makefile", "Dockerfile", ".devcontainer/devcontainer.json"],
)
def test_no_way_to_start_opens_the_lessons_that_git_tracks(file):
    text = (ROOT / file).read_text()
    assert re.findall(r"\bjupyter[ -]?(?:lab|notebook)\b[^`\n]*", text) == []  # my_lessons.py lab starts it
    if file.endswith(".json"):
        settings = json.loads(re.sub(r"^ *//.*", "", text, flags=re.MULTILINE))
        assert settings["customizations"]["codespaces"]["openFiles"] == ["my_lessons/01_naive_attention.ipynb"]
        assert settings["postCreateCommand"].endswith("&& python src/repository/my_lessons.py")
        assert settings["waitFor"] == "postCreateCommand"
