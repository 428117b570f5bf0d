"""A library in the cache, and the files that its compilation opened.

All that is known before the compilation is in a library's key. The compiler may open more files than the text tells, as
for `#include NAME(x)`, and it may lack a header that is installed later. Both are listed under the key, and their
content is in the library's own name. So a library is found only while these files are as they were.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cudascope.toolchain.cache import cache_dir, digest, prune_at_times, publish, used
from cudascope.toolchain.headers import nvidia_headers

_OF_SYSTEM = (Path("/usr/local/include"), Path("/usr/include"))  # where a missing header may appear


class Kept(NamedTuple):
    """The place of a library in the cache."""

    stem: str
    key: str

    def found(self) -> tuple[Path, list[str]] | None:
        """Return the library and the user's files that it was made of, if it is there and they are as they were."""
        try:
            opened, missing = json.loads(self._list.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):  # not built yet, or not whole
            return None
        library = self._library(opened, missing)
        if not library.exists():
            return None
        used(self._list)
        return used(library), opened

    def keep(self, made: Path, opened: Sequence[str], missing: Sequence[str]) -> None:
        """Keep the library `made`, for which the compiler opened the user's files `opened` and lacked `missing`."""
        os.replace(made, self._library(opened, missing))
        publish(self._list, json.dumps([list(opened), list(missing)]).encode())
        prune_at_times()

    @property
    def _list(self) -> Path:
        return cache_dir() / f"{self.key}.files"

    def _library(self, opened: Sequence[str], missing: Sequence[str]) -> Path:
        paths = [*map(Path, opened), *(folder / name for name in missing for folder in (*_OF_SYSTEM, nvidia_headers()))]
        states = [part for path in paths for part in _state(path)]
        return cache_dir() / f"{self.stem}-{digest(self.key, *states)}.so"


def _state(path: Path) -> tuple[str, str, bytes]:
    return str(path), str(path.is_file()), path.read_bytes() if path.is_file() else b""
