"""PYTEST_PLUGINS=rehearsal.plugin: the tests as if on a machine with GPUs."""

import pytest

import rehearsal

rehearsal.install()
from rehearsal import launches  # noqa: E402  imports torch

SPILLS = {"paged_decode_kernel": 1192}
"""Bytes that a kernel is known to spill, by its name: at D = 120 in 16 bits, whose strides are no multiples of 16."""


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
    elif _spilling() and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _spilling():
    return sorted({(name, b.spilled) for (name, _), b in launches.built.items() if b.spilled > SPILLS.get(name, 0)})


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(launches.summary())
    if _spilling():
        terminalreporter.write_line(f"FAILED: Triton's machine code spills: {_spilling()}", red=True)
