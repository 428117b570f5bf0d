"""README and CONTRIBUTING: files, commands and modules exist, the picture is a lesson's, the table has every lesson."""

import base64
import importlib.util
import json
import re

import pytest
from try_kernel import IN_CUDA, IN_TRITON

from conftest import ROOT

README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()

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
    assert len(named) > (30 if page is CONTRIBUTING else 0)


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


def test_table_has_every_lesson_with_its_module_and_test():
    for lesson in sorted((ROOT / "lessons").glob("*.ipynb")):
        if lesson.stem.endswith("_in_depth"):
            assert f"](lessons/{lesson.name})" in README
            continue
        row = next(line for line in README.splitlines() if line.startswith("|") and lesson.name in line)
        topic = lesson.stem[3:]
        for folder, file in (("src/pagewise", f"{topic}.py"), ("tests", f"test_{topic}.py")):
            is_package = (ROOT / folder / topic).is_dir()
            assert f"]({folder}/{topic if is_package else file})" in row
        for kernel in (f"{topic}.py", f"{topic}.cu"):
            assert (f"](kernels/{kernel})" in row) == (ROOT / "kernels" / kernel).exists()


def test_picture_is_a_figure_that_a_lesson_draws_today():
    picture = base64.b64encode((ROOT / "lessons" / "_static" / "readme.png").read_bytes()).decode()
    lessons = [json.loads(path.read_text()) for path in (ROOT / "lessons").glob("*.ipynb")]
    outputs = [out for lesson in lessons for cell in lesson["cells"] for out in cell.get("outputs", [])]
    drawn = {"".join(out.get("data", {}).get("image/png", "")).replace("\n", "") for out in outputs}
    assert picture in drawn


def test_pinned_torch_is_named_in_one_place_only():
    pinned = "2.13.0"
    texts = [*ROOT.glob("*.md"), *ROOT.glob("*.yml"), ROOT / "Makefile", *(ROOT / "src").rglob("*.py")]
    assert [path.name for path in texts if pinned in path.read_text()] == []
    assert (ROOT / "pyproject.toml").read_text().count(pinned) == 1


def test_the_example_runs_as_it_stands(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    shown = capsys.readouterr().out
    assert "transpose" in shown
    assert "registers" in shown
