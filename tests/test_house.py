"""The layers of the package, checked on the code itself: imports, C++ includes, names, sizes of kernels.

CONTRIBUTING.md, "The layout": imports follow the order of the lessons, in src/ and in kernels/.
"""

import ast
import functools
import re

import pytest
import rooms
import torch

from conftest import ROOT
from cudascope.toolchain import headers
from pagewise import models
from pagewise.engine import config

SOURCES = {
    "cudascope": ROOT / "src" / "cudascope",
    "pagewise": ROOT / "src" / "pagewise",
    "pagewise.kernels": ROOT / "kernels",
}
SCRIPTS = {"repository": ROOT / "src" / "repository"}  # for this checkout only: no distribution has them

# The ideas in the order of the lessons: a later one may import an earlier one, never the reverse.
IDEAS = [
    "naive_attention",
    "kv_cache",
    "online_softmax",
    "paged_blocks",
    "paged_attention",
    "flash_attention",
    "flash_decoding",
    "flash_decoding_plus_plus",
    "paged_attention_varlen",
    "distributed",  # lesson 10; the engine of lesson 9 imports its tensor parallelism
    "engine",
]
BELOW_IDEAS = {"cudascope", "options", "kernels", "models", "tools"}
# Device functions that kernels of several ideas share, and the idea that introduces them. Later ideas may use them too.
SHARED = {
    "partial": "online_softmax",
    "float8": "paged_blocks",
    "scores": "paged_attention",
    "decode": "paged_attention",
    "arguments": "paged_attention",
    "work_plan": "paged_attention",
}
OTHER_NAMES = {"flat_gemm": "flash_decoding_plus_plus"}  # kernel files without the name of their idea
INCLUDED = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
# The packages that each package may import besides itself.
MAY_IMPORT = {
    "tools": {"cudascope"},
    "cudascope": set(),
    "kernels": set(),
    "models": {"kernels", "tools"},
    "options": {"tools"},
    "figures": {"tools"},
    **{idea: BELOW_IDEAS | set(IDEAS[:i]) for i, idea in enumerate(IDEAS)},
    "experiments": BELOW_IDEAS | set(IDEAS) | {"figures"},
    "exercises": BELOW_IDEAS | set(IDEAS),
    "repository": {"cudascope", "tools", "exercises", "experiments"},
}


# {dotted name: file} of all packages and scripts. pip leaves copies in a folder called build.
MODULES = {
    ".".join([package, *file.relative_to(folder).with_suffix("").parts]).removesuffix(".__init__"): file
    for package, folder in (SOURCES | SCRIPTS).items()
    for file in folder.rglob("*.py")
    if "build" not in file.relative_to(folder).parts
}


@functools.cache
def parsed(file):
    """Return the syntax tree of a file, which several tests look at and none changes."""
    return ast.parse(file.read_text(encoding="utf-8"))


@functools.cache
def imports(file, *, at_import_time=False):
    """The modules of this repository that a file imports, inside of functions too unless only import time counts."""
    tree = parsed(file)
    nodes = tree.body if at_import_time else ast.walk(tree)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            for alias in node.names:  # a name from a module, or a module from a package
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in MODULES else node.module)
    return {name for name in found if name.split(".")[0] in ("cudascope", "pagewise")}


def package_of(module):
    """Return the package of a module: "pagewise.paged_blocks.manager" is in "paged_blocks"."""
    first, _, rest = module.partition(".")
    return rest.split(".")[0] if first == "pagewise" else first


def idea_of_kernel(name):
    """Return the idea that introduces a file of kernels/, given the file's name without its ending."""
    longest_first = sorted(IDEAS, key=len, reverse=True)
    of_name = (idea for idea in longest_first if name == idea or name.startswith(f"{idea}_"))
    return (SHARED | OTHER_NAMES).get(name) or next(of_name, None)


def kernels_too_late(module, imported):
    """Return the modules of kernels/ that a module may not import, because a later lesson introduces them."""
    package = package_of(module)
    name = module.split(".")[-1] if package == "kernels" else package
    idea = idea_of_kernel(name)
    if idea is None:  # tools and experiments, for example: `MAY_IMPORT` has their rules
        return set()
    files = {other.split(".")[2]: other for other in imported if other.startswith("pagewise.kernels.")}
    return {other for file, other in files.items() if IDEAS.index(idea_of_kernel(file)) > IDEAS.index(idea)}


