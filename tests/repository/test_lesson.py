"""A lesson run without notebook packages: its code cells, in order, in one process."""

import json
import subprocess
import sys

import pytest

from conftest import ROOT

SCRIPTS = ROOT / "src" / "repository"
pytestmark = pytest.mark.slow

CELLS = [
    "import torch, inspect\nfrom IPython.display import Markdown\nfrom pathlib import Path",
    "def twice(x):\n    return 2 * x",
    "%load_ext cudascope\nfrom matplotlib import pyplot\npyplot.plot([1, 2])\npyplot.show()",
    "%%cuda add<float>\ntemplate <typename T> __global__ void add(T* x) { x[threadIdx.x] += 2; }",
    "x = torch.ones(3)\nwith torch.no_grad():\n    add[1, 3](x)\nprint(x.tolist())",
    "print(inspect.getsource(twice).rstrip(), twice(21), Path('beside').exists())\nMarkdown('shown')",
]


def run(folder, *sources):
    """Run a lesson of these cells where notebook packages are missing. Return what it prints and how it exits."""
    cells = [{"cell_type": "code", "source": source.splitlines(keepends=True)} for source in sources]
    path = folder / "07_stub.ipynb"
    path.write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": ["# no code"]}, *cells]}))
    (folder / "beside").touch()
    missing = ("nbformat", "nbclient", "IPython")
    hide = f"import sys; sys.modules.update(dict.fromkeys({missing})); sys.path[0] = {str(SCRIPTS)!r}; "
    command = [sys.executable, "-c", f"{hide}import lesson; lesson.main()", path]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_cells_run_in_order_in_the_lessons_folder(tmp_path):
    done = run(tmp_path, *CELLS)
    assert done.returncode == 0, done.stderr
    assert "[3.0, 3.0, 3.0]" in done.stdout
    assert "return 2 * x 42 True" in done.stdout
    assert done.stdout.splitlines()[-1] == "6 code cells ran to the end"


def test_a_failing_cell_shows_its_source(tmp_path):
    done = run(tmp_path, "x = 0", "y = 1\ny / x", "print('not reached')")
    assert done.returncode == 1
    assert '"<07_stub, code cell 2>", line 2' in done.stderr
    assert "y / x" in done.stderr
    assert "ZeroDivisionError" in done.stderr
    assert done.stderr.endswith("code cell 2 of 3 failed\n")
    assert "not reached" not in done.stdout
