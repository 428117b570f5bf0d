"""The README of cudascope: its examples run as they stand, its tables say what the code does."""

import re
import shlex
from pathlib import Path

import pytest

import cudascope
from cudascope.command.line import main
from cudascope.cpu.rules import RULES, WITHOUT_THREAD

WING = Path(cudascope.__file__).parent
README = (WING / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def example(words: str) -> str:
    """The only Python example that has these words."""
    (found,) = (block for block in blocks("python") if words in block)
    return found


@pytest.fixture(autouse=True)
def _with_the_examples_kernel(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (kernel,) = blocks("cuda")
    (tmp_path / "reverse.cu").write_text(kernel)


def test_the_command_prints_what_the_readme_shows(capsys):
    (console,) = blocks("console")
    command, _, expected = console.removeprefix("$ ").replace("\\\n", " ").partition("\n")
    words = shlex.split(command)
    assert words[0] == "cudascope"
    assert main(words[1:]) == 1
    assert capsys.readouterr().out == expected


def test_the_python_example_runs(capsys):
    exec(compile(example('CudaKernel("reverse.cu"'), "README.md", "exec"), {})
    shown = capsys.readouterr().out
    assert shown.startswith("race, ")
    assert "reverse, 1 thread blocks of 128 threads\n" in shown
    assert shown.endswith("0 0\n")


def test_the_example_of_a_struct_has_no_findings(capsys):
    exec(compile(example("class Params"), "README.md", "exec"), {})
    assert capsys.readouterr().out == "1 launch checked, nothing found\n"


@pytest.mark.slow
def test_the_example_of_instructions_counts_the_turns_of_all_lanes(capsys):
    exec(compile(example("report.instructions"), "README.md", "exec"), {})
    shown = capsys.readouterr().out
    # eight lanes make 32 turns in groups of four, the others 3 turns one by one and 28 in groups of four
    assert "\n35 " in shown
    assert "'global store': 1" in shown


@pytest.mark.slow
def test_the_example_of_a_triton_kernel_has_no_findings(capsys, tmp_path):
    file, source = tmp_path / "row_sums.py", example("def row_sums")
    file.write_text(source)
    exec(compile(source, file, "exec"), {"__name__": "row_sums"})
    shown = capsys.readouterr().out
    assert "row_sums, 4 thread blocks of 128 threads\n" in shown
    assert "tl.store(out + tl.program_id(0), tl.sum(values, 0))" in shown


def test_every_public_name_and_command_is_in_the_readme():
    for name in ("CudaKernel", "check", "observe", "reachable", "schedule", "time_limit"):
        assert re.search(rf"^\| `(cudascope\.)?{name}\(", README, re.MULTILINE), name
        assert hasattr(cudascope, name)
    for command in ("check", "observe", "run", "list"):
        assert f"| `cudascope {command}` |" in README


def test_every_rule_is_in_the_table():
    for rule in (*RULES.values(), *WITHOUT_THREAD):
        switched = " Off unless asked for." if not rule.is_on else ""
        assert f"| {rule.what} | {rule.name} | {rule.summary}{switched} |" in README


def test_every_link_leads_to_a_file():
    prose = re.sub(r"```.*?```|`[^`]*`", "", README, flags=re.DOTALL)
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", prose)
    assert len(links) > 5
    assert [link for link in links if not (WING / link).exists()] == []
