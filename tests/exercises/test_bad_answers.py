"""Nothing that a reader writes raises, or hangs: it is reported."""

import os
import signal
import threading

import pytest
import torch
from covering import one_in_three
from test_exercises import PYTHON, TRITON, judge, kernel_with

from cudascope import CudaKernel
from pagewise.exercises import attempts, check, cuda, processes, solutions, triton


class Nasty:
    """Fails at everything."""

    def __eq__(self, other):
        raise ValueError("not to be compared")

    def __repr__(self):
        raise ValueError("not to be shown")

    __hash__, __str__ = None, __repr__

    @property
    def shape(self):
        raise SystemExit


class Speechless(Exception):
    def __str__(self):
        raise ValueError


NO_FUNCTIONS = [None, 3, "text", torch.ones(2), Nasty(), [len]]
NO_RESULTS = [
    None,
    Nasty(),
    (Nasty(), 1, 2),
    "text",
    {"out": 1},
    [],
    float("nan"),
    10**400,
    True,
    torch.empty(3, device="meta"),
    torch.eye(3).to_sparse(),
    torch.ones(3, dtype=torch.complex64),
    torch.ones(0),
    torch.ones(2, 2, 2, 2, requires_grad=True),
    iter([]),
    len,
]


@pytest.mark.parametrize("name", check.names())
def test_what_is_no_function_is_named(name):
    for theirs in NO_FUNCTIONS:
        verdict = judge(name, theirs)
        assert not verdict.right, type(theirs)
        assert "the answer must be" in verdict.message


@pytest.mark.parametrize("name", PYTHON)
def test_a_result_of_any_kind_is_judged(name):
    for result in one_in_three(NO_RESULTS, PYTHON.index(name)):
        assert not judge(name, lambda *args, given=result, **kwargs: given).right, type(result)


@pytest.mark.parametrize("name", PYTHON)
def test_an_exception_is_reported_with_the_line_it_came_from(name):
    errors = [ValueError("my words"), SystemExit(3), Speechless(), GeneratorExit(), MemoryError()]
    for error in one_in_three(errors, PYTHON.index(name)):

        def theirs(*args, given=error, **kwargs):
            raise given

        message = judge(name, theirs).message
        assert type(error).__name__ in message
        assert "in line 2 of theirs: raise given" in message


