"""Files and modules that cudascope's comments and docstrings name: each of them exists."""

import ast
import importlib
import io
import re
import tokenize
from pathlib import Path

import pytest

import cudascope
from conftest import ROOT
from cudascope.cpp.source import OF_TORCH
from cudascope.toolchain.headers import nvidia_headers

FOLDER = Path(cudascope.__file__).parent
FILE = re.compile(r"(?<![\w/.<])(?:[\w-]+/)*[\w-]+\.(?:py|h|hpp|cuh|cpp|md|toml)\b")
MODULE = re.compile(r"\bcudascope(?:\.\w+)+")


def comments_of_python(text: str) -> str:
    tree = ast.parse(text)
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, holders)]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return "\n".join([*docstrings, *(token.string for token in tokens if token.type == tokenize.COMMENT)])


def comments_of_cpp(text: str) -> str:
    return "\n".join(re.findall(r"//.*|/\*[\s\S]*?\*/", text))


def named(file: Path, text: str) -> set[str]:
    """The files and the modules that the comments of a file name."""
    comments = comments_of_python(text) if file.suffix == ".py" else comments_of_cpp(text)
    return {*FILE.findall(comments), *MODULE.findall(comments)}


def exists(name: str, files: set[str]) -> bool:
    if name.startswith("cudascope."):
        module, *parts = cudascope, *name.split(".")[1:]
        for part in parts:
            try:
                module = getattr(module, part, None) or importlib.import_module(f"{module.__name__}.{part}")
            except (ImportError, AttributeError):
                return False
        return True
    return bool(OF_TORCH.match(name)) or any(f"/{file}".endswith(f"/{name}") for file in files)


def files_there() -> set[str]:
    ours = [path for folder in (FOLDER, ROOT / "tests" / "cudascope") for path in folder.rglob("*.*")]
    ours += [ROOT / name for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md")]
    return {path.relative_to(ROOT).as_posix() for path in ours} | {
        path.relative_to(nvidia_headers()).as_posix() for path in nvidia_headers().rglob("*.h*")
    }


@pytest.mark.parametrize(
    ("suffix", "text", "names"),
    [
        (
            ".py",
            'def f():\n    """As in simt_launch.h."""\n    return "none.h"  # cuda/limits.py',
            ["simt_launch.h", "cuda/limits.py"],
        ),
        (
            ".h",
            '// DESIGN.md\n#include "none.h"\n/* in\n   cudascope.none.contexts */',
            ["DESIGN.md", "cudascope.none.contexts"],
        ),
        (".py", "# cudascope.watch.contexts and watch/report.py", ["cudascope.watch.contexts", "watch/report.py"]),
    ],
)
def test_names_are_found_in_comments_alone_and_missing_ones_are_told(suffix, text, names):
    found = named(Path(f"file{suffix}"), text)
    assert found == set(names)
    assert all(exists(name, files_there()) == ("watch" in name) for name in found)


@pytest.mark.slow
def test_every_file_and_module_that_a_comment_names_exists():
    there = files_there()
    sources = [
        path for path in FOLDER.rglob("*") if path.is_file() and path.suffix in (".py", ".h", ".cpp", ".cuh", "")
    ]
    sources.append(ROOT / "tests" / "test_house.py")
    missing = {
        f"{path.relative_to(ROOT)} names {name}"
        for path in sources
        for name in named(path, path.read_text(encoding="utf-8"))
        if not exists(name, there)
    }
    assert not missing, "\n".join(sorted(missing))
