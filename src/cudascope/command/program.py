"""A program on the command line: it runs in a child process, and this process collects what is found."""

import ctypes
import faulthandler
import functools
import itertools
import json
import mmap
import os
import selectors
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cudascope.cpp.source import CompileError, Source, read_source, source_path
from cudascope.cpu.program import Program, api_file, build_program
from cudascope.kernels.program import Session, send_to
from cudascope.translate.program import defines_main
from cudascope.watch.contexts import Run
from cudascope.watch.findings import Finding

_ENDINGS = (".cu", ".cpp", ".cc", ".cxx", ".c++", ".c")
_GRACE = 5.0  # seconds for a program that hangs to say where


class Outcome(NamedTuple):
    """How a program ended: its status as a shell shows it, what was found, and what each launch did."""

    status: int
    findings: list[Finding]
    observed: list[tuple[int, str]]
    launches: int


def is_program_file(name: str) -> bool:
    """Whether an argument of the command is a file of a program, and not the name of a kernel."""
    return name.endswith(_ENDINGS)


def program_sources(files: Sequence[str], defines: Sequence[str], options: Sequence[str]) -> list[Source] | None:
    """The files of a program; None if none of them has a main."""
    sources = []
    for file in files:
        path = source_path(Path(file))
        sources.append(Source(read_source(path), str(path), path.parent, tuple(defines), tuple(options)))
    return sources if any(map(defines_main, (source.read() for source in sources))) else None


def run_program(sources: Sequence[Source], arguments: Sequence[str], run: Run, *, with_leaks: bool = False) -> Outcome:
    """Build a program and run its main in a child process. CompileError: it cannot be compiled for the CPU."""
    program = build_program(sources, instrumented=run.report is not None)
    api_file()
    reading, writing = os.pipe()
    progress = mmap.mmap(-1, mmap.PAGESIZE)
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _run_in_child(program, arguments, run, writing, progress)
    os.close(writing)
    try:
        messages, hung = _collected(child, reading, progress, run.time_limit)
    except BaseException:  # Ctrl-C, for example
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    _, state = os.waitpid(child, 0)
    status = os.waitstatus_to_exitcode(state)
    status = 128 - status if status < 0 else status
    findings, observed, launches = [], [], 0
    for message in messages:
        if "error" in message:
            raise CompileError(message["error"])
        launches = max(launches, message.get("launched", 0))
        if "observed" in message:
            observed.append((message["launch"], message["observed"]))
        if "finding" in message and (with_leaks or message["finding"]["rule"] != "leak"):
            findings.append(_finding(message["finding"]))
    if hung and not any(found.rule in ("hang", "spin", "deadlock") for found in findings):
        sentence = "the program gets no further: it was ended after the time limit"
        findings.append(_finding({"rule": "hang", "sentence": sentence, "file": sources[0].filename, "line": 0}))
    return Outcome(status, findings, observed, launches)


def _run_in_child(program: Program, arguments: Sequence[str], run: Run, writing: int, progress: mmap.mmap) -> None:
    """Run the program. The process ends here."""
    send = functools.partial(send_to, writing)
    faulthandler.disable()  # the program has handlers of its own
    for number in (signal.SIGINT, signal.SIGPIPE):  # they end a program, and Python has changed that
        signal.signal(number, signal.SIG_DFL)
    try:
        counts = (ctypes.c_uint64 * 2).from_buffer(progress)
        Session(program, run, send, counts).main([program.sources[0].path.stem, *arguments])
    except BaseException as error:
        send({"error": str(error) if isinstance(error, CompileError) else f"{type(error).__name__}: {error}"})
    finally:
        os._exit(2)


def _collected(child: int, reading: int, progress: mmap.mmap, limit: float) -> tuple[list[dict[str, Any]], bool]:
    """The messages of the child until it ends, and whether it was ended because it got no further."""
    messages: list[dict[str, Any]] = []
    rest, last, since, hung = b"", b"", time.monotonic(), 0.0
    with selectors.DefaultSelector() as selector:
        selector.register(reading, selectors.EVENT_READ)
        while True:
            if selector.select(0.1):
                content = os.read(reading, 1 << 16)
                if not content:
                    break
                *lines, rest = (rest + content).split(b"\n")
                messages += map(json.loads, lines)
            now, counts = time.monotonic(), progress[:16]
            in_launch = int.from_bytes(counts[8:16], "little") > 0  # a launch has a time limit of its own
            if counts != last or in_launch:
                last, since = counts, now
            elif now - since > limit and not hung:
                hung = now
                os.kill(child, signal.SIGRTMAX - 6)
            elif hung and now - hung > _GRACE:
                os.kill(child, signal.SIGKILL)
                break
    os.close(reading)
    return messages, hung > 0


def _finding(fields: dict[str, Any]) -> Finding:
    complete = {"kernel": "host", "what": "program", "thread_block": (0, 0, 0), "thread": (0, 0, 0)} | fields
    for name in ("thread_block", "thread"):
        complete[name] = tuple(complete[name])
    return Finding(complete.pop("sentence"), **complete)


def grouped(observed: Sequence[tuple[int, str]]) -> Iterator[str]:
    """What was observed, with a title. Launches in a row with the same counts are one."""
    for text, launches in itertools.groupby(observed, key=lambda each: each[1]):
        first, *others = (number for number, _ in launches)
        yield f"launches {first} to {others[-1]}, each of them:" if others else f"launch {first}:"
        yield text
