"""simt.h, read once for all kernels: a compiler that finds it precompiled is done five times sooner.

It takes as long as four builds and 50 MB, so the first build goes without. g++ looks beside a header for what is
precompiled of it, and reads the header itself where that does not fit its flags.
"""

import functools
import os
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from cudascope.cpp.source import CompileError, Source
from cudascope.toolchain.cache import cache_dir, digest
from cudascope.toolchain.compiler import find_compiler, run_compiler
from cudascope.toolchain.headers import HEADERS, nvidia_headers

_KEPT = 24 * 3600  # seconds that one may lie unused

# The word std, or a header that may need more of the standard library than these do.
_STD = re.compile(
    r"\bstd\b|^[ \t]*#[ \t]*include\b"
    r'(?![ \t]*[<"](?:cooperative_groups|cuda_(?:bf16|fp16|fp8|runtime)|float|math|mma|stdint|stdio)\.h[>"])',
    re.MULTILINE,
)


@functools.cache
def _headers() -> str:
    return digest(*(path.read_text(encoding="utf-8") for path in sorted(HEADERS.rglob("*")) if path.is_file()))


def without_std(source: Source) -> list[str]:
    """Return a flag if `source` does without <iostream>, <string> and <chrono>: simt.h is a third smaller then."""
    uses_std = any(_STD.search(text) for text in (source.text, *source.defines, *source.options))
    return [] if uses_std else ["-DSIMT_WITHOUT_STD"]


def precompiled(flags: Sequence[str]) -> Path:
    """Where to include simt.h from, with these flags."""
    plain = HEADERS / "simt.h"
    compiler, identity = find_compiler()
    if "clang" in compiler[0]:
        return plain
    # the user's definitions and folders do not change it
    folders = tuple(f"-I{folder}" for folder in (HEADERS, cache_dir() / "headers-", nvidia_headers()))
    flags = [flag for flag in flags if flag[:2] not in ("-D", "-I") or flag.startswith(("-DSIMT", *folders))]
    folder = cache_dir() / f"precompiled-{digest(identity, str(HEADERS), *flags, _headers())}"
    made = folder / plain.name
    if made.with_suffix(".h.gch").exists():
        os.utime(folder)
        return made
    try:
        folder.mkdir()
        return plain  # the first build
    except FileExistsError:
        pass
    try:
        (folder / "begun").touch(exist_ok=False)
    except OSError:
        return plain  # another process is at it
    try:
        with tempfile.TemporaryDirectory(dir=cache_dir()) as beside:
            made.write_text(f'#include "{plain}"\n', encoding="utf-8")
            run_compiler([*compiler, *flags, "-x", "c++-header", str(made), "-o", f"{beside}/made"])
            os.replace(f"{beside}/made", made.with_suffix(".h.gch"))
    except (CompileError, OSError):
        return plain
    _forget_unused()
    return made


def _forget_unused() -> None:
    for folder in cache_dir().glob("precompiled-*"):
        if time.time() - folder.stat().st_mtime > _KEPT:
            shutil.rmtree(folder, ignore_errors=True)
