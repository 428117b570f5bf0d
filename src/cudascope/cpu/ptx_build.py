"""Compiles the C++ of a PTX kernel. The build to observe and to check differs by a hook before each access."""

from pathlib import Path

from cudascope.cpu.build import (
    COMMON_FLAGS,
    GCC_FLAGS,
    compile_library,
    runtime,
    runtime_built_meanwhile,
)
from cudascope.cpu.library import Library, load
from cudascope.cpu.own_sources import own_sources
from cudascope.toolchain.cache import cache_dir, digest
from cudascope.toolchain.compiler import find_compiler
from cudascope.toolchain.headers import HEADERS, header_folder, nvidia_headers


def build_entry(text: str, filename: str, *, instrumented: bool) -> Library:
    """Return the compiled kernel, from the cache or from the compiler."""
    compiler, identity = find_compiler()
    flags = [flag for flag in COMMON_FLAGS if "sanitize" not in flag]
    flags += ["-O1", "-DSIMT_PTX", *["-DSIMT_INSTRUMENTED"] * instrumented]
    flags += ["-Wno-everything"] if "clang" in compiler[0] else GCC_FLAGS
    flags += [f"-I{folder}" for folder in (header_folder(), HEADERS, nvidia_headers())]
    key = digest(text, *flags, identity, own_sources())
    path = cache_dir() / f"{Path(filename).stem}-{key}{'-instrumented' if instrumented else ''}.so"
    if not path.exists():
        with runtime_built_meanwhile():
            compile_library(text, flags, path, gaps=instrumented)
    runtime()
    return load(path, filename)