# A name, an answer, and words that the verdict must have.
NOT_KERNELS = {
    "a function without a parameter": ("causal_mask", lambda T: 0, ["TypeError"]),
    "a kernel without a parameter": (
        "warp_sum", "__global__ void warp_sum(float* x) {}", ["kernel warp_sum takes 1 arguments"]
    ),
    "another kernel": ("warp_sum", "__global__ void f(float* x) {}", ["has no kernel 'warp_sum'; it has f"]),
    "no decorator": ("one_pass_kernel", lambda *args: None, ["is `@triton.jit` above it?"]),
    "a kernel that stops": ("warp_sum", kernel_with("warp_sum", "__builtin_trap();"), ["__builtin_trap"]),
    "a kernel that would end its process": (
        "warp_sum", kernel_with("warp_sum", "__builtin_exit(3);"), ["a kernel cannot call exit()"]
    ),
    "a kernel that does not compile": (
        "paged_decode", kernel_with("paged_decode", "    no_such_name = 1;"),
        ["it does not compile", "no_such_name", "paged_decode.cu:"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "theirs", "words"), NOT_KERNELS.values(), ids=NOT_KERNELS)
def test_an_answer_that_cannot_run_is_reported(name, theirs, words):
    message = judge(name, theirs).message
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize("name", TRITON)
def test_no_kernel_is_right_where_the_solution_fails_too(name, monkeypatch):
    """As with a Triton that cannot compile, or interpret, any kernel here."""
    monkeypatch.setattr(triton, "best_device", lambda: torch.device("meta"))
    monkeypatch.setattr(triton, "check_triton_device", lambda device: None)
    exercise = getattr(check, name)
    monkeypatch.delitem(vars(exercise), "outcomes_of_solution", raising=False)
    for kernel in (exercise.answer(exercise.stub), solutions[name]):
        assert "the solution fails too" in judge(name, kernel).message
    del exercise.outcomes_of_solution


@pytest.mark.parametrize("name", TRITON)
def test_an_error_in_a_triton_kernel_is_reported(name):
    verdict = judge(name, kernel_with(name, "tl.load(no_such_name)"))
    assert not verdict.right
    assert "no_such_name" in verdict.message


# ------------------------------------------------------------------------------------------------ time


def endless(*args, **kwargs):
    while True:
        pass


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(attempts, "SECONDS", 0.2)
    monkeypatch.setattr(triton, "SECONDS", 0.5)
    monkeypatch.setattr(cuda, "RUN_SECONDS", 1.0)


def test_an_endless_function_meets_a_time_limit(impatient):
    assert "no answer after 0.2 seconds" in judge("safe_softmax", endless).message


def test_an_endless_function_meets_a_time_limit_in_any_thread(impatient):
    verdicts = []
    thread = threading.Thread(target=lambda: verdicts.append(judge("safe_softmax", endless)), daemon=True)
    thread.start()
    thread.join(60)
    assert "no answer after 0.2 seconds" in verdicts[0].message


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="nobody ends an endless kernel on a GPU")
def test_an_endless_interpreted_kernel_meets_a_time_limit(impatient):
    theirs = kernel_with("one_pass_kernel", "while num_keys >= 0: num_keys = num_keys + 0")
    assert "no answer after 0.5 seconds" in judge("one_pass_kernel", theirs).message
    assert judge("one_pass_kernel", solutions["one_pass_kernel"]).right  # the interpreter is free again


@pytest.mark.slow
def test_an_endless_cuda_kernel_meets_a_time_limit_and_the_next_is_judged(impatient):
    theirs = kernel_with("warp_sum", "volatile int zero = 0; while (zero == 0) {}")
    assert "no answer within 1 s" in judge("warp_sum", theirs).message
    assert judge("warp_sum", solutions["warp_sum"]).right


@pytest.mark.slow
def test_processes_that_wait_for_each_other_are_ended_and_the_next_answer_is_judged(monkeypatch):
    def theirs(x):
        torch.distributed.recv(x)  # nobody sends
        return x

    with monkeypatch.context() as impatiently:
        impatiently.setattr(processes._processes(), "timeout", 0.5)
        assert "gave no result within 0.5 s" in judge("pass_on", theirs).message
    assert judge("pass_on", solutions["pass_on"]).right


@pytest.mark.slow
@pytest.mark.parametrize("name", ["safe_softmax", "warp_sum"])
def test_the_users_own_interrupt_gets_through(name):
    theirs = endless if name in PYTHON else kernel_with(name, "volatile int zero = 0; while (zero == 0) {}")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a job in the background
    alarm = threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT])  # wakes the main thread, as Ctrl+C does
    alarm.start()
    with pytest.raises(KeyboardInterrupt):
        judge(name, theirs)
    alarm.join()
    signal.signal(signal.SIGINT, before)
    assert judge(name, solutions[name]).right


def test_a_kernel_from_the_magic_is_judged_as_its_source_is():
    right = CudaKernel(solutions["warp_sum"], "warp_sum")
    assert judge("warp_sum", right).right
    defined = CudaKernel(solutions["warp_sum"].replace("0xffffffff", "LANES"), "warp_sum", defines=["LANES=0xffffffff"])
    assert judge("warp_sum", defined).right


def test_what_a_kernel_prints_is_printed_here(capsys):
    judge(
        "warp_sum", '#include <stdio.h>\n__global__ void warp_sum(const float* x, float* sums) { printf("lane\\n"); }'
    )
    assert "lane" in capsys.readouterr().out
