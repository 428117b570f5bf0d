"""CUDA C++ and how it is to be compiled: its text, the files that it includes, and the error if it cannot be built.

`Source` looks an include up as every compiler does: `#include "…"` in the folder of the file that has this line, then
in the user's folders (-I), then in cudascope's and NVIDIA's. `#include <…>` leaves the first folder out. The compilers
get the folders in this order. The reader and the keys of the cache use `Source.with_included`.
"""

import codecs
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from cudascope.cpp.file import File, read

OF_TORCH = re.compile(r"(?:ATen|c10|torch|THC)/")  # headers for which cudascope_torch.h is the stand-in

_BLANK = r"(?:[ \t]|\\\n|/\*(?:[^*]|\*(?!/))*\*/)*"  # what may stand between the words of a directive
_INCLUDE = re.compile(
    rf'^{_BLANK}\#{_BLANK}(include|import|include_next)\b{_BLANK}(?:"([^"\n]+)"|<([^>\n]+)>|(\w+)).*$', re.MULTILINE
)
_DEFINE = re.compile(rf'^{_BLANK}\#{_BLANK}define{_BLANK}(\w+)[ \t]+("[^"\n]*"|<[^>\n]*>|\S+)', re.MULTILINE)
_ASKED = re.compile(r'\b__has_include(?:_next)?\s*\(\s*(?:"([^"\n]+)"|<([^>\n]+)>)')
_FILE = re.compile(r'"([^"\n]+)"|<([^>\n]+)>')

# A folder with one of these headers is NVIDIA's. cudascope's own headers come first, because they replace some of it.
_OF_NVIDIA = ("cuda_runtime_api.h", "cuda_fp16.h", "cub/cub.cuh", "cuda/std/utility")
_OF_NVIDIA += ("cooperative_groups.h", "nv/target")
_OF_TORCH_ALONE = ("c10/macros/Macros.h", "torch/torch.h")


class CompileError(RuntimeError):
    """A kernel cannot be built. If a compiler refused it, the message is its own, with the kernel's file and line."""


def read_source(path: Path) -> str:
    """Return the text of a source or header: UTF-8, or else Latin-1, in which every byte is a character.

    A byte order mark is left out, and every line ends in a line feed. ValueError: the file is in UTF-16.
    """
    content = path.read_bytes()
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError(f"{path} is written in UTF-16, which no compiler reads: save the file as UTF-8")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = content.decode("latin-1")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def source_path(source: str | Path, language: str = "CUDA C++") -> Path | None:
    """The file that `source` names; None if it is the source text itself."""
    if not isinstance(source, str | Path):
        raise TypeError(f"source must be a path or {language} text, got {type(source).__name__}")
    if isinstance(source, str) and ("\n" in source or "__global__" in source):
        return None
    path = Path(source).absolute()
    if not path.is_file():
        remedy = "" if Path(source).is_absolute() else ": a relative path is looked up from the current folder"
        raise FileNotFoundError(f"source: there is no file {path}{remedy}")
    return path


class Included(NamedTuple):
    """The files that a source includes, and what else decides which these are."""

    text: str  # the source with the files put in, each of them once
    files: list[tuple[Path, str]]  # of the user, with their text, in order of first inclusion
    answers: list[str]  # of __has_include
    lenient: dict[str, Path]  # names that only the source's folder has, where no compiler looks
    is_unread: bool  # the text does not tell the file of an include, as of `#include NAME(x)`

    def key(self, folder: Path) -> list[str]:
        """The parts that name a build of a source in `folder`."""
        files = [part for path, text in self.files for part in (str(path), text)]
        return [*files, *self.answers, str(folder) if self.is_unread else ""]


