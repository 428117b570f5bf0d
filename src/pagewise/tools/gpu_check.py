"""Check and measure a machine with a GPU in ten minutes: `make gpu-check`.

    python -m pagewise.tools.gpu_check [--minutes 10] [--out build/gpu-check] [--only memcheck speed]

The check is a list of parts, the most important first. Each part is a process with a time limit, so that a part that
fails, hangs or is missing costs only itself. At any time the folder holds all results so far:

    summary.json           The status, time and last lines of each part. A part that begins or ends updates the file.
    log.txt                The output of the parts.
    paged_attention.json   The measurements, one record each. There are four more such files, one per benchmark.
    dataflow.json          The inflection points of Llama-2-7B's weights, for Dataflow.load.

If this process itself is killed, the part that was running stays "running" in the summary.
"""

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from pagewise.tools.progress import progress_bar, say
from pagewise.tools.records import recorded, table, table_of

ROOT = Path(__file__).resolve().parents[3]
MEASURED = ("paged_attention", "flash_attention", "flash_decoding", "flat_gemm", "engine")
KERNEL_TESTS = ("paged_attention", "flash_attention", "flash_decoding_plus_plus", "paged_attention_varlen")
KERNEL_TESTS += (
    "test_attention_contract.py",
    "test_flash_decoding.py",
    "test_online_softmax.py",
    "cudascope/test_kernel.py",
    "paged_blocks/test_write.py",
)
ONCE_16 = ("--requests", "16", "--repeats", "1")  # 64 requests, three times, took more than three minutes on an H200
GRACE = 15.0  # seconds that a part has to report after it was told to end: pytest-xdist needs 10
SHORTEST = 20.0  # seconds that must be left to begin a part
STOPS = {signal.SIGINT, signal.SIGTERM}  # what ends the check
NUM_LINES = 15  # last lines of a part's output in the summary
COLOUR = re.compile(r"\x1b\[[\d;]*m")

MACHINE = """
import torch
from pagewise.tools.device import banner, best_device
from pagewise.tools.records import surroundings
print(torch.cuda.get_device_properties(0), *surroundings(best_device()).items(), banner(), sep="\\n")
"""
DATAFLOW = """
import sys
from pagewise.experiments.flat_gemm_speed import LLAMA_2_7B
from pagewise.flash_decoding_plus_plus import Dataflow
dataflow = Dataflow.profile(LLAMA_2_7B, "cuda")
dataflow.save(sys.argv[1])
print("[N, K]: (M1, M2)", dataflow.table)
"""


class Part(NamedTuple):
    """A check of the machine: a command that succeeds with exit status 0."""

    name: str
    command: tuple[str, ...]  # run in the checkout
    limit: float  # seconds


class Result(NamedTuple):
    """The result of a part. A part that passed, failed, timed out or was cut off (Ctrl-C) has seconds and lines."""

    part: str
    status: str = "not reached"
    seconds: float = 0.0
    note: str = ""  # the last line of its output, or the reason for missing output
    lines: tuple[str, ...] = ()


def parts(out: Path) -> list[Part]:
    """Return all parts. Measurements go into `out`."""
    python = (sys.executable, "-m")
    workers = ("-n", "auto", "--maxprocesses", "16") if importlib.util.find_spec("xdist") else ()
    pytest = (*python, "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", *workers)
    of_kernels = [f"tests/{name}" for name in KERNEL_TESTS]
    launches = (sys.executable, "tests/repeat_launches.py")
    once = (*launches, "--times", "1", "--tokens", "70", "--only", "CUDA")
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    sanitizer = (sanitizer, "--report-api-errors", "no", "--error-exitcode", "1", "--tool")

    def speed(title: str, name: str, limit: float, *options: str) -> Part:
        record = str(out.resolve() / f"{name}.json")
        return Part(title, (*python, f"pagewise.experiments.{name}_speed", "--record", record, *options), limit)

    return [
        Part("machine", (sys.executable, "-c", MACHINE), 60),
        Part("kernels are right", (*pytest, "-k", "not cpu", *of_kernels), 150),
        speed("paged speed, 3 shapes", "paged_attention", 150, "--limit", "60", "--first", "3"),
        speed("flash speed, 8 shapes", "flash_attention", 240, "--first", "8"),
        speed("split decode speed, 7 shapes", "flash_decoding", 150, "--limit", "60", "--first", "7"),
        speed("flat product speed, 16 shapes", "flat_gemm", 120, "--limit", "60", "--first", "16"),
        speed("engine speed, one prompt 16 times", "engine", 200, "--prompts", "identical", *ONCE_16),
        Part("dataflow", (sys.executable, "-c", DATAFLOW, str(out.resolve() / "dataflow.json")), 60),
        Part("same bits 50 times", launches, 60),
        *(Part(tool, (*sanitizer, tool, *once), 60) for tool in ("memcheck", "racecheck", "initcheck", "synccheck")),
        *(
            Part(f"lesson {lesson.stem}", (sys.executable, "src/repository/lesson.py", str(lesson)), 60)
            for lesson in sorted((ROOT / "lessons").glob("[0-9]*.ipynb"))
        ),
        Part("all tests", pytest, 600),
        speed("paged speed, all shapes", "paged_attention", 1200, "--limit", "60"),
        speed("flash speed, all shapes", "flash_attention", 2400),
        speed("split decode speed, all shapes", "flash_decoding", 2400, "--limit", "60"),
        speed("flat product speed, all shapes", "flat_gemm", 1200, "--limit", "60"),
        speed("engine speed, all prompts", "engine", 1200),
    ]