def cycle(graph):
    """Names that lead back to their beginning, or None."""
    done = set()

    def visit(name, path):
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in done:
            for other in sorted(graph.get(name, ())):
                if found := visit(other, [*path, name]):
                    return found
            done.add(name)
        return None

    return next((found for name in sorted(graph) if (found := visit(name, []))), None)


def test_a_circle_is_found():
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}}) is None


@pytest.mark.slow
def test_imports_point_one_way():
    foreign = set()
    for module, file in MODULES.items():
        package, imported = package_of(module), imports(file)
        if package == "":  # pagewise itself chooses how Triton runs, and is quick to import
            assert {package_of(name) for name in imported} == {"tools"}
            continue
        assert package in MAY_IMPORT, f"{module}: a package without rules; add it to MAY_IMPORT"
        foreign |= {(module, name) for name in imported if package_of(name) not in MAY_IMPORT[package] | {package}}
    assert foreign == set()


def test_kernels_are_imported_and_included_in_the_order_of_the_lessons():
    """By other kernels, and by the modules that launch them."""
    imported = {module: imports(file) for module, file in MODULES.items()}
    for file in SOURCES["pagewise.kernels"].glob("*.cu"):
        included = {f"pagewise.kernels.{name.split('.')[0]}" for name in INCLUDED.findall(file.read_text())}
        module = f"pagewise.kernels.{file.stem}"
        imported[module] = imported.get(module, set()) | included
    assert {module: late for module, names in imported.items() if (late := kernels_too_late(module, names))} == {}


def test_a_kernel_that_comes_too_late_is_found():
    def too_late(module, *kernels):
        return kernels_too_late(f"pagewise.{module}", {f"pagewise.kernels.{kernel}" for kernel in kernels})

    assert too_late("kernels.paged_attention", "flash_decoding", "partial") == {"pagewise.kernels.flash_decoding"}
    assert too_late("kernels.partial", "scores") == {"pagewise.kernels.scores"}
    assert too_late("kernels.flash_decoding_plus_plus", "flash_decoding", "scores") == set()
    assert too_late("flash_decoding.work_plan", "flat_gemm") == {"pagewise.kernels.flat_gemm"}
    assert too_late("kv_cache", "float8") == {"pagewise.kernels.float8"}
    assert too_late("experiments.scoreboard", "flat_gemm") == set()


def test_only_three_names_are_imported_before_their_lessons():
    """`importlib` hides an import from the tests above. These are all its uses."""
    used = {}
    for name, file in MODULES.items():
        calls = [node for node in ast.walk(parsed(file)) if isinstance(node, ast.Call)]
        found = [ast.unparse(call.args[0]) for call in calls if "import_module" in ast.unparse(call.func)]
        if found:
            used[name] = found
    assert used == {
        "pagewise.paged_attention": ["'pagewise.paged_attention_varlen'"],
        "pagewise.models": ["_HOME[name]"],
        "pagewise.engine.config": ["module"],
        "pagewise.models.load": ["package"],
    }
    elsewhere = {name for name, home in models._HOME.items() if package_of(home) != "models"}
    assert elsewhere == {"register_attention"}  # its home is in flash_attention
    rivals = {name for name, (module, _) in config.MEMORIES.items() if package_of(module) != "engine"}
    assert rivals == {"dense", "block_tensors"}  # experiments, which LLM(attention=…) finds by name


def engine_modules_below(module):
    """Return the modules of the engine that a module of the engine imports, and those that these import, and so on."""
    found = {module}
    for name in found.copy():
        for other in imports(MODULES[name], at_import_time=True):
            if other.startswith("pagewise.engine.") and other not in found:
                found |= {other, *engine_modules_below(other)}
    return found


