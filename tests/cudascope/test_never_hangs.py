"""No kernel hangs or ends the process. Each is run in another process: a failure here costs that one only."""

import contextlib
import re
import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import cudascope
from cudascope import CudaKernel
from pagewise.tools.worker import Worker

pytestmark = pytest.mark.slow

SOURCE = Path(__file__).parent / "never_hangs.cu"
IMPATIENT, PATIENT = 0.3, 20.0  # cudascope.time_limit in seconds: of launches that hang, and of the others
ANSWER = 60.0  # for an answer; the first one of each mode compiles
MODES = {"plain": contextlib.nullcontext, "observe": cudascope.observe, "check": cudascope.check}
NOBODY = -1


class Ended(NamedTuple):
    """How a launch ended; what and line of "" and 0: it came to its end."""

    what: str
    rule: str
    line: int
    message: str
    seconds: float
    out: list[float]


# ------------------------------------------------------------------------------------------------ in the other process


def tasks():
    """Return the function that the other process calls with each task: it calls a function of this module by name."""
    return lambda task, *args: globals()[task](*args)


def launch(name: str, mode: str, grid: int, block: int, n: int, size: int = 64, limit: float = PATIENT) -> Ended:
    x, out, flag = torch.ones(size), torch.zeros(size), torch.zeros(1, dtype=torch.int32)
    kernel = CudaKernel(SOURCE, name)
    with contextlib.ExitStack() as contexts:
        contexts.enter_context(cudascope.time_limit(limit))
        contexts.enter_context(MODES[mode]())
        kernel.compile()
        start = time.monotonic()
        try:
            kernel[grid, block](None if name == "null_pointer" else x, out, flag, n)
            what, rule, line, message = "", "", 0, ""
        except cudascope.Finding as error:
            what, rule, line, message = error.what, error.rule, error.line, str(error)
    return Ended(what, rule, line, message, time.monotonic() - start, out.tolist())


def launch_from_threads() -> list[Ended]:
    """Two of four threads launch kernels that hang."""
    results: list[Ended | None] = [None] * 4

    def each(i: int) -> None:
        hangs = {"n": NOBODY, "limit": IMPATIENT} if i % 2 else {"n": 127}
        results[i] = launch("spin_atomic", "plain", 2, 64, size=128, **hangs)

    threads = [threading.Thread(target=each, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


# ------------------------------------------------------------------------------------------------ tests


@pytest.fixture(scope="module")
def elsewhere():
    with Worker(tasks) as worker:
        yield lambda *task: worker(*task, limit=ANSWER)


def marked_lines(name: str) -> list[int]:
    lines = SOURCE.read_text().splitlines()
    return [number for number, line in enumerate(lines, 1) if line.endswith((f"// END {name}", f"// END {name} }}"))]


HANGS = {  # grid, block, n
    "spin_volatile": (2, 64, NOBODY), "spin_atomic": (2, 64, NOBODY), "spin_plain": (2, 64, NOBODY),
    "spin_asleep": (2, 64, NOBODY), "spin_shared": (2, 64, NOBODY), "spin_in_calls": (2, 64, 0),
    "endless": (1, 64, 0), "barrier_behind_a_spin": (1, 64, 0), "lock": (2, 64, 1),
}  # fmt: skip


POLLS = {  # what a watched launch says of the wait
    "spin_volatile": "polls the volatile flag[0]", "spin_atomic": "repeats an atomic on flag[0]",
    "spin_asleep": "polls the volatile flag[0]", "spin_shared": "polls the volatile raised[0]",
    "spin_in_calls": "polls the volatile flag[0]", "barrier_behind_a_spin": "polls the volatile flag[0]",
    "lock": "repeats an atomic on flag[0]",
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", HANGS)
def test_a_launch_without_progress_ends_and_says_where(name, mode, elsewhere):
    ended = elsewhere("launch", name, mode, *HANGS[name], 128, IMPATIENT)
    assert ended.what == "deadlock", ended
    assert ended.line in marked_lines(name), ended
    assert ended.seconds < PATIENT / 2, ended
    if mode != "plain":
        said = [POLLS[name]] if name in POLLS else []
        assert re.findall(r"(?:polls|repeats)[^:]*\[0\]", ended.message) == said, ended


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("name", "setter"),
    [
        ("spin_volatile", 63), ("spin_volatile", 127), ("spin_atomic", 63), ("spin_atomic", 127), ("spin_asleep", 127),
    ],
)  # fmt: skip
def test_a_spin_goes_on_when_another_warp_or_thread_block_raises_the_flag(name, setter, mode, elsewhere):
    ended = elsewhere("launch", name, mode, 2, 64, setter, 128)
    assert ended.what == "", ended
    assert ended.out == [1.0] * 128


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "setter"), [("spin_shared", 63), ("spin_plain", 63), ("spin_plain", 127)])
def test_a_spin_on_shared_or_plain_memory_goes_on_and_is_a_race(name, setter, mode, elsewhere):
    """A compiler may read a plain flag once only; here it is read at each turn. Lanes that pass on a value in volatile
    shared memory are mostly meant to need no barrier, as before sm_70."""
    ended = elsewhere("launch", name, mode, 2, 64, setter, 128)
    assert ended.what == ("race" if mode == "check" else ""), ended


