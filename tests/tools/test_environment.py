"""`make` on a machine that lacks something says so in one sentence; the environment script knows what to use."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from conftest import ROOT

SCRIPT = ROOT / "src" / "pagewise" / "tools" / "environment.py"


def make(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    base = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
    return subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True, env=base | environment)


def test_help_names_every_target_and_is_the_default():
    assert make().stdout == make("help").stdout
    for target in ("lessons", "test", "lab", "book", "refresh", "clean"):
        assert f"make {target} " in make().stdout


def test_unknown_target_is_one_sentence():
    done = make("lesson")
    assert done.returncode != 0
    assert "no target 'lesson'" in done.stderr


def test_interpreter_that_does_not_run_is_one_sentence():
    done = make("environment", "PYTHON=/nowhere/python3")
    assert done.returncode != 0
    assert "/nowhere/python3 does not run: install Python" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_every_target_runs_in_a_folder_whose_name_has_a_space(tmp_path):
    """In a copy of the Makefile whose interpreter only notes its arguments."""
    folder = tmp_path / "page wise"
    script = folder / SCRIPT.relative_to(ROOT)
    script.parent.mkdir(parents=True)
    for file in (ROOT / "Makefile", ROOT / "pyproject.toml", SCRIPT):
        shutil.copy(file, folder / file.relative_to(ROOT))
    interpreter, notes = folder / ".venv" / "bin" / "python", folder / "notes"
    interpreter.parent.mkdir(parents=True)
    interpreter.write_text(f'#!/bin/sh\necho "$@" >> "{notes}"\n')
    interpreter.chmod(0o755)
    (folder / ".venv" / ".pagewise").write_text(str(folder))
    (folder / "bin").mkdir()
    (folder / "bin" / "python3").symlink_to(sys.executable)
    path = os.pathsep.join([str(folder / "bin"), "/usr/local/bin:/usr/bin:/bin"])
    targets = re.search(r"^\.PHONY: help environment (.*) clean$", (folder / "Makefile").read_text(), re.MULTILINE)[1]
    command = ["make", "-C", str(folder), *targets.split()]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": path})
    assert done.returncode == 0, done.stderr
    ran = notes.read_text()
    for part in ("-m ruff", "-m pytest", "-m sphinx", "-m pagewise.tools.notebooks run", "tests/try_kernel.py"):
        assert part in ran


def run_with(tmp_path: Path, lines: str, **environment: str) -> subprocess.CompletedProcess:
    """environment.main() after `lines` have changed what it sees; it must stop before it makes anything."""
    start = f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    program = f"import runpy, sys\nsys.argv = ['environment.py']\n{lines}\n{start}"
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, env=environment
    )


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("sys.version_info = (3, 9, 18)", ["needs Python 3.11", "is 3.9", "make PYTHON="]),
        ("sys.version_info = (3, 14, 0)", ["needs Python 3.11", "is 3.14"]),
        (
            "import importlib.util as u; find = u.find_spec\n"
            "u.find_spec = lambda name: None if name == 'ensurepip' else find(name)",
            ["no venv module", "apt install python3"],
        ),
        ("import shutil; shutil.which = lambda name: None", ["C++ compiler", "apt install g++"]),
    ],
)
def test_missing_prerequisite_is_a_sentence_with_the_remedy(tmp_path, lines, words):
    done = run_with(tmp_path, lines)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    for word in words:
        assert word in done.stderr


def test_unnamed_interpreter_gets_a_venv_and_a_named_environment_is_used_itself():
    which = [sys.executable, str(SCRIPT), "--which"]
    unnamed = subprocess.run(which, capture_output=True, text=True).stdout.strip()
    named = subprocess.run([*which, "--named"], capture_output=True, text=True).stdout.strip()
    assert unnamed == str(ROOT / ".venv" / "bin" / "python")
    assert named == sys.executable


def test_ready_means_made_from_this_checkout_after_the_project_changed(tmp_path):
    import runpy

    script = runpy.run_path(str(SCRIPT))
    python, stamp = tmp_path / "python", tmp_path / "stamp"
    assert not script["is_ready"](python, stamp)
    python.touch()
    stamp.write_text(script["ROOT"])
    assert script["is_ready"](python, stamp)
    stamp.write_text("/another/checkout")
    assert not script["is_ready"](python, stamp)
    stamp.write_text(script["ROOT"])
    os.utime(stamp, (0, 0))  # older than pyproject.toml
    assert not script["is_ready"](python, stamp)


def test_conda_environment_installs_the_same_extras_and_a_supported_python():
    text = (ROOT / "environment.yml").read_text()
    assert "-e .[all,pinned]" in text
    assert "cxx-compiler" in text
    assert any(f"python={version}" in text for version in ("3.11", "3.12", "3.13"))


def test_pins_cover_every_direct_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]

    def name(requirement: str) -> str:
        return requirement.partition(";")[0].replace("=", ">").partition(">")[0].strip()

    wanted = {name(r) for r in project["dependencies"]}
    wanted |= {name(r) for extra in ("lessons", "book", "test", "cuda", "models", "serve") for r in extras[extra]}
    assert all("==" in pin for pin in extras["pinned"])
    assert {name(pin) for pin in extras["pinned"]} == wanted


def test_compiler_is_on_this_machine():
    assert shutil.which("g++") or shutil.which("clang++")


def test_the_lock_has_the_pinned_versions_from_the_public_indexes():
    """`uv lock` makes it anew after a pin has changed."""
    lock = (ROOT / "uv.lock").read_text()
    locked = {(package["name"], package.get("version")) for package in tomllib.loads(lock)["package"]}
    pins = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["pinned"]
    assert {tuple(pin.partition(";")[0].strip().split("==")) for pin in pins} <= locked
    hosts = set(re.findall(r'"https?://([^/"]*)', lock))
    assert hosts <= {"pypi.org", "files.pythonhosted.org", "download.pytorch.org"}
