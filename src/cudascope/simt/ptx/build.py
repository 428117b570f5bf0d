"""Compiles the C++ of a PTX kernel. The build to observe and to check differs by a hook before each access."""

import os
import tempfile
from pathlib import Path

from cudascope.build import cache_dir, digest, nvidia_headers
from cudascope.simt.assembly import changed
from cudascope.simt.build import COMMON_FLAGS, GCC_FLAGS, _header_folder, _own_sources, runtime
from cudascope.simt.compiler import BYTES, find_compiler, run_compiler
from cudascope.simt.library import HEADERS, Library, load
from cudascope.simt.precompiled import precompiled


def build_entry(text: str, filename: str, *, instrumented: bool) -> Library:
    """Return the compiled kernel, from the cache or from the compiler."""
    compiler, identity = find_compiler()
    flags = [flag for flag in COMMON_FLAGS if "sanitize" not in flag]
    flags += ["-O1", "-DSIMT_PTX", *["-DSIMT_INSTRUMENTED"] * instrumented]
    flags += ["-Wno-everything"] if "clang" in compiler[0] else GCC_FLAGS
    flags += [f"-I{folder}" for folder in (_header_folder(), HEADERS, nvidia_headers())]
    key = digest(text, *flags, identity, _own_sources())
    path = cache_dir() / f"{Path(filename).stem}-{key}{'-instrumented' if instrumented else ''}.so"
    if not path.exists():
        command = [*compiler, *flags, "-include", str(precompiled(flags))]
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            assembly, library = Path(folder, "kernel.s"), f"{folder}/kernel.so"
            run_compiler([*command, "-S", "-x", "c++", "-", "-o", str(assembly)], text)
            assembly.write_text(changed(assembly.read_text(**BYTES), gaps=instrumented), **BYTES)
            run_compiler([*compiler, "-shared", str(assembly), "-o", library, "-pthread", "-ldl"])
            os.replace(library, path)
    runtime()
    return load(path, filename)
