"""Run, refresh and check the lessons: `python src/repository/notebooks.py run|refresh|check FOLDER-OR-FILE …`."""

import argparse
import ast
import hashlib
import json
import os
import re
import shutil
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
MACHINE_PATH = re.compile(r"(?<![\w./])/(?:home|root|tmp|usr|work|opt|mnt|Users|content)/[\w.]")
UNCOMPARED = "nbval-ignore-output"
FOLDED = {"hide-cell", "hide-input"}  # tags of cells whose source is folded, in the book and in Jupyter
HIDDEN = {"hide-output"}  # tags of cells whose output is folded
TIMEOUT = 1200  # seconds for one cell
NEEDS_LINUX = re.compile(r"needs Linux|No module named 'triton")  # in the error of a notebook


def execute(path: Path) -> tuple[NotebookNode | None, int, float, str]:
    """Return (executed notebook, number of code cells, seconds, "") or (None, number of cells, seconds, the error)."""
    notebook = nbformat.read(path, as_version=4)
    cells = [c for c in notebook.cells if c.cell_type == "code"]
    options = {"timeout": TIMEOUT, "kernel_name": "python3", "extra_arguments": ["--log-level=40"]}
    client = NotebookClient(notebook, resources={"metadata": {"path": path.parent}}, **options)
    start = time.perf_counter()
    try:
        client.execute()
        notebook.metadata["pagewise"] = {"measured": _digests(notebook)}
        problem = ""
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        problem = f"{path.name}: {error}"  # nbclient's message holds the cell's source and the traceback
    return (None if problem else notebook), len(cells), time.perf_counter() - start, problem


def needs_linux(problem: str) -> bool:
    """Return whether a notebook failed because Triton and the CPU runner for CUDA kernels exist on Linux only."""
    return sys.platform != "linux" and NEEDS_LINUX.search(problem) is not None


