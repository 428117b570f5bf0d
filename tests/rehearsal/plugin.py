"""PYTEST_PLUGINS=rehearsal.plugin: the tests as if on a machine with GPUs."""

import pytest

import rehearsal

rehearsal.install()
from rehearsal import driver, launches  # noqa: E402  imports torch

SPILLS = {
    ("decode_kernel", "k_ptr=*u8 D=120 P=2", 80): 104,
    ("decode_kernel", "k_ptr=*u8 D=120 P=32", 80): 1056,
    ("decode_kernel", "k_ptr=*u8 D=120 P=256", 80): 1192,
    ("decode_kernel", "k_ptr=*fp8e4nv D=120 P=2", 90): 104,
    ("decode_kernel", "k_ptr=*fp8e4nv D=120 P=32", 90): 296,
    ("decode_kernel", "k_ptr=*fp8e5 D=120 P=256", 90): 360,
    ("varlen_kernel", "q_ptr=*fp32 D=32 BLOCK_R=16", 90): 8,
    ("varlen_kernel", "q_ptr=*fp32 k_ptr=*u8 D=256", 80): 8,
    ("varlen_kernel", "q_ptr=*fp16 D=32 BLOCK_R=32", 80): 16,
}
"""Bytes that a thread is known to spill, by kernel, its types and constants, and compute capability: the most that was
seen, with Triton 3.6 and 3.7 on sm_80, with 3.7 on sm_90. The decode kernel's are tiles of 64 keys in float8 at
D = 120, the one head size whose rows of bytes begin at no multiple of 16, so that they are read in smaller pieces. The
varlen kernel's (3.7) take 80, 128 and 96 registers: with eight more, an SM would hold a thread block less.
"""


def pytest_sessionstart(session):
    launches.watch_cuda()  # not sooner: conftest.py first says how pagewise's modules are to be imported


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    output = getattr(node, "workeroutput", {})
    launches.counted.update(output.get("counted", {}))
    launches.built.update({tuple(name): launches.Built(*took) for name, took in output.get("built", [])})


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["counted"] = dict(launches.counted)
        session.config.workeroutput["built"] = [(name, tuple(took)) for name, took in launches.built.items()]
    elif spilling() and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def spilling():
    """(kernel, variant, bytes) of what spills more than is known."""
    found = [(name, took.variant, took.spilled) for (name, _), took in launches.built.items()]
    return sorted((name, variant, spilled) for name, variant, spilled in found if spilled > known(name, variant))


def known(name, variant):
    """Bytes that this variant may spill on the GPU that is rehearsed."""
    sm = 10 * driver.CAPABILITY[0] + driver.CAPABILITY[1]
    facts = set(variant.split())
    seen = (
        most for (kernel, of, at), most in SPILLS.items() if (kernel, at) == (name, sm) and facts >= set(of.split())
    )
    return max(seen, default=0)


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(launches.summary())
    if spilling():
        terminalreporter.write_line(f"FAILED: Triton's machine code spills: {spilling()}", red=True)
