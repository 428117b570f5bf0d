"""A .cu file after the preprocessor: macros expanded, every header in its place, and which lines are the user's own.

CUDA's own words (`__global__`, `__device__`, …) are still there: simt/specifiers.h gives them their meaning
when the text is compiled. A header that is not there is taken for an empty one, and named in `missing`.
"""

import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from cudascope.cpp.file import File
from cudascope.cpp.source import OF_TORCH, CompileError, Source
from cudascope.cpp.tokens import lexemes_of
from cudascope.toolchain.compiler import prerequisites, run_compiler
from cudascope.toolchain.headers import is_foreign

MARKER = re.compile(r'^#(?:line)? (\d+) "((?:\\.|[^"\\\n])*)"([ \d]*)$', re.MULTILINE)
_SYSTEM = "3"  # the flag by which a marker says that a system's header follows

Part = tuple[bool, str]  # is it the user's own, and its text with the compiler's line markers


def preprocess(command: Sequence[str], text: str, source: Source) -> tuple[list[Part], list[str]]:
    """`text` after the preprocessor of `command`, a compiler and its flags, and the headers that are missing.

    The text is made of `source`. The parts begin after simt.h. CompileError: the preprocessor refuses it.
    """
    missing: list[str] = []
    try:
        done = run_compiler([*command, "-E", "-x", "c++", "-"], text, source.folder)
    except CompileError as error:
        if "No such file or directory" not in str(error):
            raise
        rule = run_compiler([*command, "-M", "-MG", "-x", "c++", "-"], text, source.folder)
        missing = [name for name in prerequisites(rule) if not (source.folder / name).exists()]
        with tempfile.TemporaryDirectory() as folder:
            inside = Path(folder, *"abcdefgh")  # deep enough for every ../
            inside.mkdir(parents=True)
            for name in missing:
                stand_in = Path(os.path.normpath(inside / name))
                stand_in.parent.mkdir(parents=True, exist_ok=True)
                header = "cudascope_torch.h" if OF_TORCH.match(name) else "cuda_fp8.h"  # which may bring half precision
                stand_in.write_text(f'#include "{header}"\n', encoding="utf-8")
            done = run_compiler([*command, f"-I{inside}", "-E", "-x", "c++", "-"], text, source.folder)
    _, *parts = parts_of(_with_whole_names(done, source))  # simt.h comes first: a precompiled one is read sooner
    return parts, missing


def _with_whole_names(text: str, source: Source) -> str:
    """Preprocessed text whose markers give headers with their folder: the compiler leaves out that of the source."""

    def whole(marker: re.Match) -> str:
        line, file, flags = marker.groups()
        is_whole = file.startswith(("/", "<")) or file == source.filename
        return marker[0] if is_whole else f'# {line} "{source.folder}/{file}"{flags}'

    return MARKER.sub(whole, text)


def parts_of(text: str) -> Iterator[Part]:
    """Preprocessed `text` cut where the user's own part begins or ends."""
    start, is_own = 0, False
    is_others: dict[str, bool] = {}  # by a file's first marker: a later one may stand in a macro's expansion
    for marker in MARKER.finditer(text):
        _, file, flags = marker.groups()
        if file not in is_others:
            is_others[file] = _SYSTEM in flags.split() or is_foreign(file) or file.endswith("//")  # the working folder
        if is_own == is_others[file]:
            yield is_own, text[start : marker.start()]
            start, is_own = marker.start(), not is_own
    yield is_own, text[start:]


def files_in(parts: Iterable[Part], source: Source) -> list[str]:
    """The files of the user that the own parts of a text come from, besides `source`."""
    markers = [marker for is_own, part in parts if is_own for marker in MARKER.finditer(part)]
    return [*dict.fromkeys(marker[2] for marker in markers if marker[2] != source.filename)]


def file_of(parts: Iterable[Part]) -> File:
    """The whole text as a file whose pieces are those of the user's own parts."""
    texts, lexemes, places, at = [], [], [], 0
    for is_own, text in parts:
        found, begins = lexemes_of(text) if is_own else ((), ())
        lexemes += found
        places += [at + place for place in begins]
        texts.append(text)
        at += len(text)
    return File("".join(texts), (lexemes, places))


def line_at(text: str, place: int) -> tuple[str, int]:
    """The file and the line that preprocessed `text` shows at `place`."""
    *_, marker = MARKER.finditer(text, 0, place)
    return marker[2], int(marker[1]) + text.count("\n", marker.end(), place) - 1
