"""Runs one lesson, and says how: `python -m pagewise.tools.lesson lessons/03_online_softmax.ipynb`.

As a notebook where the packages for that are installed (the extra `lessons`). Elsewhere, as on a GPU server with its
own fixed packages, the code cells run one after the other in this process: what they compute, check and print is the
same, and nothing is shown.
"""

import importlib.util
import json
import linecache
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType, SimpleNamespace

NOTEBOOK_PACKAGES = ("nbformat", "nbclient", "ipykernel")


def run_plainly(path: Path) -> int:
    """Run the code cells in this process and return their number. Exits with 1 where one raises."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    os.environ.setdefault("MPLBACKEND", "Agg")
    if importlib.util.find_spec("IPython") is None:
        sys.modules["IPython.display"] = SimpleNamespace(Markdown=str)  # all that lessons take from it
    os.chdir(path.parent)
    lesson = sys.modules["lesson"] = ModuleType("lesson")
    for number, source in enumerate(sources, start=1):
        name = f"<{path.stem}, code cell {number}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)  # for tracebacks and Triton
        try:
            exec(compile(_python(source), name, "exec"), vars(lesson))
        except Exception:
            traceback.print_exc()  # unlike Python's own printing of what nobody caught, with the cell's lines
            sys.exit(f"code cell {number} of {len(sources)} failed")
        if "matplotlib.pyplot" in sys.modules:
            sys.modules["matplotlib.pyplot"].close("all")
    return len(sources)


def _python(source: str) -> str:
    """A cell as Python: one of CUDA C++ becomes the call that binds its kernel."""
    first, _, cell = source.partition("\n")
    if not first.startswith("%%cuda "):
        return source
    line = first.removeprefix("%%cuda ")
    return f"globals().update(__import__('pagewise.cuda.magic').cuda.magic.kernel_of({line!r}, {cell!r}))"


def main() -> None:
    """The command line; exits with 1 and what went wrong if a cell fails."""
    path = Path(sys.argv[1]).resolve()
    missing = [name for name in NOTEBOOK_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        num_cells, how = run_plainly(path), f"in a plain process: there is no {', '.join(missing)}"
    else:
        from pagewise.tools.notebooks import execute

        _, num_cells, _, problem = execute(path)
        how = "as a notebook"
        if problem:
            sys.exit(problem)
    print(f"{num_cells} code cells ran to the end, {how}")


if __name__ == "__main__":
    main()
