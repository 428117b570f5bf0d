"""PYTEST_PLUGINS=rehearsal.plugin: the tests as if on a machine with GPUs."""

import pytest

import rehearsal

rehearsal.install()
from rehearsal import driver, launches  # noqa: E402  imports torch


def rehearsed_sm():
    """The compute capability of the GPU that is rehearsed, times ten."""
    return 10 * driver.CAPABILITY[0] + driver.CAPABILITY[1]


ALLOWED = 16 if rehearsed_sm() >= 80 else 1 << 20
"""Bytes that any kernel may spill: ptxas aims at a number of warps per SM, and stops a register short of it. On sm_75
Triton has no tensor cores and spills kilobytes, which is why nothing chooses it there by default."""


def pytest_collection_modifyitems(items):
    """A GPU below sm_80 does not compute with bfloat16: the package refuses it, and checks.py tests that."""
    if rehearsed_sm() < 80:
        items[:] = [item for item in items if not _has_bfloat16(item)]


def _has_bfloat16(item):
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return "bfloat16" in item.nodeid or "torch.bfloat16" in str(parameters)


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
    """Return (kernel, variant, bytes) of each kernel that spills more than ALLOWED."""
    found = [(name, took.variant, took.spilled) for (name, _), took in launches.built.items()]
    return sorted(each for each in found if each[2] > ALLOWED)


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(launches.summary())
    if spilling():
        terminalreporter.write_line(f"FAILED: Triton's machine code spills: {spilling()}", red=True)
