"""README and CONTRIBUTING: files, commands, addresses and numbers are right, and the table has every lesson."""

import importlib.util
import itertools
import json
import math
import platform
import re

import pytest
from matplotlib import font_manager
from matplotlib.font_manager import FontProperties
from PIL import ImageFont
from try_kernel import IN_CUDA, IN_TRITON

import pagewise
from address import FILES, named_in, readdressed, repository
from conftest import ROOT
from pagewise.exercises.checkers import BY_NAME
from pagewise.experiments.published import WITHIN, foretold
from picture import BUTTONS, LEFT, SIDE, pictures

README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
FRONT_PAGE = (ROOT / "lessons" / "index.md").read_text()
FORMS = ("mistake", "failure")
HOURS = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}

each_page = pytest.mark.parametrize("page", [README, CONTRIBUTING], ids=["README", "CONTRIBUTING"])


@each_page
def test_every_link_leads_to_a_file(page):
    prose = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", prose)
    assert [link for link in links if not (ROOT / link).exists()] == []
    assert page is CONTRIBUTING or len(links) > 10


@each_page
def test_every_file_that_code_names_exists(page):
    named = re.findall(r"(?<![\w/.])(?:src|tests|kernels|lessons)/[\w./-]*[\w/]", " ".join(spans(page)))
    to_be_written = ("lessons/NN_", "lessons/11_", "src/pagewise/exercises/lesson_11.py")
    assert [path for path in named if not (ROOT / path).exists() and not path.startswith(to_be_written)] == []
    assert len(named) > 30 or page is README


@each_page
def test_every_command_exists(page):
    targets = re.findall(r"\bmake ([a-z-]+)", " ".join(spans(page)))
    makefile = (ROOT / "Makefile").read_text()
    assert [name for name in targets if not re.search(rf"^{name}:", makefile, flags=re.MULTILINE)] == []
    modules = set(re.findall(r"-m ((?:pagewise|cudascope)[\w.]*)", page))
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []
    assert targets
    assert modules
    assert set(re.findall(r"make try K=(\w+)", page)) <= IN_CUDA.keys() | IN_TRITON.keys()


def spans(page):
    """Return the code of a page: its blocks and what stands between backticks."""
    return re.findall(r"```.*?```|`[^`\n]+`", page, flags=re.DOTALL)


def test_table_has_every_lesson_with_its_question_its_module_and_its_kernels():
    asked = re.findall(r"^\| \d+ \| \[.*?\]\((\w+\.ipynb)\), \d+ min \| (.*?) \|", FRONT_PAGE, re.MULTILINE)
    questions = dict(asked)
    for lesson in sorted((ROOT / "lessons").glob("*.ipynb")):
        if lesson.stem.endswith("_in_depth") or lesson.stem == "sources":
            assert f"](lessons/{lesson.name})" in README
            continue
        row = next(line for line in README.splitlines() if line.startswith("|") and lesson.name in line)
        assert f" | {questions[lesson.name]} | " in row
        topic = lesson.stem[3:]
        module = topic if (ROOT / "src" / "pagewise" / topic).is_dir() else f"{topic}.py"
        assert f"](src/pagewise/{module})" in row
        for kernel in (f"{topic}.py", f"{topic}.cu"):
            assert (f"](kernels/{kernel})" in row) == (ROOT / "kernels" / kernel).exists()


PICTURES = ["readme.svg", "published.svg", *(f"{name}.svg" for name in BUTTONS)]


@pytest.fixture(scope="module")
def drawn():
    """The pictures by their names, drawn by the first test that needs them, and not in each worker as it collects."""
    return pictures()


def test_the_pictures_are_what_their_script_draws(drawn):
    files = {name: (ROOT / "lessons" / "_static" / name).read_text() for name in PICTURES}
    assert files == drawn, "run: python src/repository/picture.py"
    assert all(f"lessons/_static/{name}" in README or f"](_static/{name})" in FRONT_PAGE for name in files)


