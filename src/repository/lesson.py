"""Run the code of one lesson in this process: `python src/repository/lesson.py lessons/03_online_softmax.ipynb`.

`make gpu-check` uses it, so that a GPU server with its own fixed packages needs none for notebooks. The code cells run
one after the other, with a stand-in for IPython. They compute, check and print the same, and no figure is shown.
"""

import json
import linecache
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import cudascope


class Shell:
    """The part of IPython's shell that lessons use: cell magics, and names bound in the notebook."""

    def __init__(self, namespace: dict[str, object]) -> None:
        self.user_ns, self.push = namespace, namespace.update
        self.magics: dict[str, Callable[[str, str], None]] = {}

    def register_magic_function(self, function: Callable[[str, str], None], kind: str) -> None:
        self.magics[function.__name__] = function

    def __bool__(self) -> bool:
        return False  # matplotlib then knows that this is not the real shell


def run_plainly(path: Path) -> int:
    """Run the code cells in this process and return their number. Exits with 1 where one raises."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    os.environ.setdefault("MPLBACKEND", "Agg")
    os.chdir(path.parent)
    lesson = sys.modules["__main__"] = ModuleType("__main__")  # as in a notebook: other processes get its functions
    shell = Shell(vars(lesson))
    sys.modules["IPython"] = SimpleNamespace(get_ipython=lambda: shell, version_info=(9, 0))  # which matplotlib asks
    sys.modules["IPython.display"] = SimpleNamespace(Markdown=str)
    lesson.display = lambda *shown: None  # the name that IPython gives to every notebook
    sys.modules["IPython.core.error"] = SimpleNamespace(UsageError=ValueError)
    for number, source in enumerate(sources, start=1):
        name = f"<{path.stem}, code cell {number}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)  # for tracebacks and Triton
        try:
            if "%load_ext cudascope\n" in source:
                cudascope.load_ipython_extension(shell)
                source = source.replace("%load_ext cudascope\n", "\n")
            if magic := re.match(r"%%(\w+) *(.*)\n", source):
                shell.magics[magic[1]](magic[2], source[magic.end() :])
            else:
                exec(compile(source, name, "exec"), vars(lesson))
        except Exception:
            traceback.print_exc()  # with the cell's lines, which Python itself would not print
            sys.exit(f"code cell {number} of {len(sources)} failed")
        if "matplotlib.pyplot" in sys.modules:
            sys.modules["matplotlib.pyplot"].close("all")
    return len(sources)


def main() -> None:
    """Run the command line. Exit with 1 and the error if a cell fails."""
    print(f"{run_plainly(Path(sys.argv[1]).resolve())} code cells ran to the end")


if __name__ == "__main__":
    main()
