"""pytest -p rehearsal.plugin: the tests as if on a machine with GPUs."""

import rehearsal

rehearsal.install()


def pytest_sessionstart(session):
    rehearsal.launches.watch_cuda()  # not sooner: conftest.py first says how pagewise's modules are to be imported


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(rehearsal.launches.summary())