def test_the_scheduler_of_the_engine_needs_no_torch():
    below = engine_modules_below("pagewise.engine.scheduler")
    assert {"pagewise.engine.request", "pagewise.engine.memory"} <= below
    using = set()
    for module in below:
        nodes = [node for node in parsed(MODULES[module]).body if not isinstance(node, ast.If)]
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        using |= {module for name in names if name.split(".")[0] in ("torch", "jaxtyping")}
    assert using == set()


def test_no_module_imports_itself_in_a_circle():
    # the __init__ of a package imports its modules, and they never import the package
    graph = {name: imports(file, at_import_time=True) - {name} for name, file in MODULES.items()}
    assert len(graph) > 40
    assert cycle(graph) is None


def test_cudascope_knows_nothing_of_the_course():
    files = [file for name, file in MODULES.items() if package_of(name) == "cudascope"]
    assert len(files) > 20
    for file in files:
        assert "pagewise" not in file.read_text(), file


def upward(package=rooms.CUDASCOPE):
    """The imports of cudascope's rooms that lead to a room that is not below, and the modules with these imports."""
    height = rooms.ORDER.index
    arrows = (
        (room, other, modules) for room, below in rooms.arrows(package).items() for other, modules in below.items()
    )
    return [(room, other, modules) for room, other, modules in arrows if height(other) > height(room)]


@pytest.mark.slow
def test_each_room_of_cudascope_imports_only_rooms_below_it():
    assert sorted(rooms.arrows()) == sorted(rooms.ORDER), "a folder or module without a place in rooms.ORDER"
    assert upward() == []


def test_an_import_that_leads_upwards_is_found(tmp_path):
    package = tmp_path / "cudascope"
    planted = {
        "cpp/source": "import cudascope.toolchain.cache",
        "toolchain/cache": "def f():\n    from cudascope.cpu import build",
        "cpu/build": "from cudascope.cpp.source import Source",
        "watch/report": "from cudascope import check",
    }
    for name, text in planted.items():
        file = package / f"{name}.py"
        file.parent.mkdir(parents=True)
        file.write_text(text)
    assert sorted(upward(package)) == [
        ("cpp", "toolchain", ["cpp.source"]),
        ("toolchain", "cpu", ["toolchain.cache"]),
        ("watch", "", ["watch.report"]),
    ]


@pytest.mark.slow
def test_floors_are_counted_from_the_rooms_without_imports():
    graph = {"a": {"b": [], "c": []}, "b": {"c": []}, "c": {}}
    assert rooms.floors(graph) == {"a": 3, "b": 2, "c": 1}
    assert rooms.floors(rooms.arrows())["cpp"] == 1


def test_pagewise_imports_only_public_names_of_cudascope():
    """A folder's docstring lists them after "Public:", by module and name."""
    hidden = set()
    for module, file in MODULES.items():
        nodes = [node for node in ast.walk(parsed(file)) if isinstance(node, ast.ImportFrom)]
        for node in nodes:
            first, room, *rest = [*(node.module or "").split("."), "", ""]
            if first == "cudascope" and room not in ("", "gpus") and package_of(module) != "cudascope":
                public = ast.get_docstring(parsed(MODULES[f"cudascope.{room}"])).partition("Public:")[2]
                names = {f"{rest[0]}.{alias.name}" for alias in node.names}
                hidden |= {(module, name) for name in names if not re.search(rf"\b{re.escape(name)}\b", public)}
    assert hidden == set()


def test_no_header_includes_itself_in_a_circle():
    endings = {".h", ".hpp", ".cpp", ".cu"}
    files = [file for folder in SOURCES.values() for file in folder.rglob("*.*") if file.suffix in endings]
    assert len(files) > 5
    graph = {}
    for file in files:
        beside = [(file.parent / name).resolve() for name in INCLUDED.findall(file.read_text())]
        graph[str(file)] = {str(path) for path in beside if path.is_file()}
    assert any(graph.values())
    assert cycle(graph) is None


def test_a_header_of_one_line_is_a_row_of_the_table():
    """toolchain/headers.py writes those that only lead to another header, or are empty."""
    folders = (headers.HEADERS, headers.FOR_NVRTC, headers.STAND_INS)
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 50
    lines = {path: [line for line in path.read_text().splitlines() if line != "#pragma once"] for path in files}
    assert [path for path, text in lines.items() if len(text) < 2] == []