class Source(NamedTuple):
    """CUDA C++ and how it is to be compiled. Messages call it `filename`; `folder` is that of the file, or the current.

    `defines` and `options` are as on a compiler's command line, without the -D.
    """

    text: str
    filename: str
    folder: Path
    defines: tuple[str, ...]
    options: tuple[str, ...]

    @property
    def path(self) -> Path:
        """What compilers shall take for the path of the source."""
        return self.folder / self.filename

    @property
    def include_path(self) -> list[Path]:
        """The user's folders of -I, in which an include is looked up before cudascope's."""
        return [folder for folder in self._given if not _has_any(folder, _OF_NVIDIA)]

    @property
    def late_include_path(self) -> list[Path]:
        """The folders of -I that are NVIDIA's."""
        return [folder for folder in self._given if _has_any(folder, _OF_NVIDIA)]

    @property
    def _given(self) -> list[Path]:
        """The folders of -I but torch's own, whose headers bring in host code: a stand-in takes their place."""
        folders = [Path(option[2:].strip()) for option in self.options if option.startswith("-I")]
        return [folder for folder in folders if not _is_torchs(folder)]

    def included(self) -> list[tuple[Path, str]]:
        """Every file that the source includes, directly or not, and its text, in order of first inclusion.

        Conditions are not evaluated: there may be too many files, and never too few.
        """
        return self.with_included().files

    def with_included(self, is_elsewhere: Callable[[str], bool] = lambda name: False) -> Included:
        """The source with the files put in that it includes, and these files.

        An include of a file that is not the user's stays if it `is_elsewhere`: it belongs to a compiler or to NVIDIA. A
        stand-in takes the place of torch's headers. Without `is_elsewhere` there may be too many files again.
        """
        files: dict[Path, tuple[Path, str]] = {}
        early, late, answers = self.include_path, self.late_include_path, []
        lenient: dict[str, Path] = {}
        is_unread = False

        def found(quoted: str | None, name: str | None, beside: Path) -> Path | None:
            name, folders = (quoted, [beside, *early]) if quoted else (name, early)
            if Path(name).is_absolute():
                return Path(name) if Path(name).is_file() else None
            path = next((folder / name for folder in folders if (folder / name).is_file()), None)
            if path is None and not is_elsewhere(name):
                path = next((folder / name for folder in late if (folder / name).is_file()), None)
                if path is None and _is_plain(name) and (self.folder / name).is_file():
                    path = lenient[name] = self.folder / name  # many compilers are given -I.
            return path

        def meanings(macro: str) -> set[str]:
            """What the macro may stand for: conditions and the order of definitions are not looked at."""
            texts = (self.text, *(text for _, text in files.values()))
            given = (define.partition("=")[::2] for define in self.defines)
            written = (each for text in texts for each in _DEFINE.findall(text))
            return {value for name, value in (*given, *written) if name == macro}

        def expanded(text: str, filename: str, beside: Path) -> str:
            def put_in(match: re.Match, quoted: str | None, name: str | None) -> str:
                path = found(quoted, name, beside)
                if path is None:
                    if is_elsewhere(quoted or name):
                        return match[0]
                    return "#include <cudascope_torch.h>" if OF_TORCH.match(quoted or name) else ""
                # the folder decides what the file includes, so a link to a file is another file
                if (known := path.parent.resolve() / path.name) in files:
                    return ""
                content = read_source(path)
                files[known] = path, content
                line = match.string.count("\n", 0, match.end()) + 2
                return f'#line 1 "{path}"\n{expanded(content, str(path), path.parent)}\n#line {line} "{filename}"'

            def include(match: re.Match) -> str:
                nonlocal is_unread
                word, quoted, name, macro = match.groups()
                if word != "include_next" and not macro:
                    return put_in(match, quoted, name)
                named = [_FILE.fullmatch(value) for value in meanings(macro)] if macro else []
                is_unread = is_unread or not named or None in named
                texts = [put_in(match, *each.groups()) for each in named if each]
                return texts[0] if len(named) == 1 and texts else match[0]

            if "__has_include" in text:
                answers.extend(str(found(*asked, beside)) for asked in _ASKED.findall(text))
            return _INCLUDE.sub(include, text) if "#" in text else text

        whole = expanded(self.text, self.filename, self.folder)
        return Included(whole, [*files.values()], answers, lenient, is_unread)

    def read(self, included: Included | None = None) -> File:
        """The source and, before it, the files that it includes."""
        files = self.included() if included is None else included.files
        headers = "".join(f"{text}\n" for text in {path.resolve(): text for path, text in files}.values())
        return read(headers + self.text, self.defines, len(headers))


def _is_plain(name: str) -> bool:
    """Whether an included name may be that of a header beside the source: the system has no such header."""
    return "." in name and not {"/", ".."} & set(Path(name).parts) and not Path("/usr/include", name).is_file()


def _has_any(folder: Path, headers: Sequence[str]) -> bool:
    return any((folder / header).is_file() for header in headers)


def _is_torchs(folder: Path) -> bool:
    """Whether a folder has torch's headers alone, as torch/include has."""
    return _has_any(folder, _OF_TORCH_ALONE) and not {"torch", "libtorch"}.isdisjoint(folder.resolve().parts)
