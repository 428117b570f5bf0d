"""CUDA C++ and how it is to be compiled: its text, the files that it includes, and the error if it cannot be built."""

import codecs
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from cudascope.cpp.file import File, read

OF_TORCH = re.compile(r"(?:ATen|c10|torch|THC)/")  # headers for which cudascope_torch.h is the stand-in

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"\n]+)[>"].*$', re.MULTILINE)


class CompileError(RuntimeError):
    """A kernel cannot be built. If a compiler refused it, the message is its own, with the kernel's file and line."""


def read_source(path: Path) -> str:
    """Return the text of a source or header: UTF-8, or else Latin-1, in which every byte is a character.

    A byte order mark is left out, and every line ends in a line feed.

    Raises:
        ValueError: the file is in UTF-16.
    """
    content = path.read_bytes()
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError(f"{path} is written in UTF-16, which no compiler reads: save the file as UTF-8")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = content.decode("latin-1")
    return text.replace("\r\n", "\n").replace("\r", "\n")


class Source(NamedTuple):
    """CUDA C++ and how it is to be compiled. Messages call it `filename`; it includes from `folder`, if it is a file.

    `defines` and `options` are as on a compiler's command line, without the -D.
    """

    text: str
    filename: str
    folder: Path | None
    defines: tuple[str, ...]
    options: tuple[str, ...]

    @property
    def include_path(self) -> list[Path]:
        """The folders of -I but torch's own, whose headers bring in host code: a stand-in takes their place."""
        folders = [Path(option[2:].strip()) for option in self.options if option.startswith("-I")]
        return [folder for folder in folders if not _is_torchs(folder)]

    def included(self) -> list[tuple[Path, str]]:
        """Every file that the source includes, directly or not, and its text, in order of first inclusion.

        Conditions are not evaluated: there may be too many files, and never too few.
        """
        return self.with_included(lambda name: True)[1]

    def with_included(self, is_elsewhere: Callable[[str], bool]) -> tuple[str, list[tuple[Path, str]]]:
        """The source with the files put in that it includes, each of them once, and these files.

        Found are quoted includes beside the including file, and any in the source's folder and on `include_path`. An
        include of another file stays if it `is_elsewhere`: it belongs to a compiler or to NVIDIA. A stand-in takes the
        place of torch's headers.
        """
        files: dict[Path, tuple[Path, str]] = {}
        own = [self.folder or Path(), *self.include_path]

        def expanded(text: str, filename: str, beside: Path) -> str:
            def include(match: re.Match) -> str:
                quote, name = match.groups()
                places = [beside, *own] if quote == '"' else own
                found = next((place / name for place in places if (place / name).is_file()), None)
                if found is None:
                    if is_elsewhere(name):
                        return match[0]
                    return "#include <cudascope_torch.h>" if OF_TORCH.match(name) else ""
                if found.resolve() in files:
                    return ""
                content = read_source(found)
                files[found.resolve()] = found, content
                line = match.string.count("\n", 0, match.end()) + 2
                return f'#line 1 "{found}"\n{expanded(content, str(found), found.parent)}\n#line {line} "{filename}"'

            return _INCLUDE.sub(include, text)

        return expanded(self.text, self.filename, own[0]), [*files.values()]

    def read(self) -> File:
        """The source and, before it, the files that it includes."""
        headers = "".join(f"{text}\n" for _, text in self.included())
        return read(headers + self.text, self.defines, len(headers))


def _is_torchs(folder: Path) -> bool:
    """Whether a folder has torch's headers alone, as torch/include has."""
    has_headers = any((folder / header).exists() for header in ("c10/macros/Macros.h", "torch/torch.h"))
    return has_headers and not {"torch", "libtorch"}.isdisjoint(folder.resolve().parts)
