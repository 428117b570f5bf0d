"""Processes for torch.distributed: functions travel, failures end all processes in time, and no process remains."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from eventually import has_ended, soon

from pagewise.distributed import Processes


@pytest.fixture(scope="module")
def two():
    with Processes(2) as processes:
        yield processes


def test_results_come_in_the_order_of_ranks_from_the_same_processes(two):
    factor = 10  # travels with the function, as a variable of a notebook cell does

    def total(x):
        y = x + factor * dist.get_rank()
        dist.all_reduce(y)
        time.sleep(0.3 * (1 - dist.get_rank()))  # rank 1 returns first
        return dist.get_rank(), y, torch.get_num_threads()

    results = two.run(total, torch.ones(3))
    assert [(rank, threads) for rank, _, threads in results] == [(0, 1), (1, 1)]
    for _, y, _ in results:
        assert y.equal(torch.full((3,), 12.0))
    assert two.run(os.getpid) == two.run(os.getpid)


def test_printed_lines_appear_by_rank_and_nothing_else_does(two, capfd):
    def speak():
        time.sleep(0.1 * (1 - dist.get_rank()))
        os.write(1, b"not to be seen")
        os.write(2, b"neither")
        for i in range(2):
            print("line", i)

    two.run(speak)
    assert capfd.readouterr() == (
        "process 0: line 0\nprocess 0: line 1\nprocess 1: line 0\nprocess 1: line 1\n",
        "",
    )


def test_a_task_that_cannot_travel_changes_nothing(two):
    before = two.run(os.getpid)
    with pytest.raises(TypeError, match="pickle"):
        two.run(lambda x: x, threading.Lock())
    assert two.run(os.getpid) == before


def test_a_function_that_ends_its_script_has_no_result(two):
    def leaves():
        if dist.get_rank() == 1:
            print("done")
            sys.exit()
        return "a result"

    assert two.run(leaves) == ["a result", None]
    with pytest.raises(RuntimeError, match="process 1 of 2 raised SystemExit: 3"):
        two.run(lambda: sys.exit(3) if dist.get_rank() else None)


def pid():
    return os.getpid()


def raises():
    if dist.get_rank() == 1:
        raise KeyError("the name of a weight")
    dist.barrier()


def dies():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def waits():
    if dist.get_rank() == 0:
        dist.barrier()


def returns_what_cannot_travel():
    return threading.Lock()


FAILURES = [
    (raises, RuntimeError, r"process 1 of 2 raised KeyError: 'the name of a weight'(.|\n)*in raises"),
    (dies, RuntimeError, r"process 1 of 2 ended with SIGKILL"),
    (waits, TimeoutError, r"1 of 2 processes gave no result within 1 s\n\nprocess 0:(.|\n)*in waits"),
    (returns_what_cannot_travel, RuntimeError, r"process 0 of 2 raised TypeError: cannot pickle"),
]


@pytest.mark.slow
def test_a_failure_names_its_process_and_ends_all_in_time():
    with Processes(2) as processes:
        for function, error, message in FAILURES:
            processes.timeout = 120.0
            pids = processes.run(pid)  # new processes after each failure, which import this module now
            processes.timeout = 1.0 if error is TimeoutError else 120.0
            begin = time.monotonic()
            with pytest.raises(error, match=message):
                processes.run(function)
            assert time.monotonic() - begin < 30
            assert all(map(has_ended, pids))


SCRIPT = """
import os, signal, time
from pagewise.distributed import Processes

signal.signal(signal.SIGINT, signal.default_int_handler)
processes = Processes(2)
before = processes.run(os.getpid)
if (child := os.fork()) == 0:
    try:
        with processes:
            processes.run(os.getpid)
    except RuntimeError as error:
        print("only" in str(error), flush=True)
    raise SystemExit
os.waitpid(child, 0)
print(before == processes.run(os.getpid), os.path.isdir(processes._folder), flush=True)
for _ in range(2):
    print(*processes.run(os.getpid), processes._folder, flush=True)
    try:
        processes.run(time.sleep, 100)
    except KeyboardInterrupt:
        pass
"""


@pytest.mark.slow
def test_no_process_remains_after_an_interrupt_or_when_the_program_is_killed_and_a_fork_ends_none():
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True) as program:
        try:
            assert [program.stdout.readline() for _ in range(2)] == ["True\n", "True True\n"]
            for sent in (signal.SIGINT, signal.SIGKILL):
                *pids, folder = program.stdout.readline().split()
                pids = list(map(int, pids))
                assert len(pids) == 2
                time.sleep(0.3)  # the processes are in the middle of a call
                assert not any(map(has_ended, pids))
                program.send_signal(sent)
                assert soon(lambda pids=pids: all(map(has_ended, pids)), 30)
                assert soon(lambda folder=folder: not os.path.exists(folder), 30)
        finally:
            program.kill()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"count": 0}, ValueError, "count must be at least 1, got 0"),
        ({"count": 2.0}, TypeError, "count must be an int, got float"),
        ({"count": 1, "timeout": "x"}, TypeError, "timeout must be a number, got str"),
    ],
)
def test_wrong_counts_are_refused(arguments, error, message, shapes_unchecked):
    with pytest.raises(error, match=message):
        Processes(**arguments)
