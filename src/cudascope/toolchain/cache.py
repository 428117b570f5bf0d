"""The cache of compiled kernels: its folder, the names in it, and how a finished build is published.

A build is found again by a digest of everything that went into it, so a changed header or option is a new build and
nothing is ever invalidated.

The cache stays small: what has not been used for long goes, the oldest first. Only files with the names that cudascope
gives are looked at, because the folder may hold other files too. A build that a process has loaded stays, and so does a
file that was used in the last hour: a process may be about to read it.
"""

import contextlib
import functools
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from cudascope.cpp.source import CompileError

UNFINISHED = ".cudascope-"  # how the name of a file begins until it is whole
MAX_BYTES = 2 << 30
MAX_AGE = 30 * 24 * 3600  # seconds without use
_MAX_AGE_OF_PRECOMPILED = 24 * 3600  # each has 50 MB
_IN_DOUBT = 3600
_EVERY = 3600  # seconds between two prunings

_BUILD = re.compile(
    r"(?:.+-)?[0-9a-f]{32}(?:-instrumented)?\.(?:so|files|lock|cubin|ptx|ptxas|triton\.json)|(?:headers|precompiled)-[0-9a-f]{32}"
)


def cache_dir() -> Path:
    """Where compiled kernels are kept: $CUDASCOPE_CACHE, or ~/.cache/cudascope. CompileError: it cannot be written."""
    path = Path(os.environ.get("CUDASCOPE_CACHE") or "~/.cache/cudascope")
    try:
        path = path.expanduser().absolute()
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError("permission denied")
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
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


_PACKAGE = Path(__file__).parents[1]


@functools.cache
def code_of(module: str) -> str:
    """Return a digest of the code of a module of cudascope and of all modules that the module needs."""
    texts: dict[str, bytes] = {}
    names = [module]
    for name in names:  # grows
        if name in _modules() and name not in texts:
            texts[name], imported = _read(name)
            names += imported
    return digest(*sorted(texts), *(texts[name] for name in sorted(texts)))


@functools.cache
def _modules() -> dict[str, str]:
    """The file of each module of cudascope."""
    names = {}
    for folder, _, files in os.walk(_PACKAGE):
        package = ".".join(("cudascope", *Path(folder).relative_to(_PACKAGE).parts))
        names |= {f"{package}.{file[:-3]}": f"{folder}/{file}" for file in files if file.endswith(".py")}
    return names | {name.removesuffix(".__init__"): path for name, path in names.items()}


def _read(name: str) -> tuple[bytes, list[str]]:
    """The content of a module and the names that it imports, of which some may be modules too."""
    content = Path(_modules()[name]).read_bytes()
    imports = [(each, re.findall(r"\w+", several or one)) for each, several, one in _IMPORT.findall(content.decode())]
    return content, [f"{each}{end}" for each, words in imports for end in ("", *(f".{word}" for word in words))]


_IMPORT = re.compile(r"from (cudascope[\w.]*) import (?:\(([^)]*)\)|([^\n]*))")


def publish(path: Path, content: bytes) -> None:
    """Write `path` so that another process sees nothing or the whole file. The last writer wins; all write the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=UNFINISHED)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(unfinished, path)
    except BaseException:
        Path(unfinished).unlink(missing_ok=True)
        raise


def used(path: Path) -> Path:
    """Note that `path` is used now."""
    with contextlib.suppress(OSError):  # it is another user's
        os.utime(path)
    return path


def prune_at_times() -> None:
    """`prune`, unless that was done in the last hour."""
    done = cache_dir() / "pruned"
    with contextlib.suppress(OSError):  # it is another user's
        if not done.exists() or time.time() - done.stat().st_mtime > _EVERY:
            done.touch()
            prune()


def prune(max_bytes: int = MAX_BYTES, max_age: float = MAX_AGE) -> None:
    """Remove what was not used for `max_age` seconds, and then the oldest builds until `max_bytes` are left."""
    now, in_use = time.time(), _loaded()
    found = sorted(_builds(), key=lambda build: build[1])
    total = sum(size for _, _, size in found)
    for path, last_use, size in found:
        age = now - last_use
        limit = max_age
        if path.name.startswith("precompiled-"):
            limit = min(max_age, _MAX_AGE_OF_PRECOMPILED)
        elif path.name.startswith(UNFINISHED):
            limit = 0  # of a process that was killed
        if age < _IN_DOUBT or os.path.realpath(path) in in_use or (age <= limit and total <= max_bytes):
            continue
        if _remove(path, last_use):
            total -= size


def _builds() -> Iterator[tuple[Path, float, int]]:
    """Yield each build in the cache with the time of its last use and its bytes."""
    folder = cache_dir()
    for path in (*folder.iterdir(), *folder.glob("cubin/*"), *folder.glob("ptx/*")):
        if _BUILD.fullmatch(path.name) or path.name.startswith(UNFINISHED):
            with contextlib.suppress(OSError):  # another process removes it
                files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else _parts(path)
                yield path, path.stat().st_mtime, sum(each.stat().st_size for each in files)


def _parts(path: Path) -> list[Path]:
    beside = [path.with_suffix(ending) for ending in (".json", ".warnings")]  # what a library has, in words
    return [path, *(each for each in beside if each.exists())] if path.suffix == ".so" else [path]


def _remove(path: Path, last_use: float) -> bool:
    """Remove a build that was not used since. A folder disappears at once."""
    with contextlib.suppress(OSError):
        if path.stat().st_mtime != last_use:
            return False
        if path.is_dir():
            gone = path.rename(path.with_name(f"{UNFINISHED}{os.urandom(8).hex()}"))
            shutil.rmtree(gone, ignore_errors=True)
            return True
        for each in reversed(_parts(path)):
            each.unlink(missing_ok=True)
        return True
    return False


def _loaded() -> set[str]:
    """Return the files that the processes of this machine have in their memory."""
    loaded: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # another user's, or it has ended
            loaded.update(re.findall(r"(/.*)$", maps.read_text(errors="surrogateescape"), re.MULTILINE))
    return loaded
