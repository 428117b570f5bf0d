"""A library in the cache, and the files that its compilation opened.

All that is known before the compilation is in a library's key. The compiler may open more files than the text tells, as
for `#include NAME(x)`, and it may look for files that are not there yet. Both are listed under the key, and their
content is in the library's own name. So a library is found only while these files are as they were.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cudascope.toolchain.cache import cache_dir, digest, prune_at_times, publish, used


class Kept(NamedTuple):
    """The place of a library in the cache."""

    stem: str
    key: str

    def found(self) -> tuple[Path, list[str]] | None:
        """Return the library and the user's files that it was made of, if it is there and they are as they were."""
        try:
            opened, absent = json.loads(self._list.read_text(encoding="utf-8"))
        except (FileNotFoundError, TypeError, ValueError):  # not built yet, or not whole
            return None
        library = self._library([*opened, *absent])
        if not library.exists():
            return None
        used(self._list)
        return used(library), opened

    def keep(self, made: Path, opened: Sequence[str], absent: Sequence[str]) -> None:
        """Keep the library `made`.

        For it the compiler opened the user's files `opened`. It would have opened one of `absent`, were it there.
        """
        os.replace(made, self._library([*opened, *absent]))
        publish(self._list, json.dumps([list(opened), list(absent)]).encode())
        prune_at_times()

    @property
    def _list(self) -> Path:
        return cache_dir() / f"{self.key}.files"

    def _library(self, files: Sequence[str]) -> Path:
        states = [part for file in files for part in _state(Path(file))]
        return cache_dir() / f"{self.stem}-{digest(self.key, *states)}.so"


def _state(path: Path) -> tuple[str, str, bytes]:
    return str(path), str(path.is_file()), path.read_bytes() if path.is_file() else b""
