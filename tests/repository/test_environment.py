"""`make` on a machine that lacks something says so in one sentence; the environment script knows what to use."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from conftest import ROOT

CUDASCOPE = ROOT / "src" / "cudascope" / "pyproject.toml"
SCRIPT = ROOT / "src" / "repository" / "environment.py"


PATH = "/usr/local/bin:/usr/bin:/bin"


def run(*command: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, **options)


def make(*arguments: str, cwd: Path = ROOT, path: str = PATH, **environment: str) -> subprocess.CompletedProcess:
    return run("make", *arguments, cwd=cwd, env={"PATH": path, **environment})


def test_help_names_every_target_and_is_the_default():
    assert make().stdout == make("help").stdout
    for target in ("lessons", "test", "lab", "book", "refresh", "clean"):
        assert f"make {target} " in make().stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lesson"], "no target 'lesson'"),
        (["environment", "PYTHON=/nowhere/python3"], "/nowhere/python3 does not run: install Python"),
    ],
)
def test_what_make_cannot_do_is_one_sentence(arguments, words):
    done = make(*arguments)
    assert done.returncode != 0
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def make_and_note(tmp_path):
    """Run make in a folder whose name has a space. Return what its interpreter noted: its home and its arguments."""
    folder = tmp_path / "page wise"
    interpreter, notes, path = folder / ".venv" / "bin" / "python", folder / "notes", folder / "bin"
    for file in (ROOT / "Makefile", ROOT / "pyproject.toml", CUDASCOPE, SCRIPT):
        (folder / file.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, folder / file.relative_to(ROOT))
    interpreter.parent.mkdir(parents=True)
    interpreter.write_text(f'#!/bin/sh\necho "HOME=$HOME UTF8=$PYTHONUTF8 $@" >> "{notes}"\n')
    interpreter.chmod(0o755)
    (folder / ".venv" / ".pagewise").write_text(str(folder))
    path.mkdir()
    (path / "python3").symlink_to(sys.executable)

    def noted(*targets: str, **environment: str) -> str:
        done = make(*targets, cwd=folder, path=f"{path}:{PATH}", **environment)
        assert done.returncode == 0, done.stderr
        return notes.read_text()

    return noted


@pytest.mark.slow
def test_every_target_runs_in_a_folder_whose_name_has_a_space(make_and_note):
    targets = re.search(r"^\.PHONY: help environment (.*) clean$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    ran = make_and_note(*targets.split())
    for part in ("-m ruff", "-m pytest", "-m sphinx", "src/repository/notebooks.py run", "tests/try_kernel.py"):
        assert part in ran


@pytest.mark.parametrize("kind", ["writable", "absent", "unnamed"])
def test_a_home_that_cannot_be_written_is_replaced_and_text_is_utf_8(kind, make_and_note, tmp_path):
    homes = {"writable": {"HOME": str(tmp_path)}, "absent": {"HOME": "/proc/no home"}, "unnamed": {}}
    noted = make_and_note("try", LC_ALL="C", PYTHONUTF8="0", **homes[kind])
    expected = tmp_path if kind == "writable" else tmp_path / "page wise" / "build" / "home"
    assert noted.startswith(f"HOME={expected} UTF8=1 tests/try_kernel.py")
    assert expected.is_dir()


@pytest.mark.parametrize(("cores", "workers"), [(1, ["2", "1"]), (4, ["5", "2"]), (16, ["8", "4"])])
def test_the_number_of_test_workers_follows_the_cores_up_to_eight(cores, workers, tmp_path):
    (tmp_path / "nproc").write_text(f"#!/bin/sh\necho ${{OMP_NUM_THREADS:-{cores}}}\n")  # as nproc does
    (tmp_path / "nproc").chmod(0o755)
    commands = make("-n", "test", path=f"{tmp_path}:{PATH}", OMP_NUM_THREADS="3").stdout
    assert re.findall(r"pytest .*-n (\d+)", commands) == workers


@pytest.mark.parametrize("uv_status", [0, 2, None])
def test_uv_installs_from_the_indexes_of_pip_and_pip_does_it_if_uv_cannot(uv_status, tmp_path, monkeypatch):
    """Without uv, and where uv fails, pip installs."""
    settings = """global.extra-index-url='https://a\\nhttps://b'
