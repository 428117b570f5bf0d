"""The rooms of cudascope, which are its folders and its single modules, and the imports between them.

    python tests/rooms.py [FOLDER [OPEN ...]]     prints rooms, floors and arrows of a package. The modules of the
                                                  folders OPEN count as rooms of their own.

An arrow leads from a room to another room that it imports. A room that imports no other is on floor 1, and each other
room is one floor above the highest room that it imports.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

CUDASCOPE = Path(__file__).parents[1] / "src" / "cudascope"
# From the lowest to the highest. A room imports only rooms before it. "" is the package's own __init__.py.
ORDER = ["gpus", "cpp", "arguments", "toolchain", "ptx", "translate", "cpu", "watch", "kernels", "triton", "command"]
ORDER += ["pytest", "", "__main__"]


def arrows(package: Path = CUDASCOPE, opened: tuple[str, ...] = ()) -> dict[str, dict[str, list[str]]]:
    """Return {room: {room that it imports: the modules that import it}}. Imports inside of functions count."""
    modules = {}
    for file in package.rglob("*.py"):
        if "build" in file.relative_to(package).parts:  # pip's copy of the package
            continue
        modules[".".join(file.relative_to(package).with_suffix("").parts).removesuffix("__init__").rstrip(".")] = file
    found = {_room(module, opened): {} for module in modules}
    for module, file in sorted(modules.items()):
        room = _room(module, opened)
        for name in _imported(file, package.name):
            other = _room(name if name in modules else name.rpartition(".")[0], opened)
            if other != room:
                found[room].setdefault(other, []).append(module)
    return found


def _room(module: str, opened: tuple[str, ...]) -> str:
    """Return the room of a module: the one of "cpu.build" is "cpu", unless "cpu" is opened."""
    folders = [folder for folder in opened if module.startswith(f"{folder}.")]
    folder = max(folders, key=len, default="")
    first = module.removeprefix(folder).lstrip(".").partition(".")[0]
    return f"{folder}.{first}" if folder else first


def _imported(file: Path, package: str) -> Iterator[str]:
    """The modules and names that a file imports from its package, as "cpu.build" and "cpu.build.build"."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from (name.removeprefix(f"{package}.") for name in names if name.startswith(f"{package}."))


def floors(graph: dict[str, dict[str, list[str]]]) -> dict[str, int]:
    """Return the floor of each room. An import that closes a circle does not count."""
    known = {}

    def floor(room: str, above: set[str]) -> int:
        if room not in known:
            below = [floor(other, {*above, room}) for other in graph[room] if other not in above]
            known[room] = 1 + max(below, default=0)
        return known[room]

    return {room: floor(room, {room}) for room in sorted(graph)}


def main(folder: str | Path = CUDASCOPE, *opened: str) -> None:
    graph = arrows(Path(folder).resolve(), opened)
    floor = floors(graph)
    for room in sorted(graph, key=lambda room: (-floor[room], room)):
        below = ", ".join(sorted(other or "__init__" for other in graph[room]))
        print(f"{floor[room]:3}  {room or '__init__':24} {below}")
    print(f"{len(graph)} rooms on {max(floor.values())} floors with {sum(map(len, graph.values()))} arrows")


if __name__ == "__main__":
    main(*sys.argv[1:])
