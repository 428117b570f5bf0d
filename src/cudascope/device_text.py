"""A source's device code for NVRTC: the text as it is written, with host code blank and the host's headers left out.

NVRTC has a preprocessor of its own and does not have the host's headers, so this module expands nothing. A macro that
makes kernels stays a macro, and every line stays where it was.
"""

from collections.abc import Sequence
from pathlib import Path

from cudascope.build import Source
from cudascope.device_code import needed_by, only
from cudascope.file import read


def device_text(source: Source, name: str, folders: Sequence[Path]) -> str:
    """Return the part of `source` that kernel `name` needs. `folders` are those in which NVRTC finds headers."""
    text, _ = source.with_included(lambda header: any((folder / header).is_file() for folder in folders))
    file = read(text, None)
    needed = needed_by(file, " ".join((name, *(word for macro in file.macros for word in macro.body))))
    calls = [piece for piece in file.pieces if file.tokens[piece.start] in file.device_macros]
    return only(file, [*{piece.start: piece for piece in (*needed, *calls)}.values()])
