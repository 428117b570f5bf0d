"""The form of a lesson: one idea, half an hour, a first screen that runs, and nothing that is out of date.

A lesson is one or two notebooks: `NN_name.ipynb`, and `NN_name_in_depth.ipynb` for an optional second sitting. One more
notebook, `sources.ipynb`, tests what the sources claim. It has neither exercises nor a time.
"""

import ast
import itertools
import json
import re

import pytest

pytest.importorskip("nbformat", reason="notebooks run with the extra `lessons`")

from again import JUDGES, SET_UP

from claims import SOURCES, broken_links, claims_of, ledger
from conftest import ROOT
from notebooks import FOLDED
from pagewise.exercises.checkers import BY_NAME
from pagewise.exercises.checkers import LESSONS as EXERCISES
from pagewise.exercises.code import body
from pagewise.exercises.cuda import CudaExercise

NOTEBOOKS = sorted((ROOT / "lessons").glob("*.ipynb"))
NUMBERED = [path for path in NOTEBOOKS if path.stem[0].isdigit()]
LESSONS = [path for path in NUMBERED if not path.stem.endswith("_in_depth")]
MOST_CELLS, MOST_WORDS, MOST_LINES, LONGEST_CELL = 60, 2000, 220, 24
WORDS_TO_LOOK_UP = 2800  # of sources.ipynb, of which a reader needs one part

each_notebook = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
each_numbered = pytest.mark.parametrize("notebook", NUMBERED, ids=lambda path: path.stem)
each_lesson = pytest.mark.parametrize("notebook", LESSONS, ids=lambda path: path.stem)


def cells(notebook, kind=None):
    found = json.loads(notebook.read_text())["cells"]
    return [cell | {"source": "".join(cell["source"])} for cell in found if kind in (None, cell["cell_type"])]


def words(markdown):
    """Return the number of words outside folds, code blocks and formulas."""
    text = re.sub(r"<details.*?</details>|```.*?```|\$\$.*?\$\$", " ", markdown, flags=re.DOTALL)
    text = re.sub(r"\$[^$]*\$", " x ", text)
    text = re.sub(r"<[^>]+>", " ", re.sub(r"\]\([^)]*\)", "]", text))
    return len(re.findall(r"[A-Za-z0-9’'_.-]*[A-Za-z0-9]", text))


def visible_code(notebook):
    """Return the lines of each code cell whose source is not folded."""
    shown = [cell for cell in cells(notebook, "code") if not FOLDED & set(cell["metadata"].get("tags", []))]
    return [[line for line in cell["source"].splitlines() if line.strip()] for cell in shown]


@each_notebook
def test_a_notebook_takes_half_an_hour(notebook):
    lines = visible_code(notebook)
    assert len(cells(notebook)) <= MOST_CELLS
    most_words = MOST_WORDS if notebook in NUMBERED else WORDS_TO_LOOK_UP
    assert sum(words(cell["source"]) for cell in cells(notebook, "markdown")) <= most_words
    assert sum(map(len, lines)) <= MOST_LINES
    assert max(map(len, lines)) <= LONGEST_CELL


@each_notebook
def test_the_first_screen_is_a_problem_something_that_runs_and_what_you_need(notebook):
    first, bullets = cells(notebook)[1:3]
    assert first["cell_type"] == "code"
    assert len([line for line in first["source"].splitlines() if line.strip()]) <= 5
    assert first["outputs"], "the first cell shows nothing"
    for promise in ("- **You need** ", "- **You will be able to** "):
        assert promise in bullets["source"]
    assert f"]({notebook.name})" in (ROOT / "lessons" / "index.md").read_text()


@each_numbered
def test_a_lesson_says_its_number_and_its_time(notebook):
    title, _, bullets = cells(notebook)[:3]
    kind = " in depth" if notebook.stem.endswith("_in_depth") else ""
    assert title["source"].startswith(f"# Lesson {int(notebook.stem[:2])}{kind}: ")
    minutes = re.search(r"- \*\*Time:\*\* (\d+) minutes to read", bullets["source"])[1]
    assert f"]({notebook.name}), {minutes} min" in (ROOT / "lessons" / "index.md").read_text()


@each_lesson
def test_a_lesson_asks_before_it_answers(notebook):
    text = [cell["source"] for cell in cells(notebook, "markdown")]
    guesses = sum(cell.count("**Guess.**") for cell in text)
    assert 4 <= guesses <= 6
    assert sum(cell.count("<summary>Answer</summary>") for cell in text) >= guesses


@each_notebook
def test_no_existing_lesson_is_spoken_of_as_future(notebook):
    numbers = "|".join(str(int(path.stem[:2])) for path in LESSONS)
    future = re.compile(rf"\b[Ll]essons? (?:{numbers})\b[^.;|]{{0,40}}\b(?:to come|will (?!be able))|\bare to come\b")
    for cell in cells(notebook):
        assert not (found := future.search(cell["source"])), found.group()


