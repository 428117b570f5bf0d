"""The notebook runner: what it refuses, what it keeps, and that it says where a lesson failed."""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from conftest import ROOT

nbformat = pytest.importorskip("nbformat", reason="notebooks are run with the extra `lessons`")
notebooks = pytest.importorskip("notebooks", reason="notebooks are run with the extra `lessons`")

LESSONS = ROOT / "lessons"


def code(source: str, *outputs, tags: tuple[str, ...] = (), count: int | None = 1):
    cell = nbformat.v4.new_code_cell(source, outputs=list(outputs), execution_count=count)
    if tags:
        cell.metadata["tags"] = list(tags)
    return cell


def stream(text: str, name: str = "stdout"):
    return nbformat.v4.new_output("stream", name=name, text=text)


def save(folder: Path, *cells, name: str = "lesson.ipynb") -> Path:
    path = folder / name
    notebooks.write(nbformat.v4.new_notebook(cells=list(cells)), path)
    return path


def test_committed_lessons_are_clean():
    assert len(list(LESSONS.glob("*.ipynb"))) >= 3
    assert notebooks.check(LESSONS) == []


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        (code("1", count=None), "not executed"),
        (code("1", count=2), "not executed"),
        (code("1", stream("careful", "stderr")), "stderr"),
        (code("1", nbformat.v4.new_output("error", ename="ValueError", evalue="no", traceback=[])), "ValueError"),
        (code("1", stream("saved to /ho" + "me/someone/x")), "path of a machine"),
        (code("1", nbformat.v4.new_output("display_data", data={"text/plain": "'/tm" + "p/y'"})), "path of a machine"),
    ],
)
def test_unclean_notebook_is_named(tmp_path, cell, problem):
    path = save(tmp_path, cell)
    assert any(problem in found for found in notebooks.check_notebook(path))


def test_notebook_out_of_canonical_form_is_named(tmp_path):
    path = save(tmp_path, code("1"))
    assert notebooks.check_notebook(path) == []
    path.write_text(path.read_text().replace('"Python 3"', '"My kernel"'))
    assert any("canonical" in found for found in notebooks.check_notebook(path))


def test_canonical_form_drops_what_depends_on_the_run():
    cell = code("print(1)", stream("1\n"), tags=("nbval-ignore-output",))
    cell.metadata["execution"] = {"iopub.status.busy": "2026-01-01T00:00:00Z"}
    other = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_markdown_cell("text"), cell],
        metadata={"language_info": {"name": "python", "version": "3.11.7"}},
    )
    text = notebooks.canonical(other)
    assert "2026" not in text
    assert "3.11.7" not in text
    assert notebooks.canonical(nbformat.reads(text, as_version=4)) == text


needs_a_kernel = pytest.mark.skipif(find_spec("ipykernel") is None, reason="running notebooks needs ipykernel")


@pytest.mark.slow
@needs_a_kernel
def test_run_executes_into_another_folder_and_leaves_the_source_alone(tmp_path):
    source, out = tmp_path / "lessons", tmp_path / "out"
    source.mkdir()
    (source / "index.md").write_text("# Book")
    path = save(source, code("print(6 * 7)", count=None))
    before = path.read_text()
    assert notebooks.run(source, out)
    executed = nbformat.read(out / "lesson.ipynb", as_version=4)
    assert executed.cells[0].outputs[0].text == "42\n"
    assert (out / "index.md").exists()
    assert path.read_text() == before


@pytest.mark.slow
@needs_a_kernel
def test_failing_cell_is_shown_with_source_and_traceback_and_fails_the_command(tmp_path, monkeypatch, capfd):
    save(tmp_path, code("fine = 1"), code("surprise = fine / 0"), name="bad.ipynb")
    save(tmp_path, code("print('good')"), name="good.ipynb")
    monkeypatch.setattr(sys, "argv", ["notebooks", "run", str(tmp_path), str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="True"):
        notebooks.main()
    out, err = capfd.readouterr()
    assert "bad.ipynb" in err
    assert "surprise = fine / 0" in err
    assert "ZeroDivisionError" in err
    assert "bad " in out
    assert "FAILED" in out
    assert (tmp_path / "out" / "good.ipynb").exists()


@pytest.mark.slow
@needs_a_kernel
def test_refresh_measures_again_only_what_a_changed_cell_measures_or_when_asked(tmp_path):
    timed = ("nbval-ignore-output",)
    path = save(
        tmp_path,
        code("import time", count=None),
        code("seconds = time.perf_counter()\nprint(seconds)", tags=timed, count=None),
        code("print(f'figure of {seconds}')", tags=timed, count=None),
        code("print(time.perf_counter())", tags=timed, count=None),
        code("print('steady')", count=None),
    )

    def refreshed(file: Path = tmp_path, *, remeasure: bool = False) -> list[str]:
        assert notebooks.refresh(file, remeasure=remeasure)
        return [cell.outputs[0].text for cell in nbformat.read(path, as_version=4).cells[1:4]]

    first = refreshed()
    text = path.read_text()
    assert refreshed() == first
    assert path.read_text() == text
    path.write_text(text.replace("import time", "import time  # changed"))
    assert refreshed(path) == first
    path.write_text(path.read_text().replace("print(seconds)", "print(1 * seconds)"))
    again = refreshed()
    assert [new == old for new, old in zip(again, first, strict=True)] == [False, False, True]
    assert not set(refreshed(remeasure=True)) & set(again)


@pytest.mark.parametrize(
    ("platform", "problem", "kept"),
    [
        ("darwin", "ModuleNotFoundError: No module named 'triton'", True),
        ("darwin", "CompileError: running a CUDA kernel on the CPU needs Linux (on Windows: WSL)", True),
        ("darwin", "ZeroDivisionError: division by zero", False),
        ("linux", "ModuleNotFoundError: No module named 'triton'", False),
    ],
)
def test_a_notebook_that_needs_linux_is_not_a_failure_elsewhere(platform, problem, kept, monkeypatch):
    monkeypatch.setattr(notebooks, "sys", SimpleNamespace(platform=platform))
    assert notebooks.needs_linux(problem) == kept
