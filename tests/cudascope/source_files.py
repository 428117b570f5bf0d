"""The sources of tests as files: the kernels of a file are compiled together, and those of a text one by one."""

from pathlib import Path

from cudascope.toolchain.cache import cache_dir, digest, publish


def file_of(source: str) -> Path:
    """Return a file with this text. It has the same path in every session, so its build is found again."""
    path = cache_dir() / "sources" / f"{digest(source)}.cu"
    if not path.exists():
        publish(path, source.encode())
    return path