def test_one_idea_one_name():
    """A lesson, its module, its kernel and its tests have one name."""
    for lesson in sorted((ROOT / "lessons").glob("[0-9]*.ipynb")):
        idea = lesson.stem[3:].removesuffix("_in_depth")
        assert idea in IDEAS, f"{lesson.name}: no such idea"
        assert f"pagewise.{idea}" in MODULES
        assert (ROOT / "tests" / idea).is_dir() or (ROOT / "tests" / f"test_{idea}.py").is_file()
    kernels = {file.stem for ending in ("cu", "py") for file in SOURCES["pagewise.kernels"].glob(f"[!_]*.{ending}")}
    assert {name for name in kernels if idea_of_kernel(name) is None} == set()


# Parameters, and lines from `def` to the end. First rungs are shown whole in a lesson.
LIMITS = {
    "paged_decode_kernel": (20, 60),
    "flash_forward_kernel": (20, 60),
    "split_decode_kernel": (20, 60),
    "unified_max_kernel": (20, 60),
    "flash_dq_kernel": (20, 40),
    "decode_attention_kernel": (20, None),
    "merge_items_kernel": (20, None),
    "work_plan_kernel": (20, None),
    "flash_attention_kernel": (20, None),
    "flash_attention_backward_kernel": (24, None),
    "unified_max_attention_kernel": (20, None),
    "lazy_rescale_kernel": (20, None),
}


def test_the_ladder_of_kernels_keeps_its_limits():
    trees = [parsed(file) for file in SOURCES["pagewise.kernels"].glob("*.py")]
    functions = {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)}
    too_large = {}
    for name, (most_parameters, most_lines) in LIMITS.items():
        function, arguments = functions[name], functions[name].args
        parameters = len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs)
        lines = function.end_lineno - function.lineno + 1
        if parameters > most_parameters or (most_lines and lines > most_lines):
            too_large[name] = parameters, lines
    assert too_large == {}


def test_the_formatter_lays_out_all_code():
    texts = {name: file.read_text() for name, file in MODULES.items()}
    assert len(texts) > 100
    assert [name for name, text in texts.items() if "fmt: skip" in text or "fmt: off" in text] == []


def test_modules_read_in_one_sitting():
    long = {name: lines for name, file in MODULES.items() if (lines := file.read_text().count("\n")) > 500}
    assert long == {}


def test_shape_annotations_are_checked_in_every_package():
    """The import hook of conftest reaches modules inside packages too."""
    from jaxtyping import TypeCheckError

    from pagewise.naive_attention import safe_softmax
    from pagewise.paged_blocks.write import to_float8
    from pagewise.tools.tuning import num_splits_heuristic

    for call in (
        lambda: safe_softmax("row"),
        lambda: num_splits_heuristic("tiles", 1, 1, 1),
        lambda: to_float8("x", torch.float8_e5m2, 1.0),
    ):
        with pytest.raises(TypeCheckError):
            call()


def test_a_run_that_finds_no_kernels_fails(monkeypatch):
    import conftest

    executed = dict.fromkeys(conftest.all_kernels(), 1)
    monkeypatch.setattr(conftest, "all_executed", lambda: executed)
    assert conftest.missing_kernels() == set()
    monkeypatch.setattr(conftest, "cuda_kernels", set)
    assert conftest.missing_kernels() == {"any in CUDA"}


def test_helpers_of_the_tests_have_different_names():
    """They are imported without their folder: of two with one name, a process knows only the first."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name not in ("__init__.py", "__main__.py")]
    assert sorted(set(names)) == sorted(names)


def test_pre_commit_lints_with_the_pinned_version():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    pinned = re.search(r'"(ruff==[\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]
    assert set(re.findall(r"ruff==[\d.]+", hooks)) == {pinned}


def test_actions_are_named_by_their_commits():
    """A tag can be moved, and a commit cannot."""
    files = [path for folder in ("workflows", "actions") for path in (ROOT / ".github" / folder).rglob("*.yml")]
    used = [name for path in files for name in re.findall(r"uses: (\S+)", path.read_text()) if name[:2] != "./"]
    assert len(used) > 5
    assert [name for name in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", name)] == []
