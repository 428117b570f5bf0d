"""The memory of a launch, the signals of the process and its other threads. Signals have processes of their own."""

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
import torch
from waiting import Waiting, kernel_of

import cudascope

LARGE = 1 << 20  # elements: of a tensor that was not copied by earlier versions
IMPORTS = """
import contextlib, ctypes, os, signal, subprocess, threading, time
import numpy as np
import cudascope
from waiting import *
"""
SIZES = pytest.mark.parametrize("size", [1 << 8, LARGE])
MODES = pytest.mark.parametrize("mode", ["plain", "check"])


def in_a_process(code: str, limit: float = 60) -> subprocess.CompletedProcess:
    """Run `code` in a process of its own, which imports no torch."""
    start = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n{IMPORTS}"
    command = [sys.executable, "-c", start + textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)


# ------------------------------------------------------------------------------------------------ copies


@SIZES
def test_another_thread_reads_and_writes_a_tensor_during_a_launch(size):
    x = torch.zeros(size)
    with Waiting(x):
        start = time.monotonic()
        seen = x[0].item()
        x[2] = 3
        read, write = os.pipe()
        written = os.write(write, memoryview(x.numpy())[:16])
        seconds = time.monotonic() - start
        os.close(read), os.close(write)
    assert (seen, written) == (0, 64)  # results appear when the launch ends
    assert seconds < 15
    assert x[:4].tolist() == [1, 2, 3, 0]


@SIZES
def test_elements_between_those_of_a_view_keep_what_another_thread_stores(size):
    whole = torch.zeros(2 * size)
    with Waiting(whole[::2]):  # the kernel takes it for contiguous
        whole[3::2] = 7
    assert whole[:4].tolist() == [1, 2, 0, 7]


@SIZES
@pytest.mark.parametrize("bytes_of_an_element", [1, 2, 4, 8])
def test_changes_of_elements_of_every_size_are_copied_back(size, bytes_of_an_element):
    integer = {1: "signed char", 2: "short", 4: "int", 8: "long long"}[bytes_of_an_element]
    kernel = kernel_of(
        f"__global__ void k({integer}* x, int n) {{ for (int i = 0; i < n; i += 3) x[i] = i % 100 - 50; }}"
    )
    x = torch.zeros(size + 1, dtype=getattr(torch, f"int{8 * bytes_of_an_element}"))[1:]
    kernel[1, 1](x, size)
    at = torch.arange(size)
    assert torch.equal(x, torch.where(at % 3 == 0, at % 100 - 50, 0).to(x.dtype))


@MODES
@pytest.mark.parametrize("change", ["((float*)x)[1] = 0", "atomicAdd((float*)x + 1, -1)"])
def test_a_write_through_a_cast_of_a_pointer_to_const_arrives(mode, change):
    kernel = kernel_of(f"__global__ void k(const float* x) {{ {change}; }}")
    x = torch.ones(4)
    with cudascope.check() if mode == "check" else cudascope.time_limit(30):
        kernel[1, 1](x)
    assert x.tolist() == [1, 0, 1, 1]


