"""A stand-in for macOS: in this process Triton and NVIDIA's packages cannot be found, and no CUDA kernel is compiled.

Import it before torch. Everything else is this machine's, so it does not show what macOS itself lacks.
"""

import sys
from importlib.machinery import ModuleSpec, PathFinder

HIDDEN = ("triton", "cuda", "nvidia")


class Without(PathFinder):
    """Finds what Python finds, without the hidden packages."""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return None if name.partition(".")[0] in HIDDEN else super().find_spec(name, path, target)


def hide() -> None:
    """Hide the packages from now on."""
    assert not set(HIDDEN) & sys.modules.keys()
    sys.meta_path[sys.meta_path.index(PathFinder)] = Without


def pretend_macos() -> None:
    """Let cudascope refuse to compile, and a scoreboard leave the row out, as they do on macOS."""
    from cudascope.toolchain import compiler
    from pagewise.experiments import scoreboard

    compiler.sys = scoreboard.sys = type("sys", (), {"platform": "darwin"})
