"""A process per task list: what hangs, crashes or raises costs its own task, and the next one gets a new process."""

import multiprocessing
import os
import signal
import sys
import time
from operator import attrgetter
from types import ModuleType

import pytest
from in_process import forked_workers

from pagewise.tools.worker import Failed, Worker, described


class Desk:
    """Does what it is told, and counts what it did since it was made."""

    def __init__(self, name):
        self.name, self.done = name, 0

    def __call__(self, task, argument=None):
        self.done += 1
        return getattr(self, task)(argument)

    def pid(self, _):
        return os.getpid()

    def count(self, _):
        return self.name, self.done

    def fail(self, message):
        raise ValueError(message)

    def hang(self, _):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM, signal.SIGTERM})  # as in C code: nothing gets through
        time.sleep(600)

    def crash(self, _):
        os.kill(os.getpid(), signal.SIGSEGV)

    def leave(self, status):
        sys.exit(status)

    def unpicklable(self, _):
        return lambda: None


@pytest.mark.slow
def test_tasks_are_done_in_one_other_process_that_keeps_its_state():
    with Worker(Desk, "desk") as worker:
        pid = worker("pid", limit=60)
        assert pid not in (os.getpid(), None)
        assert worker("pid", limit=60) == pid
        assert worker("count", limit=60) == ("desk", 3)


@pytest.fixture(scope="module")
def worker():
    with forked_workers(), Worker(Desk, "desk") as worker:
        yield worker


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (("fail", "planted\nand more"), "^ValueError: planted$"),
        (("hang",), r"^no answer within 0\.3 s$"),
        (("crash",), "^its process ended: SIGSEGV$"),
        (("leave", 3), "^its process ended: exit status 3$"),
        (("unpicklable",), "pickle"),
    ],
)
def test_a_failure_costs_its_own_task_only(worker, task, reason):
    before = worker("pid", limit=60)
    with pytest.raises(Failed, match=reason):
        worker(*task, limit=0.3 if task == ("hang",) else 60)
    assert worker("count", limit=60) == ("desk", 1)
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)


def test_a_fork_has_a_process_of_its_own_and_leaves_that_of_its_parent_alone(monkeypatch):
    fork = multiprocessing.context.ForkContext()  # a server of forks does not serve a fork
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: fork)
    with Worker(attrgetter, "real") as worker:
        assert worker(2, limit=60) == 2
        before = worker.process.pid
        if (child := os.fork()) == 0:
            try:
                with worker:
                    same = worker(3, limit=60) != 3 or worker.process.pid == before
            finally:
                os._exit(7 - same)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        if (child := os.fork()) == 0:
            worker.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert worker(4, limit=60) == 4
        assert worker.process.pid == before


def raising():
    raise RuntimeError("no desk")


def test_a_process_that_cannot_start_is_a_failure_of_the_task():
    with forked_workers(), Worker(raising) as worker, pytest.raises(Failed, match=r"^RuntimeError: no desk$"):
        worker("count", limit=60)


def test_nothing_is_started_before_the_first_task():
    before = multiprocessing.active_children()
    with Worker(Desk, "idle"):
        assert multiprocessing.active_children() == before


def test_an_error_is_described_in_one_line():
    assert described(ValueError("a\nb")) == "ValueError: a"
    assert described(AssertionError()) == "AssertionError: no message"


def test_the_callers_script_does_not_run_again(tmp_path, monkeypatch):
    again, script = tmp_path / "again", tmp_path / "unguarded.py"
    script.write_text(f"open({str(again)!r}, 'x')\n")
    caller = ModuleType("__main__")
    caller.__file__ = str(script)
    monkeypatch.setitem(sys.modules, "__main__", caller)
    with forked_workers(), Worker(attrgetter, "real") as worker:
        assert worker(2, limit=60) == 2
        assert sys.modules["__main__"] is caller
    assert not again.exists()
