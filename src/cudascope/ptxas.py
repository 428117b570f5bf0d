"""The registers that ptxas gives a kernel. Triton's wheel has a ptxas, so neither a GPU nor CUDA is needed."""

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple


class PtxText(NamedTuple):
    """The PTX of a kernel. `target` is what it was compiled for, such as "sm_90a"."""

    text: str
    entry: str
    target: str


@functools.lru_cache(maxsize=64)
def registers_of(ptx: PtxText, sm: int) -> int | None:
    """Return the registers per thread of the kernel on a GPU of compute capability `sm`.

    PTX for a GPU with special features ("sm_90a") is compiled for that GPU alone, and PTX for a later GPU than `sm` for
    the later one. The result is None without a ptxas, and for text that ptxas does not compile.
    """
    wanted = int(re.search(r"\d+", ptx.target)[0])
    target = ptx.target if wanted > sm or ptx.target[-1].isalpha() else f"sm_{sm}"
    program = _ptxas("ptxas-blackwell" if target.startswith("sm_1") else "ptxas")
    if program is None:
        return None
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx.text)
        file.flush()
        command = [program, "-v", "--gpu-name", target, "--entry", ptx.entry, file.name, "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    used = re.search(r"Used (\d+) registers", done.stderr + done.stdout)
    return int(used[1]) if used else None


def _ptxas(name: str) -> str | None:
    """The ptxas of Triton's wheel, or the one of an installed CUDA."""
    triton = importlib.util.find_spec("triton")
    bundled = Path(triton.origin).parent / "backends/nvidia/bin" / name if triton and triton.origin else None
    return str(bundled) if bundled and bundled.exists() else shutil.which("ptxas")
