"""What runs on macOS: lessons 1, 2, 4, 9 and 10, without Triton and NVIDIA's packages. The others say what to do.

`make test` reads which modules these lessons import. PAGEWISE_FULL=1 imports them in a process without the packages,
and the nightly job on macOS runs the lessons.
"""

import ast
import functools
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from covering import is_full
from test_house import MODULES, imports
from without_linux import HIDDEN

from conftest import ROOT
from pagewise.tools import device

LESSONS = ("01_naive_attention", "02_kv_cache", "04_paged_blocks", "09_engine", "10_distributed")


def loaded(names: set[str]) -> set[str]:
    """Return the modules of this repository that an import of these names loads."""
    done, waiting = set(), set(names)
    while waiting:
        name = waiting.pop()
        parts = name.split(".")
        done.add(name)
        found = {".".join(parts[:i]) for i in range(1, len(parts))}
        found |= imports(MODULES[name], at_import_time=True) if name in MODULES else set()
        waiting |= found - done
    return done & MODULES.keys()


@functools.cache
def hidden_imports(module: str) -> set[str]:
    """Return what a module imports of the hidden packages when it is loaded."""
    nodes = ast.parse(MODULES[module].read_text()).body
    packages = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    packages |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    return {package for package in packages if package.partition(".")[0] in HIDDEN}


def linux_only(names: set[str]) -> dict[str, set[str]]:
    """Return the hidden packages that an import of these names needs, by the module that imports them."""
    return {module: hidden for module in loaded(names) if (hidden := hidden_imports(module))}


@pytest.mark.slow
@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson_loads_nothing_that_is_linux_only(lesson):
    cells = json.loads((ROOT / "lessons" / f"{lesson}.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    nodes = [node for source in sources if source[:1] != "%" for node in ast.walk(ast.parse(source))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {f"{n.module}.{alias.name}" for n in nodes if isinstance(n, ast.ImportFrom) for alias in n.names}
    names |= {name.rpartition(".")[0] for name in names}
    assert not {name for name in names if name.partition(".")[0] in HIDDEN}
    assert len(loaded(names)) > 20
    assert linux_only(names) == {}


def test_the_readers_copy_is_made_without_what_is_linux_only():
    assert linux_only(imports(ROOT / "src" / "repository" / "my_lessons.py", at_import_time=True)) == {}


def test_a_module_that_is_linux_only_is_found():
    assert linux_only({"pagewise.kernels.online_softmax"})["pagewise.kernels.partial"] == {"triton", "triton.language"}


def test_a_notebook_without_triton_ends_in_the_remedy(monkeypatch):
    """IPython hands the error to the function that it got, and shows the notes of an error."""
    handlers, shown = {}, []
    shell = SimpleNamespace(
        set_custom_exc=lambda kinds, show: handlers.update(dict.fromkeys(kinds, show)),
        showtraceback=lambda what, tb_offset: shown.append(what[1]),
    )
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    device.explain_missing_triton()
    assert handlers == {}  # Triton is here
    monkeypatch.setattr(device, "triton_mode", lambda: "unavailable")
    device.explain_missing_triton()
    for name in ("triton.language", "no_such_package"):
        handlers[ModuleNotFoundError](shell, ModuleNotFoundError, ModuleNotFoundError("gone", name=name), None)
    assert [getattr(error, "__notes__", []) for error in shown] == [[device.NO_TRITON], []]


LOOK = """
import ast, json, sys
from pathlib import Path
sys.path[0] = "src"
sys.path.append("tests")
import without_linux
without_linux.hide()
for lesson in sys.argv[1:]:
    cells = json.loads(Path("lessons", lesson + ".ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    trees = [ast.parse(source) for source in sources if not source.startswith("%")]
    imports = [node for tree in trees for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    exec(compile(ast.Module(imports, []), lesson, "exec"), {})
    print(lesson, len(imports) > 5)
without_linux.pretend_macos()
from pagewise.experiments.scoreboard import ROWS, _score_here, _table
from pagewise.tools.device import banner, explain_missing_triton
print(banner())
print(_table({row: _score_here(row) for row in ROWS if row.lesson == 5}))
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance(colors="nocolor")
explain_missing_triton()
for line in ("import triton", "from pagewise.kernels.partial import fold", "import no_such_package"):
    print("ran:", shell.run_cell(line).success)
"""


@pytest.mark.slow
@pytest.mark.skipif(not is_full(), reason="takes as long as all other tests of this file ten times: make test-full")
def test_five_lessons_import_nothing_that_is_linux_only_and_the_others_end_in_the_remedy():
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LOOK, *LESSONS]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *lessons, banner = done.stdout.splitlines()[:6]
    assert [line.rpartition(" ")[2] for line in lessons] == ["True"] * 5
    assert banner.endswith(" · no triton")
    assert "grouped         runs on Linux only\n" in done.stdout
    assert done.stdout.count("ran: False") == 3
    remedy = "Triton exists for Linux only: run this lesson in the container, on Colab, in Codespaces or under WSL."
    assert (done.stdout + done.stderr).count(remedy) == 2