def test_the_text_for_a_picture_that_is_not_seen_has_its_numbers(drawn):
    shown = re.search(r'aria-label="([^"]*)"', drawn["readme.svg"])[1]
    assert re.search(r"!\[([^\]]*)\]\(lessons/_static/readme\.svg\)", README)[1] == shown


def texts(svg):
    """Yield (left end, right end, baseline) of each text of an SVG, in a font that is wider than those of browsers."""
    for attributes, words in re.findall(r"<text ([^>]*)>(.*?)</text>", svg, re.DOTALL):
        x, y, size = (float(re.search(rf'\b{name}="([\d.]+)"', attributes)[1]) for name in ("x", "y", "font-size"))
        is_bold = "font-weight" in attributes + words
        path = font_manager.findfont(FontProperties(family="DejaVu Sans", weight="bold" if is_bold else "normal"))
        width = ImageFont.truetype(path, size).getlength(re.sub("<[^>]+>", "", words))
        anchor = re.search(r'text-anchor="(\w+)"', attributes)
        left = x - width * {"start": 0, "middle": 0.5, "end": 1}[anchor[1] if anchor else "start"]
        yield left, left + width, y


@pytest.mark.parametrize("name", PICTURES)
def test_the_words_of_a_picture_fit_into_it_and_do_not_overlap(name, drawn):
    svg = drawn[name]
    width = float(re.search(r'viewBox="0 0 (\d+)|<svg [^>]*\bwidth="(\d+)"', svg)[1 if "viewBox" in svg else 2])
    placed = sorted(texts(svg), key=lambda text: (text[2], text[0]))
    assert placed
    assert all(left >= 0 and right <= width for left, right, _ in placed)
    for (_, right, y), (left, _, beside) in itertools.pairwise(placed):
        assert y != beside or right < left


def test_the_key_of_the_published_times_has_every_kind_of_mark(drawn):
    kinds = r'<(rect|circle|path) class="((?:prompt|decode)[ a-z]*)" (?:c?x="|d="M)([\d.]+)'
    marks = re.findall(kinds, drawn["published.svg"])
    key = {(shape, kind) for shape, kind, x in marks if float(x) > LEFT + SIDE}
    assert key == {(shape, kind) for shape, kind, _ in marks}
    assert len(key) == 7  # of ours, no prompt is missed


def test_the_front_page_says_what_our_own_times_say():
    prompts, steps = (
        [each for each in foretold() if (each.row.T < each.row.S) == decodes] for decodes in (False, True)
    )
    missed = [each for each in steps if not each.fits]
    ratios = [each.row.seconds / each.modelled for each in steps]
    text = " ".join(FRONT_PAGE.split())
    assert all(each.fits for each in prompts)
    null = [sum(each.row.fits(each.null) for each in kind) for kind in (prompts, steps)]
    assert f"**All {len(prompts)} prompts are within a factor of {WITHIN}**, and {null[0]} would be" in text
    assert f"{len(steps) - len(missed)} of {len(steps)} decode steps are, and {null[1]} would be." in text
    slowest = math.ceil(1e6 * max(each.row.seconds for each in missed))
    assert f"takes less than {slowest} µs, and {min(ratios):.1f} to {max(ratios):.1f} times the modelled time" in text
    shortest = min((each.row for each in steps), key=lambda row: row.bytes)
    assert f"next to no keys and takes {1e6 * shortest.seconds:.0f} µs" in text
    assert shortest.bytes < 0.01 * max(each.row.bytes for each in steps)


def test_the_lessons_begin_before_line_80():
    assert README[: README.index("\n| lesson | the question |")].count("\n") < 80


