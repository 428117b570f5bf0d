"""The lessons with every exercise solved behind their last cell: `python -m pagewise.exercises.solved FOLDER OUT`.

What `make test` runs: the stored outputs are compared as ever, and then each folded solution is defined and judged in
the lesson's own namespace, as a reader would who pastes it after "Run All".
"""

import ast
import re
import shutil
import sys
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from pagewise.exercises.checkers import show


def solved(notebook: NotebookNode) -> NotebookNode:
    """`notebook` with two cells more per exercise, in the order in which it checks them."""
    source = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    for name in dict.fromkeys(re.findall(r"\bcheck\.(\w+)\((?!\))", source)):
        code = show(name)
        theirs = name if code.language == "cpp" else _last_function(code.text)
        _append(notebook, f"%%cuda {name}\n{code.text}" if code.language == "cpp" else code.text)
        _append(notebook, f"assert check.{name}({theirs}).right, check.{name}({theirs}).message")
    return notebook


def _last_function(source: str) -> str:
    return [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)][-1]


def _append(notebook: NotebookNode, source: str) -> None:
    count = sum(cell.cell_type == "code" for cell in notebook.cells) + 1
    cell_id = f"solved-{len(notebook.cells) + 1}"
    notebook.cells.append(nbformat.v4.new_code_cell(source, execution_count=count, id=cell_id))


def main(folder: Path, out: Path) -> None:
    """Write the solved lessons of `folder` into `out`, with what they read beside them."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.ipynb", "_*", ".*", "conf.py"))
    for path in sorted(folder.glob("*.ipynb")):
        nbformat.write(solved(nbformat.read(path, as_version=4)), out / path.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
