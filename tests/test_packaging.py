"""The wheels and the editable installations of both distributions, made without network, work outside this checkout."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from covering import is_full
from test_house import SOURCES

import cudascope
import pagewise
from conftest import ROOT, needs_interpreter

FOLDERS = {"cudascope": "src/cudascope", "pagewise": "."}  # of each distribution, by its package
PROJECTS = {
    package: tomllib.loads((ROOT / folder / "pyproject.toml").read_text()) for package, folder in FOLDERS.items()
}
INFO = {
    "cudascope": f"cudascope-{cudascope.__version__}",
    "pagewise": f"attention_page_by_page-{pagewise.__version__}",
}
each_distribution = pytest.mark.parametrize("package", FOLDERS)
NOT_SOURCES = (".*", "build", "dist", "lessons", "tests", "*.egg-info", "__pycache__")

TRY_IT = """
import sys
import pagewise, torch
import pagewise.kernels.online_softmax
import cudascope
from cudascope import CudaKernel
from pagewise.online_softmax import online_softmax
from pagewise.models.load import tiny_model
from pagewise.naive_attention import attention

double = CudaKernel("__global__ void twice(float* x) { x[threadIdx.x] *= 2; }", "twice")
numbers = torch.ones(3)
with cudascope.check():
    double[1, 3](numbers)
assert numbers.tolist() == [2, 2, 2]
x = torch.tensor([[1.0, 2.0, 3.0, float("-inf")]])
assert torch.allclose(online_softmax(x, 2, backend="triton"), x.softmax(dim=-1))
model, tokenizer = tiny_model()
attend = lambda layer, q, k, v: attention(q, k, v, causal=True)
ids = torch.tensor([tokenizer.encode("attention")])
assert model(ids, torch.arange(9)[None], attend).isfinite().all()
for name, module in list(sys.modules.items()):
    if name.split(".")[0] in ("cudascope", "pagewise") and module.__file__:
        print(module.__file__)
"""


def run(*command, cwd, **environment):
    """The output of a command, which must succeed, in an environment without this checkout and without a GPU."""
    forget = ("PYTHONPATH", "TRITON_INTERPRET")
    env = {name: value for name, value in os.environ.items() if name not in forget}
    env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environment}
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the sources, so that building leaves nothing behind in this one."""
    copy = tmp_path_factory.mktemp("checkout") / "pagewise"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_SOURCES))
    return copy


@pytest.fixture
def venv(tmp_path):
    """The interpreter of a new environment that has everything of this one, except its editable installs."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    # A .pth beside the packages of this environment is not followed from here.
    ours = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (Path(site) / "surrounding.pth").write_text("\n".join(ours))
    return python


@pytest.fixture(scope="module")
def wheels(checkout, tmp_path_factory):
    """The wheel of each distribution, by its package."""
    folder = tmp_path_factory.mktemp("wheels")
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    projects = [checkout / each for each in FOLDERS.values()]
    run(sys.executable, "-m", "pip", "wheel", *options, folder, *projects, cwd=folder)
    return {package: next(folder.glob(f"{info}-py3-*.whl")) for package, info in INFO.items()}


def names_in(wheel):
    return set(zipfile.ZipFile(wheel).namelist())


def below(folder, pattern):
    """The files of a package. pip leaves the others there when it installs from this checkout."""
    paths = ((path, path.relative_to(folder).parts) for path in sorted(folder.rglob(pattern)))
    left = {"__pycache__", ".ipynb_checkpoints", "build", "cudascope.egg-info"}
    return [path for path, parts in paths if not left & {*parts}]


# ------------------------------------------------------------------------------------------------ pyproject.toml


@each_distribution
@pytest.mark.parametrize("pattern", ["*.py", "__init__.py"])
def test_every_folder_with_python_files_is_listed_as_a_package(package, pattern):
    found = set()
    for name, folder in SOURCES.items():
        for file in below(folder, pattern) if name.split(".")[0] == package else ():
            found.add(".".join([name, *file.parent.relative_to(folder).parts]))
    assert found == set(PROJECTS[package]["tool"]["setuptools"]["packages"])


def test_cudascope_needs_only_numpy():
    assert PROJECTS["cudascope"]["project"]["dependencies"] == ["numpy>=2"]
    assert "cudascope" not in str(PROJECTS["pagewise"]["project"]["dependencies"]), "pip would ask the index for it"


@pytest.mark.parametrize(
    ("file", "command"),
    [
        ("README.md", "pip install ./src/cudascope ."),
        ("README.md", 'pip install ./src/cudascope ".[lessons]"'),
        ("src/repository/colab.py", '%pip install -q "./pagewise/src/cudascope[cuda]" ./pagewise'),
        ("Dockerfile", '-e "./src/cudascope[cuda]" -e ".[all,pinned]"'),
        ("environment.yml", "      - -e ./src/cudascope[cuda]\n      - -e .[all,pinned]"),
        (".github/workflows/ci.yml", '-e "./src/cudascope[cuda]" -e ".['),
    ],
)
def test_every_command_that_installs_names_both_folders(file, command):
    assert command in (ROOT / file).read_text()


EDITABLE = """
import sys
from importlib.machinery import PathFinder