def execute_all(folder: Path, jobs: int, keep) -> bool:
    """Execute the notebooks of `folder`, `jobs` at a time, with a line for each, and call `keep(path, notebook)`.

    `folder` may also be one notebook.
    """
    from pagewise.tools.progress import progress_bar, say  # pagewise imports torch, and `check` needs none of that

    paths = [folder] if folder.is_file() else sorted(folder.glob("*.ipynb"))
    if not paths:
        sys.exit(f"{folder} holds no notebooks")
    problems = []
    # Each notebook gets its share of the cores. More threads than cores would only wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    with ProcessPoolExecutor(jobs) as pool, progress_bar(len(paths), "lessons") as bar:
        started = {pool.submit(execute, path): path for path in paths}
        for future in as_completed(started):
            notebook, cells, seconds, problem = future.result()
            verdict = "FAILED" if problem else "ok"
            if needs_linux(problem):
                notebook, problem = nbformat.read(started[future], as_version=4), ""
                verdict = "needs Linux: its stored outputs are kept"
            say(f"{started[future].stem:32} {cells:3} code cells {seconds:7.1f} s  {verdict}")
            bar.update()
            if problem:
                problems.append(problem)
            else:
                keep(started[future], notebook)
    print("\n\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    return not problems


def run(folder: Path, out: Path) -> bool:
    """Execute all notebooks into `out`, and copy the other files of the book."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.ipynb", "_*", ".*"))
    return execute_all(folder, 2, lambda path, notebook: write(notebook, out / path.name))


def refresh(folder: Path, *, remeasure: bool) -> bool:
    """Execute all notebooks in place, one at a time so that they do not disturb each other's timings.

    Outputs that depend on time or device (tagged nbval-ignore-output) stay as they are, unless the code of their cell
    has changed since they were measured, or `remeasure` is set. A cell that uses names of such a changed cell, as a
    figure of its timings does, is measured again with it.
    """

    def keep(path: Path, notebook: NotebookNode) -> None:
        stored = nbformat.read(path, as_version=4)
        if not remeasure:
            _keep_measured(stored, notebook)
        write(notebook, path)

    return execute_all(folder, 1, keep)


def _digests(notebook: NotebookNode) -> list[str]:
    """Return a digest of each cell whose output depends on time or device. The stored output belongs to this code."""
    return [hashlib.sha256(cell.source.encode()).hexdigest()[:16] for cell in _measuring(notebook)]


def _measuring(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if UNCOMPARED in cell.metadata.get("tags", [])]


def _keep_measured(stored: NotebookNode, fresh: NotebookNode) -> None:
    """Give the cells of `fresh` that measure the stored outputs, as far as these belong to the same code."""
    was, now = (each.metadata.get("pagewise", {}).get("measured", []) for each in (stored, fresh))
    if len(was) != len(now):
        return
    changed: set[str] = set()  # names that a changed cell binds
    for old, new, before, after in zip(_measuring(stored), _measuring(fresh), was, now, strict=True):
        names = [node for node in ast.walk(ast.parse(new.source)) if isinstance(node, ast.Name)]
        if before == after and not changed & {name.id for name in names}:
            new.outputs = old.outputs
        else:
            changed |= {name.id for name in names if isinstance(name.ctx, ast.Store)}


def write(notebook: NotebookNode, path: Path) -> None:
    """Write the canonical form: fixed metadata, numbered cells, nothing about the machine that ran it."""
    path.write_text(canonical(notebook), encoding="utf-8")


def canonical(notebook: NotebookNode) -> str:
    """Return the notebook as text, which depends on its sources and outputs only."""
    cells = []
    for number, cell in enumerate(notebook.cells, 1):
        tags = cell.metadata.get("tags")
        metadata = {"tags": tags} if tags else {}
        folds = {"source_hidden": FOLDED, "outputs_hidden": HIDDEN}
        if folded := {fold: True for fold, of in folds.items() if of & set(tags or ())}:
            metadata["jupyter"] = folded
        kept = {"cell_type": cell.cell_type, "id": f"cell-{number:03}", "metadata": metadata, "source": cell.source}
        if cell.cell_type == "code":
            kept |= {"execution_count": cell.execution_count, "outputs": _outputs(cell.outputs)}
        cells.append(kept)
    metadata = METADATA | ({"pagewise": notebook.metadata["pagewise"]} if "pagewise" in notebook.metadata else {})
    whole = nbformat.from_dict({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5})
    return nbformat.writes(whole).rstrip("\n") + "\n"


def _outputs(outputs: list[NotebookNode]) -> list[dict]:
    """Return the outputs without metadata. Neighbouring pieces of printed text become one output."""
    kept: list[dict] = []
    for output in outputs:
        if output.output_type == "stream" and kept and kept[-1].get("name") == output.name:
            kept[-1]["text"] += output.text
        else:
            kept.append({k: v for k, v in output.items() if k != "transient"})
    return [output | ({"metadata": {}} if "metadata" in output else {}) for output in kept]


def check(folder: Path) -> list[str]:
    """Return the problems of the committed notebooks, each as a sentence."""
    return [f"{path.name}: {problem}" for path in sorted(folder.glob("*.ipynb")) for problem in check_notebook(path)]


def check_notebook(path: Path) -> list[str]:
    """Check that a notebook ran top to bottom, and has no stderr, no error and no machine path, in canonical form."""
    notebook = nbformat.read(path, as_version=4)
    problems = []
    code = [c for c in notebook.cells if c.cell_type == "code"]
    if [c.execution_count for c in code] != list(range(1, len(code) + 1)):
        problems.append("not executed top to bottom in one go: run make refresh")
    for cell in code:
        for output in cell.outputs:
            where = f"code cell {cell.execution_count}"
            if output.get("name") == "stderr":
                problems.append(f"{where} writes to stderr: {output.text[:100]!r}")
            if output.output_type == "error" and "raises-exception" not in str(cell.metadata.get("tags")):
                problems.append(f"{where} ends in {output.ename}")
            text = json.dumps({k: v for k, v in output.get("data", {}).items() if not k.startswith("image/")})
            if found := MACHINE_PATH.search(text + output.get("text", "")):
                problems.append(f"{where} shows a path of a machine: {found.group()}…")
    if path.read_text(encoding="utf-8") != canonical(notebook):
        problems.append("not in canonical form: run make refresh")
    return problems


def main() -> None:
    """Run the command line. Exit with 1 if a lesson failed or is unclean."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["run", "refresh", "check"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path, nargs="?", help="where `run` puts the executed notebooks")
    parser.add_argument("--remeasure", action="store_true", help="`refresh` replaces timings too")
    options = parser.parse_args()
    if options.command == "check":
        problems = check(options.folder)
        print("\n".join(problems) or "the lessons are executed, clean and canonical")
        sys.exit(bool(problems))
    if options.command == "refresh":
        sys.exit(not refresh(options.folder, remeasure=options.remeasure))
    if options.out is None:
        parser.error("run needs the folder to put the executed notebooks in")
    sys.exit(not run(options.folder, options.out))


if __name__ == "__main__":
    main()
