"""A list of parts, each a process with a limit: what fails, hangs or is missing costs its own part, nothing more."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import repeat_launches
import torch
from eventually import has_ended, soon
from in_process import run_on_a_cpu

import conftest
from conftest import ROOT
from pagewise.tools import gpu_check
from pagewise.tools.gpu_check import Part, check

# Prints its last child's number, and neither it nor its child minds being asked to end.
STUBBORN = "trap '' INT; sleep 600 & echo $!; wait; wait"


def sh(name, script, limit=60.0):
    return Part(name, ("sh", "-c", script), limit)


def summary(out):
    return {part["part"]: part for part in json.loads((out / "summary.json").read_text())["parts"]}


def test_without_a_gpu_it_is_one_sentence(tmp_path):
    with pytest.raises(SystemExit, match=r"^gpu-check needs a GPU, and torch finds none on this machine"):
        run_on_a_cpu(gpu_check.main, "--out", str(tmp_path / "out"))  # a text: printed to stderr, exit status 1
    assert not (tmp_path / "out").exists()


def test_parts_run_in_order_and_a_failure_costs_its_own_part(tmp_path, capsys):
    parts = [
        sh("first", "echo a; echo '=== 7 passed ==='"),
        sh("wrong", "printf '\\033[31mbecause\\033[0m\\n'; exit 3"),
        Part("missing", ("/no/such/sanitizer",), 60.0),
        sh("quiet", "true"),
    ]
    results = check(parts, tmp_path, 60)
    assert [(r.status, r.note) for r in results[:2]] == [("passed", "7 passed"), ("failed", "because")]
    assert results[2].status == "not available"
    assert "/no/such/sanitizer" in results[2].note
    assert (results[3].status, results[3].note) == ("passed", "it printed nothing")
    assert list(summary(tmp_path)) == ["first", "wrong", "missing", "quiet"]
    assert summary(tmp_path)["first"]["lines"] == ["a", "=== 7 passed ==="]
    log = (tmp_path / "log.txt").read_text()
    assert log.index("===== first: sh -c") < log.index("7 passed ===\n") < log.index("because") < log.index("quiet")
    assert re.match(r"wrong: failed after \d+ s  because", capsys.readouterr().out.splitlines()[1])


def test_a_part_over_its_limit_ends_with_all_that_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "GRACE", 0.2)
    hung, after = check([sh("hung", STUBBORN, limit=1.0), sh("after", "echo still here")], tmp_path, 60)
    assert (hung.status, after.status) == ("timed out", "passed")
    assert 1.0 <= hung.seconds < 30
    assert soon(lambda: has_ended(int(hung.note)), 30)


@pytest.mark.slow
def test_a_part_over_its_limit_may_say_how_far_it_came(tmp_path):
    script = "import time\ntry: time.sleep(600)\nexcept KeyboardInterrupt: print('3 of 7')"
    (result,) = check([Part("slow", (sys.executable, "-c", script), 2.0)], tmp_path, 60)
    assert (result.status, result.note) == ("timed out", "3 of 7")


@pytest.mark.slow
def test_a_part_whose_time_is_gone_is_not_reached(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "GRACE", 0.0)
    monkeypatch.setattr(gpu_check, "SHORTEST", 1.0)
    long, never = check([sh("long", "exec sleep 600"), sh("never", "echo no")], tmp_path, 2)
    assert (long.status, never.status) == ("timed out", "not reached")
    assert 1.5 <= long.seconds < 30
    assert summary(tmp_path)["never"]["status"] == "not reached"


def started(out, *scripts):
    """gpu_check in a fork of this process, but with these parts and a GPU that is not there; once its second part runs.

    The file `told` has the printed text.
    """

    def run():
        torch.cuda.is_available = lambda: True
        gpu_check.parts = lambda out: [sh(f"part {i}", script) for i, script in enumerate(scripts)]
        sys.argv = ["gpu_check", "--out", str(out)]
        sys.stdout = sys.stderr = (out / "told").open("w")
        gpu_check.main()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    pid = out / "pid"
    assert soon(lambda: pid.exists() and pid.read_text().endswith("\n"), 120), (out / "told").read_text()
    return process


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_stopped_half_way_it_keeps_what_it_has(tmp_path, sent):
    hangs = f"{STUBBORN.replace('echo $!', f'echo $! > {tmp_path}/pid')}"
    process = started(tmp_path, "echo first", hangs, "echo last")
    os.kill(process.pid, sent)
    process.join(60)
    told = (tmp_path / "told").read_text()
    killed = sent == signal.SIGKILL
    statuses = [part["status"] for part in summary(tmp_path).values()]
    assert statuses == ["passed", "running" if killed else "cut off", "not reached"]
    assert "part 0: passed" in told
    child = int((tmp_path / "pid").read_text())
    if killed:  # nothing can be asked of it any more
        os.killpg(os.getpgid(child), signal.SIGKILL)
    else:
        assert process.exitcode == 1
        assert "part 2        0  not reached" in told
    assert soon(lambda: has_ended(child), 30)


def test_an_interrupt_while_a_part_begins_ends_what_has_begun(tmp_path, monkeypatch):
    """Another thread is there, to which the system may give the signal."""
    begun, real, ended = [], subprocess.Popen, threading.Event()
    threading.Thread(target=ended.wait).start()

    def interrupted(*args, **options):
        begun.append(real(*args, **options))
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        return begun[0]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    before = signal.getsignal(signal.SIGINT)
    result = gpu_check.run(sh("long", "exec sleep 600"), 60, tmp_path / "log")
    ended.set()
    assert result.status == "cut off"
    assert begun[0].returncode == -signal.SIGKILL
    assert signal.getsignal(signal.SIGINT) == before


def test_the_report_has_measurements_and_a_row_per_part(tmp_path):
    (tmp_path / "flash_attention.json").write_text("[{}]")
    told = gpu_check.report([gpu_check.Result("memcheck", "failed", 12.3, "ERROR SUMMARY: 2 errors")], tmp_path)
    assert "missing; measure it again" in told
    assert "memcheck       12  failed  ERROR SUMMARY: 2 errors" in told


def test_the_parts_exist():
    parts = gpu_check.parts(Path("out"))
    names = [part.name for part in parts]
    assert names[:4] == ["machine", "kernels are right", "paged speed, 3 shapes", "flash speed, 8 shapes"]
    assert names[4:6] == ["split decode speed, 7 shapes", "flat product speed, 16 shapes"]
    assert len(set(names)) == len(names)
    assert {"memcheck", "racecheck", "initcheck", "synccheck", "all tests"} <= set(names)
    assert len([name for name in names if name.startswith("lesson ")]) == len(list(ROOT.glob("lessons/[0-9]*.ipynb")))
    files = [word for part in parts for word in part.command if word.startswith(("tests/", "src/"))]
    assert files
    assert [file for file in files if not (ROOT / file).exists()] == []


# ------------------------------------------------------------------------------------------------ repeated launches


@pytest.mark.slow
def test_every_kernel_is_launched_and_gives_the_same_bits(monkeypatch):
    """Each kernel in one of its types, which take turns. The tests of the kernels launch all types."""
    monkeypatch.setattr(conftest, "executed", launched := Counter())
    device = torch.device(conftest.DEVICES[-1])
    types = {}
    for name, run in repeat_launches.cases(33, device):
        types.setdefault(name.rpartition(" ")[0], []).append((name, run))
    for number, cases in enumerate(types.values()):
        name, run = cases[number % len(cases)]
        assert repeat_launches.fault(run, 1) is None, name
    assert conftest.all_kernels() <= set(launched)


@pytest.mark.parametrize(
    ("outputs", "fault"),
    [
        ([[1.0, 2.0], [1.0, 2.0]], None),
        ([[1.0, 0.0], [1.0, -0.0]], "launch 2 differs from the first in 1 bytes"),
        ([[1.0, torch.nan]], "not finite"),
    ],
)
def test_other_bits_are_noticed(outputs, fault):
    launches = iter(outputs)
    assert repeat_launches.fault(lambda: (torch.tensor(next(launches)),), len(outputs)) == fault
