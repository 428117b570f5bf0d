"""The house (DESIGN: imports point one way), held against the code itself: Python imports, C++ includes, names."""

import ast
import re

import pytest
import torch

from conftest import ROOT

SOURCES = {"pagewise": ROOT / "src" / "pagewise", "pagewise.kernels": ROOT / "kernels"}

# The ideas in the order of the lessons: a later one may import an earlier one, never the reverse.
IDEAS = [
    "naive_attention", "kv_cache", "online_softmax", "paged_blocks", "paged_attention", "flash_attention",
    "flash_decoding", "flash_decoding_plus_plus", "engine", "context_parallel",
]  # fmt: skip
BELOW_IDEAS = {"options", "cuda", "kernels", "models", "tools"}
# What each room may import besides itself.
MAY_IMPORT = {
    "tools": set(),
    "cuda": set(),
    "kernels": set(),
    "models": {"tools"},
    "options": {"tools"},
    "figures": {"tools"},
    **{idea: BELOW_IDEAS | set(IDEAS[:i]) for i, idea in enumerate(IDEAS)},
    "experiments": BELOW_IDEAS | set(IDEAS) | {"figures"},
    "exercises": BELOW_IDEAS | set(IDEAS),
}


def modules():
    """{dotted name: file} of the whole package."""
    found = {}
    for package, folder in SOURCES.items():
        for file in folder.rglob("*.py"):
            parts = file.relative_to(folder).with_suffix("").parts
            found[".".join([package, *(part for part in parts if part != "__init__")])] = file
    return found


MODULES = modules()


def imports(file, *, at_import_time=False):
    """The modules of pagewise that a file imports, inside of functions too unless only import time counts."""
    tree = ast.parse(file.read_text())
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
    return {name for name in found if name.split(".")[0] == "pagewise"}


def room(module):
    """The room of a module: "pagewise.paged_blocks.manager" is in "paged_blocks"."""
    return module.split(".")[1] if "." in module else ""


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


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_one_way(module):
    here = room(module)
    if here == "":  # pagewise itself settles how Triton runs, and is light
        assert {room(name) for name in imports(MODULES[module])} == {"tools"}
        return
    assert here in MAY_IMPORT, f"{module}: a room without rules; add it to MAY_IMPORT"
    foreign = {name for name in imports(MODULES[module]) if room(name) not in MAY_IMPORT[here] | {here}}
    assert foreign == set()


def test_no_module_imports_itself_in_a_circle():
    # the face of a package imports its modules, and they never import the face
    graph = {name: imports(file, at_import_time=True) - {name} for name, file in MODULES.items()}
    assert len(graph) > 40
    assert cycle(graph) is None


def test_the_runner_knows_nothing_of_the_course():
    wing = [file for name, file in MODULES.items() if room(name) == "cuda"]
    assert len(wing) > 8
    for file in wing:
        assert not re.search(r"pagewise[./](?!cuda\b)\w", file.read_text().replace("pagewise[cuda]", "")), file


def device_files(*endings):
    found = [file for folder in SOURCES.values() for ending in endings for file in folder.rglob(f"*{ending}")]
    return [file for file in found if "__pycache__" not in file.parts]


def test_no_header_includes_itself_in_a_circle():
    files = device_files(".h", ".hpp", ".cpp", ".cu")
    assert len(files) > 5
    by_name = {}
    for file in files:
        by_name.setdefault(file.name, []).append(file)
    graph = {}
    for file in files:
        included = re.findall(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', file.read_text(), re.MULTILINE)
        beside = [(file.parent / name).resolve() for name in included]
        graph[str(file)] = {str(path) for path in beside if path.is_file()}
    assert any(graph.values())
    assert cycle(graph) is None


def test_one_idea_one_name():
    """A lesson, its module, its kernel and its tests have one name."""
    for lesson in sorted((ROOT / "lessons").glob("[0-9]*.ipynb")):
        idea = lesson.stem[3:]
        assert idea in IDEAS, f"{lesson.name}: no such idea"
        assert f"pagewise.{idea}" in MODULES
        assert (ROOT / "tests" / idea).is_dir() or (ROOT / "tests" / f"test_{idea}.py").is_file()
    shared = {"partial", "float8", "scores"}
    kernels = {file.stem for ending in ("cu", "py") for file in SOURCES["pagewise.kernels"].glob(f"[!_]*.{ending}")}
    of_ideas = {name for name in kernels for idea in IDEAS if name == idea or name.startswith(f"{idea}_")}
    assert kernels - of_ideas - shared - {"flat_gemm"} == set()


def test_modules_read_in_one_sitting():
    long = {name: lines for name, file in MODULES.items() if (lines := file.read_text().count("\n")) > 275}  # about 250
    assert long == {}


def test_shape_annotations_are_checked_in_every_room():
    """The import hook of conftest reaches modules inside packages too."""
    from jaxtyping import TypeCheckError

    from pagewise.naive_attention import safe_softmax
    from pagewise.paged_attention.splits import num_splits_heuristic
    from pagewise.paged_blocks.write import to_float8

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