def check(parts: Sequence[Part], out: Path, seconds: float) -> list[Result]:
    """Run the parts one after the other for at most `seconds`. `out` always holds all results so far."""
    deadline = time.monotonic() + seconds
    about = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "seconds": seconds}
    out.mkdir(parents=True, exist_ok=True)
    (log := out / "log.txt").write_text("")
    results = {part.name: Result(part.name) for part in parts}

    def settle(result: Result) -> None:
        results[result.part] = result
        partial = out / "summary.json.partial"
        summary = about | {"parts": [one._asdict() for one in results.values()]}
        partial.write_text(json.dumps(summary, indent=1, ensure_ascii=False), encoding="utf-8")
        os.replace(partial, out / "summary.json")

    with progress_bar(len(parts), "parts") as bar:
        for part in parts:
            limit = min(part.limit, deadline - time.monotonic() - GRACE)
            if limit < min(SHORTEST, part.limit):
                continue
            bar.set_description(part.name)
            settle(Result(part.name, "running"))
            settle(result := run(part, limit, log))
            say(f"{part.name}: {result.status} after {result.seconds:.0f} s  {result.note}")
            bar.update()
            if result.status == "cut off":
                break
    return list(results.values())


def run(part: Part, limit: float, log: Path) -> Result:
    """Run one part and append its output to `log`. Everything that it started ends with it."""
    begun, process = time.monotonic(), None
    with log.open("ab") as file:
        file.write(f"\n===== {part.name}: {shlex.join(part.command)}\n".encode())
        before = file.tell()
    try:
        with _stops_wait(), log.open("ab") as file:
            process = subprocess.Popen(
                part.command,
                cwd=ROOT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=_hears_interrupts,
            )
        status = "failed" if process.wait(limit) else "passed"
    except OSError as error:
        return Result(part.name, "not available", note=f"{error.filename}: {error.strerror}")
    except subprocess.TimeoutExpired:
        status = "timed out"
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    except KeyboardInterrupt:
        status = "cut off"
    finally:
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    printed = COLOUR.sub("", log.read_bytes()[before:].decode(errors="replace"))
    lines = tuple(line[:300] for line in printed.splitlines() if line.strip())[-NUM_LINES:]
    note = lines[-1].strip("= ") if lines else "it printed nothing"
    return Result(part.name, status, round(time.monotonic() - begun, 1), note, lines)


def report(results: Sequence[Result], out: Path) -> str:
    """Return the tables of all measurements and one table of all parts."""
    measured = []
    for name in MEASURED:
        try:
            measured.append(table_of(recorded(out / f"{name}.json") or []))
        except ValueError as error:
            measured.append(str(error))
    rows = [(r.part, f"{r.seconds:.0f}", r.status, r.note[:100]) for r in results]
    summary = table(("part", "seconds", "status", "its last line"), rows)
    return "\n\n".join(filter(None, (*measured, summary, f"all of it: {out}")))


def _hears_interrupts() -> None:
    """Undo the ignored SIGINT that a process in the background of a shell inherits."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def _stops_wait() -> Iterator[None]:
    """Let a signal that ends the check wait for the end of the `with` statement: nobody could end what begins in it.

    A signal that is blocked instead would find another thread of the process.
    """
    waiting: list[int] = []
    handlers = {number: signal.signal(number, lambda number, _: waiting.append(number)) for number in STOPS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in waiting:
            signal.raise_signal(number)


def main() -> None:
    """Run the command line. Exit with 1 if a part failed, took too long or was cut off."""
    parser = argparse.ArgumentParser(description="Check and measure everything on this machine's GPU.")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all parts together (%(default)g)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-check", help="where results go (%(default)s)")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="only parts whose name has one of these"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu-check needs a GPU, and torch finds none on this machine: nothing was run")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as by Ctrl-C, with a summary
    asked = [part for part in parts(options.out) if any(text in part.name for text in options.only)]
    results = check(asked, options.out, 60 * options.minutes)
    print("", report(results, options.out), sep="\n")
    sys.exit(any(result.status in ("failed", "timed out", "cut off") for result in results))


if __name__ == "__main__":
    main()
