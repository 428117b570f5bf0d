"""The files of cudascope that decide the result of a compilation."""

import functools
from pathlib import Path

from cudascope.build import STAND_INS, digest
from cudascope.simt.library import RUNTIME

_TRANSLATORS = (
    "assembly.py",
    "build.py",
    "machine.py",
    "translation.py",
    "preprocess.py",
    "missing.py",
    "shifts.py",
    "../build.py",
    "../conditions.py",
    "../device_code.py",
    "../file.py",
    "../outline.py",
    "../statements.py",
    "../tokens.py",
    "../variables.py",
)


@functools.cache
def own_sources() -> str:
    """Return a digest of these files, for the name of a compiled file in the cache."""
    here = Path(__file__).parent
    translators = [*_TRANSLATORS, *here.glob("ptx/*.py")]
    files = sorted(
        path
        for path in (*RUNTIME.rglob("*"), *STAND_INS.rglob("*"), *(here / name for name in translators))
        if path.is_file()
    )
    return digest(*(path.read_text(encoding="utf-8") for path in files))