def test_numbers_are_those_of_a_lesson_and_of_the_exercises():
    lesson = json.loads((ROOT / "lessons" / "04_paged_blocks.ipynb").read_text())
    outputs = [out.get("data", {}) for cell in lesson["cells"] for out in cell.get("outputs", [])]
    tables = "\n".join("".join(data.get("text/plain", "")) for data in outputs)
    at_once = dict(re.findall(r"^(longest|paged) +([\d.]+) +[\d,]+ +[\d.]+ +[\d.]+$", tables, re.MULTILINE))
    longest, paged = (f"{float(at_once[rule]):.1f}" for rule in ("longest", "paged"))
    assert f"holds {longest} chats at once with one long reservation each, pages hold\n  {paged}." in README
    checkers, at_least = map(int, re.search(r"(\d+) checkers know more than (\d+) natural mistakes", README).groups())
    assert checkers == len(BY_NAME)
    assert at_least < sum(len(exercise.mistakes) for exercise in BY_NAME.values()) < 1.3 * at_least


def test_the_hours_are_the_minutes_of_the_ten_lessons():
    minutes = []
    for lesson in (ROOT / "lessons").glob("[01]*[!h].ipynb"):
        text = "".join("".join(cell["source"]) for cell in json.loads(lesson.read_text())["cells"][:3])
        minutes.append([*map(int, re.search(r"Time:\*\* (\d+) minutes to read, and (\d+) minutes for", text).groups())])
    hours = re.search(r"lessons take about (\w+) hours to read, and their exercises about (\w+)\s+hours more", README)
    assert len(minutes) == 10
    assert [HOURS[word] for word in hours.groups()] == [round(sum(each) / 60) for each in zip(*minutes, strict=True)]


@pytest.mark.parametrize("file", FILES)
def test_every_address_is_the_one_of_pyproject(file):
    """In a fork: python src/repository/address.py OWNER/NAME."""
    assert named_in((ROOT / file).read_text()) == {repository()}


def test_a_fork_changes_every_address_with_one_command():
    assert named_in(README) == {repository()}
    changed = readdressed(README, repository(), "ada-l/pages.2")
    assert named_in(changed) == {"ada-l/pages.2"}
    for address in (
        "https://ada-l.github.io/pages.2/",
        "https://codespaces.new/ada-l/pages.2?",
        "/github/ada-l/pages.2/",
    ):
        assert address in changed
    assert readdressed(changed, "ada-l/pages.2", repository()) == README
    assert readdressed("https://github.com/a/b-c", "a/b", "x/y") == "https://github.com/a/b-c"


def test_the_citation_has_the_version_of_the_package():
    assert f"\nversion: {pagewise.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_pinned_torch_is_named_in_one_place_only():
    pinned = "2.13.0"
    texts = [*ROOT.glob("*.md"), *ROOT.glob("*.yml"), ROOT / "Makefile", *(ROOT / "src").rglob("*.py")]
    assert [path.name for path in texts if pinned in path.read_text()] == []
    assert (ROOT / "pyproject.toml").read_text().count(pinned) == 1


def test_the_example_is_that_of_cudascope_whose_tests_run_it():
    def block(page, language):
        return re.search(rf"```{language}\n(.*?)```", page, re.DOTALL)[1]

    cudascope = (ROOT / "src" / "cudascope" / "README.md").read_text()
    assert block(README, "cuda") == block(cudascope, "cuda")
    wrapped = block(README, "console").replace(" | fold -sw 92", "")
    assert wrapped.split() == block(cudascope, "console").split()
    assert max(map(len, wrapped.splitlines())) <= 92  # GitHub's column is 97 characters wide


def test_the_forms_quote_a_section_and_a_command_that_exist(capsys):
    mistake, failure = ((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text() for name in FORMS)
    number, section = re.search(r'placeholder: Lesson (\d+), "(.*)"', mistake).groups()
    (lesson,) = (ROOT / "lessons").glob(f"{int(number):02}_*[!h].ipynb")
    cells = json.loads(lesson.read_text())["cells"]
    assert any(f"## {section}\n" in "".join(cell["source"]) + "\n" for cell in cells)
    exec(re.search(r'\.venv/bin/python -c "([^"]*)"', " ".join(failure.split()))[1], {})
    system, banner = capsys.readouterr().out.splitlines()
    assert platform.system() in system
    assert "torch" in banner
