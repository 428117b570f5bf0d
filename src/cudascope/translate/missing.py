"""Missing headers: a statement that needs one becomes a trap, so a kernel that does not reach the trap still runs.

The compiler lists the names without a declaration. A statement with such a name becomes a call that stops the kernel
and names the header. A declaration with such a name is left out, and so are the declarations that need this one. A
statement of the kernel itself under no condition is always reached, so such a statement is an error at once.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cudascope.cpp.device_code import replaced
from cudascope.cpp.file import File
from cudascope.cpp.outline import Piece
from cudascope.cpp.source import OF_TORCH, CompileError
from cudascope.cpp.statements import Statements
from cudascope.cpp.tokens import NAME
from cudascope.toolchain.compiler import result_of_compiler
from cudascope.translate.preprocess import line_at

_ROUNDS = 8  # each round may leave other names without a declaration
_ERROR = re.compile(r"^<stdin>:(\d+):(\d+): (?:fatal )?error: (.*)$", re.MULTILINE)
_NO_TEMPLATE = re.compile(
    r"^<stdin>:(\d+):(\d+): (?:warning: expected|error: use) (.template. keyword).*$", re.MULTILINE
)
_UNKNOWN = re.compile(
    "not declared|not been declared|does not name|is not a member|is not a class|is not a template|undeclared"
    "|incomplete type|not a namespace|no type named"
)
# Libraries that the host calls: a kernel has nothing of theirs but a type in a struct that it shares with the host.
_FOR_HOST = re.compile(r"\b(cublas|cudnn|cufft|cusparse|cusolver|curand(?=\.h)|nvml|nccl|nvtx|nvToolsExt|MPI|mpi|omp)")
_MARKER = re.compile(r"^# \d+ .*$", re.MULTILINE)


def with_traps(text: str, missing: Sequence[str], command: Sequence[str], cut: Callable[[str], File]) -> str:
    """`text`, which lacks the headers `missing`, as `command` takes it; `cut` makes declarations of it.

    Raises:
        CompileError: the kernel always needs what is missing.
    """
    whys: dict[str, str] = {}  # for the names in what was left out
    for number in range(_ROUNDS):
        code = cut(text)
        changes: dict[tuple[int, int], str] = {}
        for place, message in _errors(text, command):
            names = _names(message)
            headers = _headers(names, missing)
            if number == 0 and not (headers and _UNKNOWN.search(message)):
                continue  # the user's own mistake. In later rounds it follows from what was left out
            if (found := _change(code, place)) is not None:
                said = f"{message.partition(';')[0]}: {_origin(headers)}"
                why = next((whys[name] for name in names if name in whys), said)
                if found.is_reached:
                    file, line = line_at(text, place)
                    at = "the kernel's name" if file == "<cudascope>" else f"{file}:{line}"
                    raise CompileError(f"{at}: error: {why}")
                whys = {word: why for word in code.tokens[slice(*found.span)] if NAME.fullmatch(word)} | whys
                trap = f"simt_lacks({json.dumps(why, ensure_ascii=False)});" if found.is_statement else ""
                changes.setdefault(code.span(*found.span), trap)
        if not changes:
            break
        text = replaced(text, [(*span, new) for span, new in changes.items()])
    return text


def with_template_keywords(text: str, command: Sequence[str]) -> str:
    """`text` with the word template where `command` lacks it and nvcc does not: `Cast<T>::template to<4>(x)`."""
    places = {place for place, _ in _errors(text, command, _NO_TEMPLATE)}
    return replaced(text, [(place, place, "template ") for place in places])


def _names(message: str) -> list[str]:
    return [name for quoted in re.findall("[‘'](.*?)[’']", message) for name in NAME.findall(quoted)]


def _headers(names: Sequence[str], missing: Sequence[str]) -> list[str]:
    """Those of the missing headers that may declare one of `names`."""
    alike = [h for h in missing if any(len(name) > 2 and name.lower() in h.lower() for name in names)]
    for_host = {h: match[1] for h in missing if (match := _FOR_HOST.search(h))}
    alike += [h for h, library in for_host.items() if any(name.startswith(library) for name in names)]
    return [f"<{header}>" for header in alike or [h for h in missing if h not in for_host][:3]]


_LIBRARIES = {
    OF_TORCH: "cudascope has the device side of torch's headers, and this name is not in it",
    re.compile(r"(?:thrust|cub|cuda)/"): (
        "cudascope has parts of thrust, cub and cuda::std (README: which features run), and this name is not in them"
    ),
    re.compile(r"(?:cutlass|cute)/"): "cudascope does not run CUTLASS and CuTe: give the kernel a plain C++ path",
}


def _origin(headers: Sequence[str]) -> str:
    """Say where a name may come from, and what to do about it."""
    where = " or ".join(headers)
    for of_library, why in _LIBRARIES.items():
        if all(of_library.match(header, 1) for header in headers):
            return f"it may come from {where}, or from `defines`; {why}"
    return f"it may come from {where}, which is missing, or from `defines`; -I<folder> in `options` names a folder"


def _errors(text: str, command: Sequence[str], said: re.Pattern = _ERROR) -> list[tuple[int, str]]:
    """Where the compiler refuses `text`, and what it says."""
    by_line = _MARKER.sub("", text)  # then lines are those of the text itself
    quiet = ("-w",) if said is _ERROR else ()
    flags = ("-fsyntax-only", *quiet, "-fmax-errors=0", "-ftrack-macro-expansion=0", "-x", "c++", "-")
    done = result_of_compiler([*command, *flags], by_line)
    lines = [0, *(match.end() for match in re.finditer("\n", text))]
    return [(lines[int(line) - 1] + int(column) - 1, message) for line, column, message in said.findall(done.stderr)]


class _Change(NamedTuple):
    """The lexemes that an error is about."""

    span: tuple[int, int]
    is_statement: bool  # one that does something
    is_reached: bool  # whenever the kernel runs


def _change(code: File, place: int) -> _Change | None:
    """Return the part to leave out for an error at `place`; None if no part can be left out."""
    at = max((i for i, begins in enumerate(code.places) if begins <= place), default=-1)
    piece = _innermost(code.pieces, at)
    while piece is not None and (member := _innermost(piece.members, at)) is not None:
        piece = member
    if piece is None:
        return None
    is_kernel = "__global__" in code.tokens[piece.start : piece.body or piece.end]
    if piece.body is None or at <= piece.body:
        return _Change((piece.start, piece.end), False, is_kernel)
    statements = Statements(code.tokens, code.close)
    start, end = statements.around(piece.body, at)
    words = code.tokens[start:end]
    if not words:
        return None
    does = words[0] not in ("using", "typedef") and any(word == "return" or word[-1] in "(={" for word in words)
    return _Change((start, end), does, does and is_kernel and statements.is_always_reached(piece.body, start))


def _innermost(pieces: Sequence[Piece], at: int) -> Piece | None:
    return next((piece for piece in pieces if piece.start <= at < piece.end), None)