def test_atomics_of_launches_from_several_threads_are_all_counted():
    kernel = kernel_of("__global__ void k(int* x) { atomicAdd(x, 1); }")
    x = torch.zeros(LARGE, dtype=torch.int32)
    kernel.compile()
    threads = [threading.Thread(target=lambda: [kernel[2, 32](x) for _ in range(5)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert x[0] == 4 * 5 * 64


@MODES
@SIZES
@pytest.mark.parametrize("way", ["struct", "table"])
def test_a_tensor_that_a_struct_or_a_table_points_to_is_one_with_the_argument(way, size, mode):
    kernel = kernel_of(
        "struct Way { int n; float* p; };\n"
        "__global__ void k(float* x, float* const* table, Way way) {\n"
        "    float* other = table ? table[0] : way.p;\n"
        "    x[0] = 1; other[1] = other[0] + 1; x[2] = x[1] + 1;\n"
        "}"
    )

    class Way(ctypes.Structure):
        _fields_ = (("n", ctypes.c_int), ("p", ctypes.c_void_p))

    x = torch.zeros(size)
    table = torch.tensor([x.data_ptr()]) if way == "table" else None
    with cudascope.check() if mode == "check" else cudascope.time_limit(30):
        kernel[1, 1](x, table, Way(1, x.data_ptr() if way == "struct" else None))
    assert x[:4].tolist() == [1, 2, 3, 0]


@SIZES
def test_shared_memory_and_files_are_tensors_like_others(size, tmp_path):
    kernel = kernel_of("__global__ void k(float* x) { x[0] = x[1] + 1; }")
    shared = torch.full((size,), 2.0).share_memory_()
    kernel[1, 1](shared)
    assert shared[:2].tolist() == [3, 2]
    np.full(size, 4, np.float32).tofile(tmp_path / "x")
    writable = np.memmap(tmp_path / "x", np.float32, "r+")
    kernel[1, 1](writable)
    assert np.fromfile(tmp_path / "x", np.float32)[:2].tolist() == [5, 4]


@SIZES
def test_a_write_to_memory_that_is_read_only_is_found(size, tmp_path):
    kernel = kernel_of("__global__ void k(float* x, int i) { if (i >= 0) x[i] = 1; }")
    np.zeros(size, np.float32).tofile(tmp_path / "x")
    with open(tmp_path / "x", "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        x = torch.frombuffer(mapped, dtype=torch.float32)
        kernel[1, 1](x, -1)
        with pytest.raises(cudascope.Finding, match="may not be written") as found:
            kernel[1, 1](x, 5)
    assert (found.value.rule, found.value.tensor) == ("read-only", "x")


@SIZES
def test_a_tensor_whose_file_has_become_shorter_is_found(size, tmp_path):
    kernel = kernel_of("__global__ void k(float* x) { x[0] = 1; }")
    np.zeros(size, np.float32).tofile(tmp_path / "x")
    x = np.memmap(tmp_path / "x", np.float32, "r+")
    os.truncate(tmp_path / "x", 0)
    with pytest.raises(cudascope.Finding, match="memory of x is not there") as found:
        kernel[1, 1](x)
    assert found.value.rule == "unreadable"


@pytest.mark.slow
def test_any_number_of_stray_pages_leaves_the_process_whole():
    kernel = kernel_of(
        "__global__ void k(float* x) { x[(blockIdx.x * blockDim.x + threadIdx.x) * 2048ll] = 1; }",
    )
    x = torch.ones(1 << 18)
    with cudascope.check(stop=False) as report:
        kernel[640, 128](x)
    assert x.sum() == 1 << 18
    assert [finding.rule for finding in report.findings] == ["out of bounds"]
    assert report.findings[0].count == 640 * 128 - 128


# ------------------------------------------------------------------------------------------------ processes, signals


@pytest.mark.slow
def test_a_child_that_is_forked_during_a_launch_reads_and_launches():
    done = in_a_process(f"""
        add = kernel_of("__global__ void k(float* x) {{ x[3] += 1; }}")
        add.compile()
        for size in (1 << 8, {LARGE}):
            x = np.zeros(size, np.float32)
            with Waiting(x):
                queue = threading.Thread(target=lambda: add[1, 1](x))  # it waits for its turn
                queue.start()
                time.sleep(0.1)
                child = os.fork()
                if child == 0:
                    signal.alarm(20)
                    x.sum()
                    add[1, 1](x)
                    os._exit(int(x[3].item()))
                status = os.waitpid(child, 0)[1]
            queue.join()
            print(os.waitstatus_to_exitcode(status), x[:4].tolist())
    """)
    assert done.stdout == 2 * "1 [1.0, 2.0, 0.0, 1.0]\n", done


@pytest.mark.slow
def test_a_handler_of_python_runs_during_a_launch_and_may_end_it():
    done = in_a_process("""
        class Late(Exception): pass
        def late(*_): raise Late
        signal.signal(signal.SIGALRM, late)
        kernel = CudaKernel(WAITS, "waits")
        for mode in (contextlib.nullcontext, cudascope.observe, cudascope.check):
            for sent in (signal.SIGINT, signal.SIGALRM):
                x = np.zeros(4, np.float32)
                with mode():
                    kernel.compile()
                    threading.Timer(0.2, os.kill, (os.getpid(), sent)).start()
                    start = time.monotonic()
                    try:
                        kernel[1, 1](x, 10**12)
                    except BaseException as error:
                        print(type(error).__name__, error.__notes__, time.monotonic() - start < 15)
                kernel[1, 1](x, 1)
                print(x[:2].tolist())
    """)
    told = "{} ['kernel waits was interrupted: its results are not whole'] True\n[1.0, 2.0]\n"
    assert done.stdout == 3 * (told.format("KeyboardInterrupt") + told.format("Late")), done


@pytest.mark.slow
def test_a_handler_of_python_may_return_and_may_launch():
    done = in_a_process("""
        x = np.zeros(4, np.float32)
        kernel, add = CudaKernel(WAITS, "waits"), kernel_of("__global__ void k(float* x) { x[3] += 1; }")
        kernel.compile(), add.compile()
        go = kernel.variable("go")
        def handler(*_):
            add[1, 1](x)
            go[...] = 1
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        kernel[1, 1](x, 10**12)
        print(x.tolist())
    """)
    assert done.stdout == "[1.0, 2.0, 0.0, 1.0]\n", done


@pytest.mark.slow
def test_ctrl_c_reaches_the_first_thread_while_another_one_launches():
    done = in_a_process(f"""
        x = np.zeros({LARGE}, np.float32)
        add = kernel_of("__global__ void k(float* x) {{ x[3] += 1; }}")
        add.compile()
        # The system may give a signal to any thread: Ctrl-C is pressed again after 5 seconds.
        for waits in (lambda: time.sleep(20), lambda: add[1, 1](x)):
            with Waiting(x):
                presses = [threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT)) for after in (0.1, 5, 10)]
                start = time.monotonic()
                try:
                    for press in presses:
                        press.start()
                    waits()
                except KeyboardInterrupt:
                    for press in presses:
                        press.cancel()
                    print(time.monotonic() - start < 15)
        print(x[:4].tolist())
    """)
    assert done.stdout == "True\nTrue\n[1.0, 2.0, 0.0, 0.0]\n", done


@pytest.mark.slow
def test_handlers_of_the_process_are_back_after_a_launch():
    done = in_a_process("""
        kernel = kernel_of("__global__ void k(float* x, int n) { x[0] = 1000 / n; }")
        kernel.compile()  # may start the first thread of the process, for which the C library takes a signal
        def handlers():
            lines = open("/proc/self/status").read().splitlines()
            return [line for line in lines if line.startswith(("SigIgn", "SigCgt", "SigBlk"))]
        x, before = np.zeros(4, np.float32), handlers()
        kernel[1, 1](x, 1)
        try:
            kernel[1, 1](x, 0)
        except cudascope.Finding as finding:
            print(finding.rule)
        print(handlers() == before)
    """)
    assert done.stdout == "division by zero\nTrue\n", done


@pytest.mark.parametrize("enabled", ["before", "during"])
def test_faulthandler_reports_a_crash_of_the_host_during_a_launch(enabled):
    done = in_a_process(f"""
        x = np.zeros(4, np.float32)
        import faulthandler
        if {enabled == "before"}: faulthandler.enable()
        with Waiting(x):
            if {enabled == "during"}: faulthandler.enable()
            ctypes.string_at(8)
    """)
    assert done.returncode == -signal.SIGSEGV, done
    assert done.stderr.count("Fatal Python error: Segmentation fault") == 1, done
    assert "string_at" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("sent", ["SIGABRT", "SIGSEGV"])
def test_a_fatal_signal_that_is_sent_during_a_launch_is_no_finding(sent):
    done = in_a_process(f"""
        import faulthandler
        faulthandler.enable()
        kernel = CudaKernel(WAITS, "waits")
        kernel.compile()
        subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -{sent[3:]} {{os.getpid()}}"])
        kernel[1, 1](np.zeros(4, np.float32), 10**12)
    """)
    assert done.returncode == -getattr(signal, sent), done
    assert "Fatal Python error" in done.stderr, done


@pytest.mark.parametrize("mode", [cudascope.check, cudascope.observe])
def test_a_reference_to_an_index_is_no_access_to_memory_of_the_kernel(mode):
    source = """
    __device__ __noinline__ unsigned sum(const uint3& a, const uint3& b) { return a.x + b.x; }
    __global__ void k(unsigned* out) {
        out[threadIdx.x] = sum(threadIdx, blockIdx) + sum(blockDim, gridDim);
    }
    """
    out = torch.zeros(8, dtype=torch.int32)
    with mode() as report:
        cudascope.CudaKernel(source, "k")[1, 8](out)
    assert out.tolist() == [index + 8 + 1 for index in range(8)]
    if mode is cudascope.check:
        assert not report.findings
    else:
        assert [report.count(access).requests for access in ("read", "write")] == [0, 1]