def test_a_lock_that_is_given_back_is_no_hang(elsewhere):
    for mode in MODES:
        ended = elsewhere("launch", "lock", mode, 4, 64, 0)
        assert (ended.what, ended.out[0]) == ("", 256.0), ended


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("name", "blocks", "rule"),
    [("endless_barriers", 1, "spin"), ("endless_in_some_blocks", 4, "spin"), ("endless_steps", 1, "hang")],
)
def test_an_endless_loop_through_a_barrier_ends(name, blocks, rule, mode, elsewhere):
    """A barrier counts as progress, and so does the end of a thread, but neither counts for ever."""
    ended = elsewhere("launch", name, mode, blocks, 64, 0, 256, 0.05)
    assert ended.rule == rule, ended
    assert ended.seconds < PATIENT / 2, ended


def test_a_long_loop_through_a_barrier_may_take_many_times_the_limit(elsewhere):
    ended = elsewhere("launch", "long_loop", "plain", 1, 64, 1_000_000_000, 64, 0.3)
    assert (ended.what, ended.out) == ("", [1.0] * 64), ended


@pytest.mark.parametrize("mode", MODES)
def test_stacks_of_512_kb_are_allowed_and_more_is_an_error(mode, elsewhere):
    ended = elsewhere("launch", "local_400_kb", mode, 1, 64, 1000)
    assert (ended.what, ended.out) == ("", [1000.0] * 64), ended
    assert elsewhere("launch", "recursion", mode, 1, 64, 100).out == [101.0] * 64
    for name, depth in (("local_2_mb", 0), ("recursion", 1_000_000)):
        ended = elsewhere("launch", name, mode, 1, 64, depth)
        assert ended.what == "fault", ended
        assert "stack" in ended.message, ended


WILD = {  # grid, block, n, elements
    "past_the_end": (4, 256, 1000, 1000), "read_past_the_end": (4, 256, 1000, 1000), "wild_global": (1, 1, 1, 64),
    "before_the_start": (1, 1, 5, 64), "wild_shared": (1, 64, 1, 64), "null_pointer": (1, 64, 0, 64),
}  # fmt: skip


@pytest.mark.parametrize("name", WILD)
def test_a_wild_index_is_an_error_that_names_the_checker_and_harms_nobody(name, elsewhere):
    ended = elsewhere("launch", name, "plain", *WILD[name])
    assert "cudascope.check()" in ended.message, ended
    if name == "before_the_start":  # in the page where the tensor is: seen when the launch has ended
        assert ended.rule == "overrun", ended
    else:
        assert (ended.what, ended.line) == ("fault", *marked_lines(name)), ended
    checked = elsewhere("launch", name, "check", *WILD[name])
    assert (checked.what, checked.line) == ("out of bounds", *marked_lines(name)), checked


STOPS = {  # what, the thread, and why it stopped
    "built_in_traps": ("fault", 37, r"__builtin_trap\(\)"), "traps": ("assertion", 37, r"__trap\(\)"),
    "asserts": ("assertion", 37, "assertion failed: threadIdx.x != n"),
    "divides": ("fault", 0, "divides an integer by zero"),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_what_would_end_a_process_is_an_error(mode, elsewhere):
    for name, (what, thread, why) in STOPS.items():
        ended = elsewhere("launch", name, mode, 2, 64, 37)
        assert ended.what == what, ended
        assert re.search(rf"{name}.*thread \({thread}, 0, 0\).*{why}", ended.message), ended


def test_a_hang_in_one_python_thread_leaves_the_others_alone(elsewhere):
    results = elsewhere("launch_from_threads")
    assert [ended.what for ended in results] == ["", "deadlock"] * 2, results
    assert all(ended.out == [1.0] * 128 for ended in results[::2])
