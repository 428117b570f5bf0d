"""The files of cudascope that decide the result of a compilation."""

import functools
from pathlib import Path

from cudascope.toolchain.cache import digest
from cudascope.toolchain.headers import HEADERS, RUNTIME, STAND_INS

_TRANSLATORS = (
    "cpp/conditions.py",
    "cpp/constants.py",
    "cpp/definitions.py",
    "cpp/device_code.py",
    "cpp/file.py",
    "cpp/outline.py",
    "cpp/source.py",
    "cpp/statements.py",
    "cpp/tokens.py",
    "cpp/types.py",
    "cpp/variables.py",
    "cpu/build.py",
    "cpu/ptx_build.py",
    "toolchain/cache.py",
    "toolchain/headers.py",
    "toolchain/machine.py",
    "translate/assembly.py",
    "translate/cuda.py",
    "translate/entry_points.py",
    "translate/missing.py",
    "translate/preprocess.py",
    "translate/shifts.py",
)


@functools.cache
def own_sources() -> str:
    """Return a digest of these files, for the name of a compiled file in the cache."""
    here = Path(__file__).parents[1]
    translators = [*_TRANSLATORS, *here.glob("translate/ptx/*.py")]
    files = sorted(
        path
        for path in (
            *RUNTIME.rglob("*"),
            *HEADERS.rglob("*"),
            *STAND_INS.rglob("*"),
            *(here / name for name in translators),
        )
        if path.is_file()
    )
    return digest(*(path.read_text(encoding="utf-8") for path in files))
