"""The lessons, with every cell run again after the last one: `python src/repository/again.py FOLDER OUT`.

`make test` runs them and compares each output with the stored one. A notebook of OUT holds, in this order:

1. the lesson. After its first cell, steppers draw their figures and do not render them, because pictures are not
   compared;
2. its code cells once more, from the last to the first, as when a reader comes back to a cell. No figure is rendered;
3. the solution of each exercise, defined and judged in the lesson's own namespace;
4. an empty namespace, as after a restart: the set-up cell, and then the cells of each exercise.
"""

import ast
import itertools
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from notebooks import UNCOMPARED
from pagewise.exercises.checkers import BY_NAME

UNRENDERED_STEPS = """# Steppers draw each figure and do not render it
from pagewise.figures import steps as _steps

_steps._png = lambda figure: b"unrendered"
"""
UNRENDERED = """# No figure is rendered
from matplotlib.figure import Figure

_ = get_ipython().display_formatter.formatters["image/png"].for_type(Figure, lambda figure: "")
"""
SET_UP = "# Run this first. After a restart, "  # the set-up cell begins so
JUDGES = re.compile(rf"\bcheck\.({'|'.join(BY_NAME)})\((?!\))")


def again(notebook: NotebookNode) -> NotebookNode:
    """Return `notebook` with a cell after its first one, and followed by the cells of steps 2 to 4."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    set_up = [cell for cell in code if cell.source.startswith(SET_UP)]
    steps, unrendered, reset = map(nbformat.v4.new_code_cell, (UNRENDERED_STEPS, UNRENDERED, "%reset -f"))
    notebook.cells.insert(notebook.cells.index(code[0]) + 1, steps)
    added = [unrendered, *reversed(code), *_solutions(code), reset, *set_up, *_of_exercises(code)]
    for number, cell in enumerate(added, len(code) + 2):
        copy = nbformat.from_dict(cell | {"id": f"again-{number}", "execution_count": number})
        if cell in set_up:  # an extension that is loaded already says so
            copy.metadata = {"tags": [UNCOMPARED]}
        notebook.cells.append(copy)
    return notebook


def _solutions(code: list[NotebookNode]) -> Iterator[NotebookNode]:
    """Yield two cells for each exercise, in the order in which the lesson checks them."""
    names = JUDGES.findall("\n".join(cell.source for cell in code))
    for name in dict.fromkeys(names):
        solution, theirs = BY_NAME[name].solution, name
        if "__global__" in solution:
            solution = f"%%cuda {name}\n{solution}"
        else:
            theirs = ast.parse(solution).body[-1].name
        yield nbformat.v4.new_code_cell(solution)
        yield nbformat.v4.new_code_cell(f"assert check.{name}({theirs}).right, check.{name}({theirs}).message")


def _of_exercises(code: list[NotebookNode]) -> Iterator[NotebookNode]:
    """Yield each cell that judges an answer, after the cell with the answer if that is a CUDA kernel."""
    for before, cell in itertools.pairwise(code):
        if judged := JUDGES.search(cell.source):
            if before.source.startswith(f"%%cuda {judged[1]}\n"):
                yield before
            yield cell


def main(folder: Path, out: Path) -> None:
    """Write the notebooks of `folder` into `out`, together with the files that they read."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.ipynb", "_*", ".*", "conf.py"))
    for path in sorted(folder.glob("*.ipynb")):
        nbformat.write(again(nbformat.read(path, as_version=4)), out / path.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
