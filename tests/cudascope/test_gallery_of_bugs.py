"""GALLERY.md: each of its commands prints what the page shows, for the kernel that the page shows.

`python tests/cudascope/test_gallery_of_bugs.py` writes the kernels and the present outputs into the page.
"""

import contextlib
import io
import os
import re
import shlex
from pathlib import Path

import pytest

import cudascope
from cudascope.command.line import main

FOLDER = Path(__file__).parent / "gallery"
PAGE = Path(cudascope.__file__).parent / "GALLERY.md"
ENTRY = re.compile(r"```cuda\n(.*?)```\n\n```console\n\$ (cudascope check (\w+\.cu).*?[^\\])\n(.*?)```", re.DOTALL)
ENTRIES = {entry[3]: entry for entry in ENTRY.finditer(PAGE.read_text())}


def output_of(command: str) -> tuple[int, str]:
    printed = io.StringIO()
    with contextlib.chdir(FOLDER), contextlib.redirect_stdout(printed):
        status = main(shlex.split(command.replace("\\\n", " "))[1:])
    return status, printed.getvalue()


@pytest.mark.parametrize("file", ENTRIES)
def test_the_command_prints_what_the_page_shows(file):
    code, command, _, shown = ENTRIES[file].groups()
    assert code == (FOLDER / file).read_text()
    assert code.count("\n") <= 12
    assert output_of(command) == (1, shown)


def test_every_kernel_and_every_console_of_the_page_is_checked():
    assert set(ENTRIES) == set(os.listdir(FOLDER))
    assert len(ENTRIES) == PAGE.read_text().count("```console") == 9


def remade(entry: re.Match) -> str:
    code, command = (FOLDER / entry[3]).read_text(), entry[2]
    return f"```cuda\n{code}```\n\n```console\n$ {command}\n{output_of(command)[1]}```"


if __name__ == "__main__":
    PAGE.write_text(ENTRY.sub(remade, PAGE.read_text()))
