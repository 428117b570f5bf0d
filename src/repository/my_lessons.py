"""The reader's own copy of the lessons, the folder my_lessons.

    python src/repository/my_lessons.py            make or update the folder
    python src/repository/my_lessons.py lab        the same, and open it in JupyterLab (`make lab`)
    python src/repository/my_lessons.py changes    show what the course has changed since (`make changes`)

git ignores this folder. A notebook in which the reader has changed or added a cell is never replaced. All others follow
the course. my_lessons/.course holds each file as the reader got it, so that `changes` can compare the two.
"""

import difflib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbformat.sign import NotebookNotary

from pagewise.exercises import progress
from pagewise.exercises.checkers import LESSONS

ROOT = Path(__file__).resolve().parent.parent.parent
COURSE, MINE = ROOT / "lessons", ROOT / "my_lessons"
GIVEN = ".course"
# JupyterLab shows texts as pages and whole names of files, and asks nothing. A reader's own settings win over these.
SETTINGS = Path(__file__).resolve().parent / "jupyter"


def update(course: Path, mine: Path) -> list[str]:
    """Bring `mine` up to date. Return the names of files that the course has changed, and the reader too.

    Each notebook that is copied is signed as trusted, so that Jupyter shows its interactive figures at once.
    """
    both, notary = [], NotebookNotary()
    for path in _files(course):
        name = path.relative_to(course)
        own, given = mine / name, mine / GIVEN / name
        is_new = not own.exists()
        if not is_new and given.exists() and _text(path) == _text(given):
            continue  # the reader's copy is this version, whatever the reader has written in it
        if not is_new and not (given.exists() and _text(own) == _text(given)):
            both.append(str(name))
            continue
        for copy in (own, given):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        if own.suffix == ".ipynb":
            notary.sign(nbformat.read(own, as_version=4))
    notary.store.close()
    _write_progress(course, mine / progress.FILE)
    return both


def changes(course: Path, mine: Path) -> str:
    """Return what the course has changed in the files of `mine` since the reader got them, as a diff of their text."""
    found: list[str] = []
    for path in _files(course):
        given = mine / GIVEN / path.relative_to(course)
        if given.exists():
            texts = (_text(each).splitlines() for each in (given, path))
            found += difflib.unified_diff(*texts, f"your copy of {path.name}", path.name, lineterm="", n=2)
    return "\n".join(found)


def _files(course: Path) -> Iterator[Path]:
    """Yield the files that a reader gets: the notebooks, their texts, and the data that they read."""
    for path in sorted(course.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(course).parts)
        if path.suffix in (".ipynb", ".md", ".svg", ".json") and not hidden:
            yield path


def _text(path: Path) -> str:
    """Return the text of a file. Of a notebook, return the cells, without outputs and metadata."""
    if path.suffix != ".ipynb":
        return path.read_text(encoding="utf-8")
    cells = nbformat.read(path, as_version=4).cells
    return "\n".join(f"[{cell.cell_type}]\n{cell.source}" for cell in cells)


def _write_progress(course: Path, path: Path) -> None:
    """Write the list of exercises. Those that are ticked in it stay ticked."""
    titles = {}
    for number, exercises in LESSONS.items():
        lesson = next(each for each in sorted(course.glob(f"{number:02}_*.ipynb")) if "in_depth" not in each.stem)
        title = nbformat.read(lesson, as_version=4).cells[0].source.splitlines()[0].removeprefix("# ")
        titles[f"[{title}]({lesson.name})"] = [exercise.name for exercise in exercises]
    done = progress.ticked(path.read_text(encoding="utf-8")) if path.exists() else set()
    path.write_text(progress.listed(titles, done), encoding="utf-8")


def prepare() -> None:
    """Make or update the reader's copy, and say where it is."""
    what = "your lessons, with what you wrote" if MINE.exists() else "your own copy of the lessons, which git ignores"
    both = update(COURSE, MINE)
    print(f"{what}: {MINE}", flush=True)
    if both:
        print(
            f"the course has changed {', '.join(both)}, and so have you. Your text stays. `make changes` shows what is"
        )
        print("new. To get the new version, rename your file, and run make lab again.", flush=True)


def open_lab(options: list[str]) -> None:
    """Open the reader's copy of lesson 1 in JupyterLab, which serves the whole repository."""
    from jupyterlab.labapp import LabApp

    folders = [str(SETTINGS), os.environ.get("JUPYTER_CONFIG_PATH", "")]
    os.environ["JUPYTER_CONFIG_PATH"] = os.pathsep.join(filter(None, folders))
    first = f"--LabApp.default_url=/lab/tree/{MINE.name}/01_naive_attention.ipynb"
    LabApp.launch_instance([f"--ServerApp.root_dir={ROOT}", first, *options])


def main(words: list[str]) -> None:
    """Run the command line."""
    match words:
        case []:
            prepare()
        case ["lab", *options]:
            prepare()
            open_lab(options)
        case ["changes"]:
            print(changes(COURSE, MINE) or "the course has changed nothing since you got your copy")
        case _:
            sys.exit(f"usage: python {sys.argv[0]} [lab [OPTIONS OF JUPYTERLAB] | changes]")


if __name__ == "__main__":
    main(sys.argv[1:])