global.find-links='/global'
:env:.find-links='/c /d'
:env:.timeout='180'"""
    python, uv = tmp_path / "python", tmp_path / "uv"
    python.write_text(
        f'#!/bin/sh\ncase "$3" in config) cat <<"E"\n{settings}\nE\n;; *) touch "{tmp_path}/pip";; esac\n'
    )
    python.chmod(0o755)
    if uv_status is not None:
        uv.write_text(
            f'#!/bin/sh\n(echo "$@"; env | grep -E "^(UV_|LC_ALL)" | sort) > "{tmp_path}/noted"\nexit {uv_status}\n'
        )
        uv.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("UV_INDEX_STRATEGY", "first-index")  # the user's own setting wins
    runpy.run_path(str(SCRIPT))["install"](str(python))
    assert (tmp_path / "pip").exists() == (uv_status != 0)
    if uv_status is not None:
        command, *variables = (tmp_path / "noted").read_text().splitlines()
        assert command == f"pip install --quiet --python {python} -e {ROOT}/src/cudascope[cuda] -e {ROOT}[all,pinned]"
        assert variables == [
            "LC_ALL=C.UTF-8",
            "UV_FIND_LINKS=/c,/d",
            "UV_INDEX=https://a https://b",
            "UV_INDEX_STRATEGY=first-index",
        ]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_shows_how_far_the_installation_is(is_terminal, tmp_path, monkeypatch, capfd):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "pip: $*"\n')
    python.chmod(0o755)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    runpy.run_path(str(SCRIPT))["install"](str(python))
    assert (f"pip: -m pip install --disable-pip-version-check -e {ROOT}" in capfd.readouterr().out) == is_terminal


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """A checkout with a `.venv` in which the script stops when it has written a package. Returns the script's main."""
    root = tmp_path / "page [wise]"  # glob reads brackets
    script = root / "src" / "repository" / "environment.py"
    script.parent.mkdir(parents=True)
    shutil.copy(SCRIPT, script)
    main = runpy.run_path(str(script))["main"]
    venvs = []

    def run(command, **options):
        if "venv" in command:
            venvs.append(command)
            shutil.rmtree(root / ".venv", ignore_errors=True)
            (root / ".venv").mkdir()
        return SimpleNamespace(returncode=0)

    def install(python):
        (root / ".venv" / "lib" / "python3" / "site-packages" / "torch.dist-info").mkdir(parents=True, exist_ok=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["environment.py"])
    monkeypatch.setitem(main.__globals__, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setitem(main.__globals__, "install", install)
    return SimpleNamespace(root=root, main=main, venvs=venvs)


def test_an_interrupted_installation_goes_on_unless_a_package_is_broken(begun, capsys):
    def made_anew():
        before = len(begun.venvs)
        with pytest.raises(KeyboardInterrupt):
            begun.main()
        assert ("going on" in capsys.readouterr().out) == (len(begun.venvs) == before)
        return len(begun.venvs) > before

    assert made_anew()
    assert made_anew(), "a package without RECORD is not whole"
    (begun.root / ".venv" / "lib" / "python3" / "site-packages" / "torch.dist-info" / "RECORD").touch()
    assert not made_anew()
    stamp = begun.root / ".venv" / ".pagewise"
    stamp.write_text(stamp.read_text().replace("page [wise]", "another"))
    assert made_anew()
    stamp.unlink()
    assert made_anew()


def run_with(tmp_path: Path, lines: str) -> subprocess.CompletedProcess:
    """environment.main() after `lines` have changed what it sees; it must stop before it makes anything."""
    start = f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    program = f"import runpy, sys\nsys.argv = ['environment.py']\n{lines}\n{start}"
    return run(sys.executable, "-c", program, cwd=tmp_path, env={})


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


def test_an_interruption_is_one_sentence(tmp_path):
    done = run_with(tmp_path, "import shutil\ndef which(name): raise KeyboardInterrupt\nshutil.which = which")
    assert done.stderr == "interrupted: run make again, and the installation goes on\n"


@pytest.mark.parametrize(("named", "used"), [([], ROOT / ".venv" / "bin" / "python"), (["--named"], sys.executable)])
def test_unnamed_interpreter_gets_a_venv_and_a_named_environment_is_used_itself(named, used):
    assert run(sys.executable, str(SCRIPT), "--which", *named).stdout.strip() == str(used)


def test_ready_means_made_from_this_checkout_after_the_project_changed(tmp_path):
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


def test_a_mac_is_told_at_once_which_lessons_run_and_needs_no_compiler(tmp_path):
    lines = "sys.platform = 'darwin'; import shutil; shutil.which = lambda name: None; sys.version_info = (3, 9, 18)"
    first, second = run_with(tmp_path, lines).stderr.strip().splitlines()
    assert "lessons 1, 2, 4, 9 and 10 run, and the others show their stored outputs" in first
    assert "needs Python 3.11" in second


@pytest.mark.parametrize(
    ("settings", "driver", "expected"),
    [
        ("", False, "https://download.pytorch.org/whl/cpu"),
        (":env:.timeout='180'", False, "https://download.pytorch.org/whl/cpu"),
        ("", True, None),
        ("global.index-url='https://mirror'", False, None),
        (":env:.no-index='1'", False, None),
    ],
    ids=["no GPU", "other settings", "GPU", "mirror", "no index"],
)
def test_torch_for_cpus_is_preferred_where_there_is_no_gpu(settings, driver, expected, tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncat <<"E"\n{settings}\nE\n')
    python.chmod(0o755)
    if driver:
        (tmp_path / "nvidia-smi").touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    script = runpy.run_path(str(SCRIPT))
    script["prefer_cpu_torch"].__globals__["DRIVERS"] = ()
    script["prefer_cpu_torch"](str(python))
    assert os.environ.get("PIP_EXTRA_INDEX_URL") == expected
    os.environ.pop("PIP_EXTRA_INDEX_URL", None)


def test_triton_and_nvidias_packages_are_asked_for_on_linux_only():
    projects = [tomllib.loads(file.read_text())["project"] for file in (ROOT / "pyproject.toml", CUDASCOPE)]
    asked = [r for project in projects for extra in project["optional-dependencies"].values() for r in extra]
    asked += [r for project in projects for r in project["dependencies"]]
    linux_only = [r for r in asked if r.startswith(("triton", "cuda-", "nvidia-"))]
    assert len(linux_only) == 15  # two lists of six of CUDA, and triton in three
    assert [r for r in linux_only if not r.endswith("; platform_system == 'Linux'")] == []


def test_conda_environment_installs_the_same_extras_and_a_supported_python():
    text = (ROOT / "environment.yml").read_text()
    assert "- -e ./src/cudascope[cuda]\n      - -e .[all,pinned]" in text
    assert "cxx-compiler" in text
    assert any(f"python={version}" in text for version in ("3.11", "3.12", "3.13"))


def test_pins_cover_every_direct_dependency():
    project, cudascope = (tomllib.loads(file.read_text())["project"] for file in (ROOT / "pyproject.toml", CUDASCOPE))
    extras = project["optional-dependencies"] | cudascope["optional-dependencies"]

    def name(requirement: str) -> str:
        return requirement.partition(";")[0].replace("=", ">").partition(">")[0].strip()

    wanted = {name(r) for r in project["dependencies"] + cudascope["dependencies"]}
    wanted |= {name(r) for extra in ("lessons", "book", "test", "cuda", "models", "serve") for r in extras[extra]}
    assert all("==" in pin for pin in extras["pinned"])
    assert {name(pin) for pin in extras["pinned"]} == wanted


def test_the_lock_has_the_pinned_versions_from_the_public_indexes():
    """`uv lock` makes it anew after a pin has changed."""
    lock = (ROOT / "uv.lock").read_text()
    locked = {(package["name"], package.get("version")) for package in tomllib.loads(lock)["package"]}
    pins = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["pinned"]
    assert {tuple(pin.partition(";")[0].strip().split("==")) for pin in pins} <= locked
    hosts = set(re.findall(r'"https?://([^/"]*)', lock))
    assert hosts <= {"pypi.org", "files.pythonhosted.org", "download.pytorch.org"}
