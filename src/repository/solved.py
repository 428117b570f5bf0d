"""The lessons with every exercise solved after their last cell: `python src/repository/solved.py FOLDER OUT`.

`make test` runs them. It compares the stored outputs as ever. Then each solution is defined and judged in the lesson's
own namespace, as when a reader pastes it after "Run All".
"""

import ast
import re
import shutil
import sys
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from pagewise.exercises.checkers import BY_NAME


def solved(notebook: NotebookNode) -> NotebookNode:
    """Add two cells to `notebook` for each exercise, in the order in which it checks them."""
    source = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    count = sum(cell.cell_type == "code" for cell in notebook.cells)
    for name in dict.fromkeys(re.findall(r"\bcheck\.(\w+)\((?!\))", source)):
        solution, theirs = BY_NAME[name].solution, name
        if "__global__" in solution:
            solution = f"%%cuda {name}\n{solution}"
        else:
            theirs = ast.parse(solution).body[-1].name
        for cell in (solution, f"assert check.{name}({theirs}).right, check.{name}({theirs}).message"):
            count += 1
            cell_id = f"solved-{len(notebook.cells) + 1}"
            notebook.cells.append(nbformat.v4.new_code_cell(cell, execution_count=count, id=cell_id))
    return notebook


def main(folder: Path, out: Path) -> None:
    """Write the solved lessons of `folder` into `out`, together with the files that they read."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.ipynb", "_*", ".*", "conf.py"))
    for path in sorted(folder.glob("*.ipynb")):
        nbformat.write(solved(nbformat.read(path, as_version=4)), out / path.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
