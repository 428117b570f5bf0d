"""Progress bars: shown on a terminal only, never in the way of printed text, and not needed."""

import importlib
import io
import sys

import pytest

from pagewise.tools import progress as module
from pagewise.tools.progress import progress, progress_bar, say


class Terminal(io.StringIO):
    def isatty(self):
        return True


def terminal_of(monkeypatch):
    """Return a terminal that shows stdout and stderr. A fixture would come too early: pytest replaces both after it."""
    shown = Terminal()
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setattr(sys, "stderr", shown)
    return shown


@pytest.fixture
def without_tqdm(monkeypatch):
    """Import the module again as where tqdm is missing. Its functions look their names up in the module."""
    monkeypatch.setitem(sys.modules, "tqdm", None)
    importlib.reload(module)
    yield
    monkeypatch.undo()
    importlib.reload(module)


def test_a_terminal_shows_the_bar_before_the_first_item(monkeypatch):
    terminal = terminal_of(monkeypatch)
    items = iter(progress([1, 2, 3], "shapes"))
    assert next(items) == 1
    assert "shapes:   0%" in terminal.getvalue()
    assert [1, *items] == [1, 2, 3]
    assert "3/3" in terminal.getvalue()


def test_items_that_take_less_than_the_delay_show_no_bar(monkeypatch):
    terminal = terminal_of(monkeypatch)
    assert list(progress([1, 2, 3], "weights", delay=60.0)) == [1, 2, 3]
    assert not terminal.getvalue()


def test_a_file_gets_no_bar(capsys):
    assert list(progress([1, 2, 3], "shapes")) == [1, 2, 3]
    with progress_bar(2, "parts") as bar:
        bar.update()
    assert capsys.readouterr() == ("", "")


def test_a_bar_counts_what_it_is_told(monkeypatch):
    terminal = terminal_of(monkeypatch)
    with progress_bar(5, "prompts") as bar:
        bar.update(2)
        bar.set_description("other prompts")
    assert "2/5" in terminal.getvalue()
    assert "other prompts:" in terminal.getvalue()


def test_a_bar_is_hidden_or_shown_on_request(monkeypatch):
    terminal = terminal_of(monkeypatch)
    with progress_bar(5, "prompts", show=False):
        assert not terminal.getvalue()
    monkeypatch.setattr(sys, "stderr", file := io.StringIO())
    with progress_bar(5, "prompts", show=True):
        assert "0/5" in file.getvalue()


def test_a_text_begins_on_a_line_of_its_own(monkeypatch):
    """The bar's line is empty when the text comes, and the bar is shown again below it."""
    terminal = terminal_of(monkeypatch)
    for _ in progress([1, 2], "parts"):
        say("a table")
    before, *rest = terminal.getvalue().split("a table\n")
    assert before.endswith("\r")
    assert before.split("\r")[-2].strip() == ""
    assert rest[0].lstrip("\r").startswith("parts:")


@pytest.mark.usefixtures("without_tqdm")
def test_no_bar_needs_tqdm(capsys):
    assert list(progress([1, 2, 3], "shapes")) == [1, 2, 3]
    with progress_bar(3, "prompts", show=True) as bar:
        bar.set_description("other prompts")
        bar.update(2)
    say("a table")
    assert capsys.readouterr() == ("a table\n", "")