def test_every_source_has_claims_and_a_claim_has_one_row_in_the_whole_course():
    found = [claim for notebook in NOTEBOOKS for claim in claims_of(notebook)]
    assert {source for claim in found for source in claim.sources} == set(SOURCES)
    texts = sorted(claim.claim.lower() for claim in found)
    assert texts == sorted(set(texts))


@pytest.mark.parametrize("page", [*NOTEBOOKS, *sorted((ROOT / "lessons").glob("*.md"))], ids=lambda path: path.name)
def test_every_link_leads_to_a_page_and_to_a_heading(page):
    """A heading that is renamed breaks links to it. The message names the headings that there are."""
    assert broken_links(page) == []


def test_the_ledger_is_up_to_date():
    assert (ROOT / "lessons" / "claims.md").read_text() == ledger(ROOT / "lessons"), "run: make refresh"


@each_notebook
def test_the_output_that_answers_a_guess_is_folded(notebook):
    """It is the output of the cells after the guess, or after one more text that leads to them."""
    all_cells = cells(notebook)
    for i, cell in enumerate(all_cells):
        if "**Guess.**" in cell["source"]:
            after = all_cells[i + 1 + (all_cells[i + 1]["cell_type"] == "markdown") :]
            for answer in itertools.takewhile(lambda each: each["cell_type"] == "code", after):
                if answer["outputs"] and not JUDGES.search(answer["source"]):
                    assert {"hide-output", "hide-cell"} & set(answer["metadata"]["tags"]), answer["source"]


@each_notebook
def test_the_set_up_cell_imports_what_later_cells_use_of_the_first_cell(notebook):
    """After a restart a reader runs the set-up cell, and not the first cell again."""
    first, set_up, *later = ([*names_of(cell["source"])] for cell in cells(notebook, "code"))
    imported = {name for name, kind in first if kind == "imported"}
    used = {name for cell in later for name, kind in cell if kind == "used"}
    assert imported & used <= {name for name, kind in set_up if kind == "imported"}


@each_notebook
def test_the_set_up_cell_promises_the_exercises_after_a_restart_and_no_other_cell(notebook):
    """src/repository/again.py runs each exercise after the set-up cell alone. Other cells use the cells above them."""
    code = [cell["source"] for cell in cells(notebook, "code")]
    (set_up,) = (source for source in code if source.startswith(SET_UP))
    comment = set_up[: re.search(r"^[^#]", set_up, flags=re.MULTILINE).start()]
    assert comment.count("Run > Run All Above Selected Cell") == 1
    assert ("every exercise runs" in comment) == any(JUDGES.search(source) for source in code)


def names_of(source):
    """Yield (name, "imported" or "used") for the names in a code cell."""
    if source.startswith("%%"):
        return
    for node in ast.walk(ast.parse(re.sub(r"^[%!].*", "", source, flags=re.MULTILINE))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name, "imported") for alias in node.names)
        elif isinstance(node, ast.Name):
            yield node.id, "used"


@each_notebook
def test_an_unsolved_exercise_shows_the_text_of_the_package_and_no_hint(notebook):
    code = cells(notebook, "code")
    for before, cell in itertools.pairwise(code):
        if judged := JUDGES.search(cell["source"]):
            exercise = BY_NAME[judged[1]]
            if isinstance(exercise, CudaExercise):
                assert before["source"].split("\n", 1)[1].strip() == exercise.stub.strip()
            else:
                assert body(cell["source"]) == body(exercise.stub)
            shown = "".join(cell["outputs"][0]["data"]["text/markdown"])
            assert shown.startswith("**Not yet:** the smallest case that fails")
            assert shown.endswith(f'`check.hint("{exercise.name}")` gives a hint.')
            assert not [title for title, mistake in exercise.mistakes.items() if mistake.hint in shown]


@each_notebook
def test_a_notebook_with_exercises_shows_the_progress_after_them(notebook):
    sources = [cell["source"] for cell in cells(notebook, "code")]
    judging = [i for i, source in enumerate(sources) if JUDGES.search(source)]
    assert not judging or any(re.fullmatch(r"check\.progress\(\d*\)", source) for source in sources[judging[-1] + 1 :])


def test_exercises_are_listed_in_the_order_of_the_lesson():
    for number, exercises in EXERCISES.items():
        notebooks = [path for path in NUMBERED if int(path.stem[:2]) == number]
        sources = [cell["source"] for notebook in notebooks for cell in cells(notebook, "code")]
        judged = JUDGES.findall("\n".join(sources))
        assert [exercise.name for exercise in exercises] == list(dict.fromkeys(judged))