class Finder:
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec("kernels", [{root!r}]) if name == "pagewise.kernels" else None

sys.meta_path.insert(0, Finder)
"""
FOREIGN = {  # what a checkout has, and the way to the package inside it
    "checkout": (("src/pagewise", "kernels"), "src"),
    "checkout without kernels": (("src/pagewise",), "src"),
    "folder": (("pagewise",), "."),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FOREIGN)
def test_a_package_whose_kernels_are_another_checkouts_is_refused(kind, tmp_path):
    """PYTHONPATH chooses the package, and an editable install the kernels. Changed kernels would never run."""
    folders, way = FOREIGN[kind]
    for folder in folders:
        source = ROOT / ("kernels" if folder == "kernels" else "src/pagewise")
        shutil.copytree(source, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "sitecustomize.py").write_text(EDITABLE.format(root=str(ROOT)))
    path = os.pathsep.join(map(str, (tmp_path / way, tmp_path, ROOT / "src")))  # cudascope comes from the last
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", "import pagewise"], env=environment, capture_output=True, text=True)
    assert "ImportError: pagewise comes from" in done.stderr
    assert str(ROOT / "kernels") in done.stderr
    assert "install this checkout" in done.stderr


def test_the_changelog_begins_with_the_version_of_the_package():
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert released[0] == pagewise.__version__
    assert len(released) == len(set(released))


@pytest.mark.slow
@pytest.mark.skipif(not is_full(), reason="takes as long as 70 other tests: make test-full")
def test_tests_are_collected_without_what_only_lessons_and_the_book_need():
    """As on a machine with a GPU whose packages are fixed."""
    missing = ("nbformat", "nbclient", "nbval", "IPython", "sphinx", "myst_nb", "beartype")
    block = f"import sys, pytest; sys.modules.update(dict.fromkeys({missing})); "
    collect = "sys.exit(pytest.main(['--collect-only', '-q', '--assert=plain', '-p', 'no:cacheprovider']))"
    told = run(sys.executable, "-c", block + collect, cwd=ROOT, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert "tests collected" in told.splitlines()[-1]


# ------------------------------------------------------------------------------------------------ the wheel


@pytest.mark.slow
def test_the_wheels_have_every_file_of_the_sources(wheels):
    expected = {
        "/".join([package.replace(".", "/"), *file.relative_to(folder).parts])
        for package, folder in SOURCES.items()
        for file in below(folder, "*")
        if file.is_file() and file.name != "pyproject.toml"
    }
    some = {f"cudascope/cpu/{name}" for name in ("runtime/runtime.cpp", "runtime/block.h", "include/nv/target")}
    some |= {"pagewise/kernels/paged_attention.cu", "cudascope/toolchain/include/stdint.h", "pagewise/options.py"}
    some |= {"pagewise/models/tiny/config.json", "pagewise/models/tiny/model.safetensors"}
    assert some <= expected
    assert expected - set.union(*map(names_in, wheels.values())) == set()


@pytest.mark.slow
@each_distribution
def test_a_wheel_has_nothing_but_its_package_and_the_names_of_distribution_and_version(package, wheels):
    assert {name.split("/")[0] for name in names_in(wheels[package])} == {package, f"{INFO[package]}.dist-info"}


# `make environment` installs this checkout to be edited, so all other tests run from such an installation.
@pytest.mark.slow
@needs_interpreter
@pytest.mark.parametrize("kind", ["wheel", "editable"] if is_full() else ["wheel"])
def test_an_installation_without_network_works_and_uses_its_own_files(kind, checkout, venv, tmp_path, request):
    what, home = [word for folder in FOLDERS.values() for word in ("-e", checkout / folder)], checkout
    if kind == "wheel":
        what, home = request.getfixturevalue("wheels").values(), tmp_path / "venv"
    # --ignore-installed: the pagewise of the surrounding environment is neither looked at nor touched
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed", "--no-compile"]
    run(venv, "-m", "pip", "install", *options, *what, cwd=tmp_path)
    files = run(venv, "-c", TRY_IT, cwd=tmp_path).split()
    assert len(files) > 8
    assert [file for file in files if not Path(file).is_relative_to(home)] == []
