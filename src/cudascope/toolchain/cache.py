"""The cache of compiled kernels: its folder, the names in it, and how a finished build is published.

A build is found again by a digest of everything that went into it, so a changed header or option is a new build and
nothing is ever invalidated.
"""

import hashlib
import os
import tempfile
from pathlib import Path

from cudascope.cpp.source import CompileError


def cache_dir() -> Path:
    """Where compiled kernels are kept: $CUDASCOPE_CACHE, or ~/.cache/cudascope.

    Raises:
        CompileError: this folder cannot be written.
    """
    path = Path(os.environ.get("CUDASCOPE_CACHE") or "~/.cache/cudascope")
    try:
        path = path.expanduser().absolute()
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError("permission denied")
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        why = getattr(error, "strerror", None) or error
        raise CompileError(f"CUDASCOPE_CACHE: {path} cannot be written: {why}; set it to a folder that can") from error
    return path


def digest(*parts: str | bytes) -> str:
    """A name for a build: SHA-256 over the parts, each preceded by its length so that none runs into the next."""
    state = hashlib.sha256()
    for part in parts:
        encoded = part.encode(errors="surrogateescape") if isinstance(part, str) else part
        state.update(len(encoded).to_bytes(8, "little") + encoded)
    return state.hexdigest()[:32]


def publish(path: Path, content: bytes) -> None:
    """Write `path` so that another process sees nothing or the whole file. The last writer wins; all write the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(unfinished, path)
    except BaseException:
        Path(unfinished).unlink(missing_ok=True)
        raise
