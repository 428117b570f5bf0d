"""Compiles the C++ of a PTX kernel. The build to observe and to check differs by a hook before each access."""

import os
import tempfile
from pathlib import Path

from cudascope.cpp.source import Source
from cudascope.cpu.build import (
    COMMON_FLAGS,
    GCC_FLAGS,
    build_key,
    compile_library,
    runtime,
    runtime_built_meanwhile,
)
from cudascope.cpu.library import Library, load
from cudascope.toolchain.cache import UNFINISHED, cache_dir, code_of, digest, prune_at_times, used
from cudascope.toolchain.compiler import find_compiler
from cudascope.toolchain.headers import HEADERS, header_folder, nvidia_headers


def build_entry(text: str, filename: str, *, instrumented: bool) -> Library:
    """Return the compiled kernel, from the cache or from the compiler."""
    compiler, _ = find_compiler()
    flags = [flag for flag in COMMON_FLAGS if "sanitize" not in flag]
    flags += ["-O1", "-DSIMT_PTX", *["-DSIMT_INSTRUMENTED"] * instrumented]
    flags += ["-Wno-everything"] if "clang" in compiler[0] else GCC_FLAGS
    flags += [f"-I{folder}" for folder in (header_folder(), HEADERS, nvidia_headers())]
    key = digest(text, *flags, *build_key(), code_of(__name__))
    path = cache_dir() / f"{Path(filename).stem}-{key}{'-instrumented' if instrumented else ''}.so"
    if not path.exists():
        with runtime_built_meanwhile(), tempfile.TemporaryDirectory(dir=cache_dir(), prefix=UNFINISHED) as folder:
            made = Path(folder, "kernel.so")
            compile_library(text, flags, made, Source(text, filename, Path(folder), (), ()), gaps=instrumented)
            os.replace(made, path)
        prune_at_times()
    runtime()
    return load(used(path), filename, Path())
