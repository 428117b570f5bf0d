"""Lessons for Colab: `python src/repository/colab.py https://github.com/OWNER/NAME lessons build/colab`.

The first cell of each installs pagewise from this address. The book's buttons open these notebooks.
"""

import shutil
import sys
from pathlib import Path

import nbformat

from notebooks import write

INSTALL = """\
# Choose a T4 GPU (Runtime, Change runtime type), and run this cell first.
!git clone -q --depth 1 {address} pagewise
%pip install -q "./pagewise/src/cudascope[cuda]" ./pagewise
%cd -q pagewise/lessons"""


def prepare(address: str, folder: Path, out: Path) -> None:
    """Write the notebooks of `folder` to `out`, each with a first cell that installs the repository at `address`."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for path in sorted(folder.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        notebook.cells.insert(0, nbformat.v4.new_code_cell(INSTALL.format(address=address)))
        write(notebook, out / path.name)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: python src/repository/colab.py ADDRESS FOLDER OUT")
    prepare(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
