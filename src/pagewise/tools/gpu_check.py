"""What there is to know about a machine with a GPU, in ten minutes: `make gpu-check`.

    python -m pagewise.tools.gpu_check [--minutes 10] [--out build/gpu-check] [--only memcheck speed]

A list of parts, those first whose answers are waited for longest. Each is a process with a time limit, so that what
fails, hangs or is missing there costs its own part only. What is known lies in the folder at any time:

    summary.json           each part's status, time and last lines, replaced whenever a part begins or ends
    log.txt                all that the parts print, as they print it
    paged_attention.json   the measurements, a record each; flash_attention.json and others likewise
    dataflow.json          the inflection points of Llama-2-7B's weights, as Dataflow.load reads them

If this process itself is killed, the part that it had come to stays "running" in the summary.
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
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from pagewise.tools.records import recorded, table, table_of

ROOT = Path(__file__).resolve().parents[3]
MEASURED = ("paged_attention", "flash_attention", "flash_decoding", "flat_gemm", "engine")
GRACE = 15.0  # seconds to say how far it came, for a part that is told to end: pytest-xdist needs 10
SHORTEST = 20.0  # seconds: with less left, a part is not begun
NUM_LINES = 15  # of a part's output, in the summary
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
    """A question to the machine, and the command that answers it by exit status 0."""

    name: str
    command: tuple[str, ...]  # run in the checkout
    limit: float  # seconds


class Result(NamedTuple):
    """What became of a part. Passed, failed, timed out and cut off (by Ctrl-C) have seconds and lines."""

    part: str
    status: str = "not reached"
    seconds: float = 0.0
    note: str = ""  # the last line of its output, or why there is none
    lines: tuple[str, ...] = ()


def parts(out: Path) -> list[Part]:
    """Everything there is to run, measurements into `out`."""
    python = (sys.executable, "-m")
    workers = ("-n", "auto", "--maxprocesses", "16") if importlib.util.find_spec("xdist") else ()
    pytest = (*python, "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", *workers)
    of_kernels = ("tests/paged_attention", "tests/flash_attention", "tests/flash_decoding_plus_plus")
    of_kernels = (*of_kernels, "tests/test_flash_decoding.py", "tests/test_online_softmax.py")
    of_kernels = (*of_kernels, "tests/paged_attention_varlen", "tests/paged_blocks/test_write.py")
    paged_speed, flash_speed, decode_speed, flat_speed, engine_speed = (
        (*python, f"pagewise.experiments.{name}_speed", "--record", str(out.resolve() / f"{name}.json"))
        for name in MEASURED
    )
    launches = (sys.executable, "tests/repeat_launches.py")
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    sanitizer = (sanitizer, "--report-api-errors", "no", "--error-exitcode", "1", "--tool")
    once = (*launches, "--times", "1", "--tokens", "70", "--only", "CUDA")
    return [
        Part("machine", (sys.executable, "-c", MACHINE), 60),
        Part("kernels are right", (*pytest, "-k", "not cpu", *of_kernels, "tests/cuda/test_kernel.py"), 150),
        Part("paged speed, 3 shapes", (*paged_speed, "--limit", "60", "--first", "3"), 150),
        Part("flash speed, 8 shapes", (*flash_speed, "--first", "8"), 240),
        Part("split decode speed, 7 shapes", (*decode_speed, "--limit", "60", "--first", "7"), 150),
        Part("flat product speed, 16 shapes", (*flat_speed, "--limit", "60", "--first", "16"), 120),
        Part("engine speed, one prompt 64 times", (*engine_speed, "--prompts", "identical"), 200),
        Part("dataflow", (sys.executable, "-c", DATAFLOW, str(out.resolve() / "dataflow.json")), 60),
        Part("same bits 50 times", launches, 60),
        *(Part(tool, (*sanitizer, tool, *once), 60) for tool in ("memcheck", "racecheck", "initcheck", "synccheck")),
        *(
            Part(f"lesson {lesson.stem}", (*python, "pagewise.tools.lesson", str(lesson)), 60)
            for lesson in sorted((ROOT / "lessons").glob("[0-9]*.ipynb"))
        ),
        Part("all tests", pytest, 600),
        Part("paged speed, all shapes", (*paged_speed, "--limit", "60"), 1200),
        Part("flash speed, all shapes", flash_speed, 2400),
        Part("split decode speed, all shapes", (*decode_speed, "--limit", "60"), 2400),
        Part("flat product speed, all shapes", (*flat_speed, "--limit", "60"), 1200),
        Part("engine speed, all prompts", engine_speed, 1200),
    ]


def check(parts: Sequence[Part], out: Path, seconds: float) -> list[Result]:
    """Run the parts one after the other for so long at the most; `out` always holds what is known."""
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

    for part in parts:
        limit = min(part.limit, deadline - time.monotonic() - GRACE)
        if limit < min(SHORTEST, part.limit):
            continue
        settle(Result(part.name, "running"))
        settle(result := run(part, limit, log))
        print(f"{part.name}: {result.status} after {result.seconds:.0f} s  {result.note}", flush=True)
        if result.status == "cut off":
            break
    return list(results.values())


def run(part: Part, limit: float, log: Path) -> Result:
    """Run one part, its output added to `log`. Nothing that it started survives it."""
    begun = time.monotonic()
    with log.open("ab") as file:
        file.write(f"\n===== {part.name}: {shlex.join(part.command)}\n".encode())
        file.flush()
        before = file.tell()
        streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        try:
            process = subprocess.Popen(
                part.command, cwd=ROOT, env=environment, process_group=0, preexec_fn=_hears_interrupts, **streams
            )
        except OSError as error:
            return Result(part.name, "not available", note=f"{error.filename}: {error.strerror}")
    try:
        status = "failed" if process.wait(limit) else "passed"
    except subprocess.TimeoutExpired:
        status = "timed out"
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    except KeyboardInterrupt:
        status = "cut off"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    printed = COLOUR.sub("", log.read_bytes()[before:].decode(errors="replace"))
    lines = tuple(line[:300] for line in printed.splitlines() if line.strip())[-NUM_LINES:]
    note = lines[-1].strip("= ") if lines else "it printed nothing"
    return Result(part.name, status, round(time.monotonic() - begun, 1), note, lines)


def report(results: Sequence[Result], out: Path) -> str:
    """What was measured, and one table of all parts."""
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
    """Started in the background of a shell, a process ignores SIGINT, and hands that on."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def main() -> None:
    """The command line; exits with 1 if a part failed, took too long or was cut off."""
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
