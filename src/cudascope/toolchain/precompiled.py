"""simt.h, precompiled once for all kernels. A compiler that finds this file is done five times sooner.

Making the file takes as long as four builds and needs 50 MB, so the first build does without it. g++ looks for the file
beside the header. It reads the header itself if the file was made with other flags.
"""

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from cudascope.cpp.source import CompileError, Source
from cudascope.toolchain.cache import UNFINISHED, cache_dir, digest, publish, used
from cudascope.toolchain.compiler import find_compiler, run_compiler
from cudascope.toolchain.headers import HEADERS, nvidia_headers, nvidia_version, our_headers

_REFUSED = 24 * 3600  # seconds after which a compiler that did not manage is asked again

# The word std, or a header that may need more of the standard library than these do.
_STD = re.compile(
    r"\bstd\b|^[ \t]*#[ \t]*include\b"
    r'(?![ \t]*[<"](?:cooperative_groups|cuda_(?:bf16|fp16|fp8|runtime)|float|math|mma|stdint|stdio)\.h[>"])',
    re.MULTILINE,
)


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
    parts = (identity, str(HEADERS), *flags, our_headers(), nvidia_version())
    folder = cache_dir() / f"precompiled-{digest(*parts)}"
    made = folder / plain.name
    if made.with_suffix(".h.gch").exists():
        used(folder)
        return made
    try:
        folder.mkdir()
        return plain  # the first build
    except FileExistsError:
        pass
    with contextlib.suppress(FileNotFoundError):
        if time.time() - (folder / "refused").stat().st_mtime < _REFUSED:
            return plain
    import fcntl  # Windows does not have it, and has no compiler that gets here

    try:
        with open(folder / "lock", "wb") as lock:  # the lock of a process that is killed ends with it
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not made.with_suffix(".h.gch").exists():
                publish(made, f'#include "{plain}"\n'.encode())
                with tempfile.TemporaryDirectory(dir=cache_dir(), prefix=UNFINISHED) as beside:
                    run_compiler([*compiler, *flags, "-x", "c++-header", str(made), "-o", f"{beside}/made"])
                    os.replace(f"{beside}/made", made.with_suffix(".h.gch"))
    except CompileError:
        (folder / "refused").touch()
        return plain
    except OSError:  # another process is at it, or it cannot be written
        return plain
    return made
