"""The resources that ptxas gives a kernel. Triton's wheel has a ptxas, so neither a GPU nor CUDA is needed."""

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from cudascope.gpus import H100, thread_blocks_per_sm
from cudascope.toolchain.cache import cache_dir, digest, publish, used

_OF_CUDA_12_8 = (8, 7)  # the newest version of PTX that the older ptxas of Triton's wheel compiles


class PtxText(NamedTuple):
    """The PTX of a kernel. `target` is what it was compiled for, such as "sm_90a"."""

    text: str
    entry: str
    target: str


class Resources(NamedTuple):
    """The resources of one thread block of a compiled kernel, as ptxas reports them."""

    registers: int  # per thread
    shared_bytes: int  # static shared memory, per thread block
    spilled_bytes: int  # per thread: stores into local memory for want of registers

    def thread_blocks_per_sm(self, threads: int) -> int:
        """Thread blocks of `threads` that an SM of an H100 (or A100) holds by its registers and its threads."""
        fits = thread_blocks_per_sm(H100, threads, self.registers, 0)
        return min(fits["threads"], fits["registers"])


@functools.lru_cache(maxsize=64)
def resources_of(ptx: PtxText, sm: int) -> Resources | None:
    """Return the resources of the kernel on a GPU of compute capability `sm`.

    PTX for a GPU with special features ("sm_90a") is compiled for that GPU alone, and PTX for a later GPU than `sm` for
    the later one. What ptxas says is kept in the cache of kernels. The result is None without a ptxas, and for text
    that ptxas does not compile.
    """
    wanted = int(re.search(r"\d+", ptx.target)[0])
    target = ptx.target if wanted > sm or ptx.target[-1].isalpha() else f"sm_{sm}"
    program = _program(ptx, target)
    if program is None:
        return None
    made = os.stat(program)
    kept = cache_dir() / f"{digest(*ptx, target, program, f'{made.st_size} {made.st_mtime_ns}')}.ptxas"
    try:
        report = used(kept).read_text(encoding="utf-8")
    except FileNotFoundError:
        done = run_ptxas(ptx, target, os.devnull)
        if done.returncode:
            return None
        report = done.stderr + done.stdout
        publish(kept, report.encode())
    return read_resources(report, ptx.entry)


def run_ptxas(ptx: PtxText, target: str, output: str) -> subprocess.CompletedProcess | None:
    """Compile the kernel to the cubin `output`. The result is what ptxas said, or None without a ptxas."""
    program = _program(ptx, target)
    if program is None:
        return None
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".ptx") as file:
        file.write(ptx.text)
        file.flush()
        command = [program, "-v", "--gpu-name", target, "--entry", ptx.entry, file.name, "-o", output]
        return subprocess.run(command, capture_output=True, text=True, check=False)


def _program(ptx: PtxText, target: str) -> str | None:
    """The ptxas that knows the GPU and the version of PTX, or None."""
    version = re.search(r"^\s*\.version\s+(\d+)\.(\d+)", ptx.text, re.MULTILINE)
    is_new = target.startswith("sm_1") or (version is not None and tuple(map(int, version.groups())) > _OF_CUDA_12_8)
    return tool_of_triton("ptxas-blackwell" if is_new else "ptxas") or shutil.which("ptxas")


def registers_of(ptx: PtxText, sm: int) -> int | None:
    """Return the registers per thread of the kernel, or None. See `resources_of`."""
    resources = resources_of(ptx, sm)
    return resources and resources.registers


def read_resources(report: str, symbol: str) -> Resources:
    """Return the resources of `symbol` from a report of ptxas. The report has a paragraph for each kernel."""
    parts = report.split("Compiling entry function")
    paragraph = next(part for part in parts if part.lstrip().startswith(f"'{symbol}'"))

    def count(pattern: str) -> int:
        match = re.search(pattern, paragraph)
        return int(match[1]) if match else 0

    return Resources(count(r"Used (\d+) registers"), count(r"(\d+) bytes smem"), count(r"(\d+) bytes spill stores"))


def check_arch(arch: object) -> None:
    """Raise TypeError or ValueError unless `arch` names a GPU's code, such as "sm_90" or "sm_90a"."""
    if not isinstance(arch, str) or not re.fullmatch(r"sm_\d+[af]?", arch):
        error = ValueError if isinstance(arch, str) else TypeError
        raise error(f'arch must be a string such as "sm_90", got {arch!r}')


def tool_of_triton(name: str) -> str | None:
    """Return the path of a program of CUDA ("ptxas", "nvdisasm") in Triton's wheel, or None."""
    triton = importlib.util.find_spec("triton")
    bundled = Path(triton.origin).parent / "backends/nvidia/bin" / name if triton and triton.origin else None
    return str(bundled) if bundled and bundled.exists() else None
