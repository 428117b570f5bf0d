"""Hold cudascope's counts against those of a GPU: `python -m pagewise.experiments.hardware_counts`.

Each case of `instruction_counts` runs once on the GPU under NVIDIA's Nsight Compute, and once on the CPU, where
cudascope executes the PTX for the same architecture. Each kernel is a row:

- sectors of 32 bytes that loads and stores of global memory move. ncu's `l1tex__t_sectors_…_op_ld` includes cp.async
  (LDGSTS), but no copies by TMA, which pass by another unit;
- wavefronts of shared memory: the turns that its banks need, bank conflicts included. ncu's
  `memory_l1_wavefronts_shared` follows from the addresses. Its counter of bank conflicts does not: it also counts the
  turns that an access waits for another unit;
- instructions that warps execute. cudascope counts PTX, and the GPU executes machine code, so these never agree.

cudascope's README explains where the two differ ("Against a GPU").

The GPU must allow its counters to be read, and `ncu` must be on the PATH.
"""

import argparse
import csv
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from cudascope.watch.report import Launch
from pagewise.experiments.instruction_counts import CASES, counted
from pagewise.tools.progress import progress, say
from pagewise.tools.records import table

SECTORS = "l1tex__t_sectors_pipe_lsu_mem_global_op_{}.sum"
METRICS = (  # of `Counts`, in its order
    SECTORS.format("ld"),
    SECTORS.format("st"),
    "memory_l1_wavefronts_shared",
    "smsp__inst_executed.sum",
)


class Counts(NamedTuple):
    """What one launch did."""

    kernel: str
    loads: int  # sectors
    stores: int  # sectors
    wavefronts: int
    instructions: int


def by_cudascope(launch: Launch) -> Counts:
    """Return the counts of an observed launch."""
    loads, stores = (launch.count(access, "global").sectors for access in ("read", "write"))
    return Counts(base_name(launch.kernel), loads, stores, launch.work.wavefronts, launch.instructions.total)


def by_ncu(text: str) -> Iterator[Counts]:
    """Yield the counts of the kernels in a raw page of ncu (`--csv --page raw`), but of none that torch has."""
    rows = csv.DictReader(text[text.index('"ID"') :].splitlines())
    next(rows)  # the units
    for row in rows:
        name = row["Kernel Name"].removeprefix("void ")
        if not name.startswith("at::"):
            numbers = (row[each].partition(" ")[0].replace(",", "") for each in METRICS)  # "1,280 (0x7f…: 256; …)"
            yield Counts(base_name(name), *map(int, numbers))


def base_name(kernel: str) -> str:
    """Return the name of a kernel without its template's and its own arguments."""
    return kernel.partition("(")[0].partition("<")[0]


def measured(case: str) -> list[Counts]:
    """Return the counts of a case on the GPU. RuntimeError: ncu has failed."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "page.csv")
        command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw"]
        command += ["--print-units", "base", "--log-file", page, "--metrics", ",".join(METRICS)]
        done = subprocess.run([*command, sys.executable, "-m", __spec__.name, "--inside", case], check=False)
        text = page.read_text() if page.exists() else ""
    if done.returncode or '"ID"' not in text:
        raise RuntimeError(f"{case}: ncu ended with status {done.returncode}\n{text}")
    return [*by_ncu(text)]


def run_inside(case: str) -> None:
    """Run a case on the GPU, under ncu: once to compile, and once to be profiled."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        run = CASES[case].prepare()
        prepared = CASES[case].prepare()
        run()
        torch.cuda.synchronize()
        with torch.cuda.profiler.profile():
            prepared()


def row(case: str, ours: Counts, theirs: Counts) -> tuple[str, ...]:
    """Return a row of the table: one number where both counts are equal, else cudascope's and ncu's."""
    pairs = zip(ours[1:], theirs[1:], strict=True)
    return case, ours.kernel, *(f"{a:,}" if a == b else f"{a:,} / {b:,}" for a, b in pairs)


def rows_of(case: str, arch: str) -> Sequence[tuple[str, ...]]:
    """Return the rows of a case. RuntimeError: the two did not launch the same kernels."""
    ours, theirs = [by_cudascope(launch) for launch in counted(CASES[case], arch)], measured(case)
    if [each.kernel for each in ours] != [each.kernel for each in theirs]:
        raise RuntimeError(
            f"{case}: cudascope ran {[each[0] for each in ours]}, the GPU {[each[0] for each in theirs]}"
        )
    return [row(case, *pair) for pair in zip(ours, theirs, strict=True)]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Hold cudascope's counts against those of a GPU.")
    parser.add_argument("--only", default="", metavar="TEXT", help=f"cases with this in their name: {[*CASES]}")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside:
        run_inside(asked.inside)
        return
    names = [name for name in CASES if asked.only in name]
    if not names:
        parser.error(f"--only must be a part of one of {', '.join(CASES)}, got {asked.only}")
    if not torch.cuda.is_available() or shutil.which("ncu") is None:
        raise SystemExit("this needs a GPU, and Nsight Compute's ncu on the PATH")
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    rows = [row for name in progress(names, "cases") for row in rows_of(name, arch)]
    say(table(("case", "kernel", "load sectors", "store sectors", "shared wavefronts", "instructions"), rows))


if __name__ == "__main__":
    main()
