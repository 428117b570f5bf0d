"""What a kernel uses of headers that are missing: a trap where it is reached, and no error where it is not.

The compiler says which names nobody has declared. A statement with such a name becomes a call that stops the kernel and
names the header; a declaration with one is left out, and so is what needs that in turn.
"""

import json
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence

from pagewise.cuda.device_code import DeviceCode, Piece, replaced
from pagewise.cuda.statements import Statements
from pagewise.cuda.tokens import NAME

_ROUNDS = 8  # what is left out leaves others without a declaration
_ERROR = re.compile(r"^<stdin>:(\d+):(\d+): (?:fatal )?error: (.*)$", re.MULTILINE)
_UNKNOWN = re.compile(
    "not declared|not been declared|does not name|is not a member|is not a class|is not a template|undeclared"
    "|incomplete type|not a namespace|no type named"
)
# Libraries that the host calls: a kernel has nothing of theirs but a type in a struct that it shares with the host.
_FOR_HOST = re.compile(r"\b(cublas|cudnn|cufft|cusparse|cusolver|curand(?=\.h)|nvml|nccl|nvtx|nvToolsExt|MPI|mpi|omp)")
_MARKER = re.compile(r"^# \d+ .*$", re.MULTILINE)


def with_traps(text: str, missing: Sequence[str], command: Sequence[str], cut: Callable[[str], DeviceCode]) -> str:
    """`text`, which lacks the headers `missing`, as `command` takes it; `cut` makes declarations of it."""
    blamed: dict[str, tuple[str, ...]] = {}  # of what was left out, the headers it needs
    for number in range(_ROUNDS):
        code = cut(text)
        changes: dict[tuple[int, int], str] = {}
        for place, message in _errors(text, command):
            headers = _headers(message, missing, blamed)
            if number == 0 and not (headers and _UNKNOWN.search(message)):
                continue  # the user's own mistake. In later rounds it follows from what was left out
            if (found := _change(code, place)) is not None:
                span, is_statement = found
                blamed |= {word: headers for word in code.tokens[slice(*span)] if NAME.fullmatch(word)}
                sentence = f"{' or '.join(headers)} is missing, and this line needs it: {message}"
                trap = f"simt_lacks({json.dumps(sentence, ensure_ascii=False)});"
                changes.setdefault(code.place(*span), trap if is_statement else "")
        if not changes:
            break
        text = replaced(text, [(*span, new) for span, new in _outermost(changes)])
    return text


def _headers(message: str, missing: Sequence[str], blamed: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Those of the missing headers that may declare what `message` misses."""
    names = [word for quoted in re.findall("[‘'](.*?)[’']", message) for word in NAME.findall(quoted)]
    known = next((blamed[name] for name in names if name in blamed), ())
    alike = [h for h in missing if any(len(name) > 2 and name.lower() in h.lower() for name in names)]
    for_host = {h: match[1] for h in missing if (match := _FOR_HOST.search(h))}
    alike += [h for h, library in for_host.items() if any(name.startswith(library) for name in names)]
    others = [h for h in missing if h not in for_host]
    return known or tuple(f"<{header}>" for header in alike or others[:3])


def _errors(text: str, command: Sequence[str]) -> list[tuple[int, str]]:
    """Where the compiler refuses `text`, and what it says."""
    by_line = _MARKER.sub("", text)  # then lines are those of the text itself
    flags = ("-fsyntax-only", "-w", "-fmax-errors=0", "-ftrack-macro-expansion=0", "-x", "c++", "-")
    done = subprocess.run([*command, *flags], input=by_line, capture_output=True, text=True)
    lines = [0, *(match.end() for match in re.finditer("\n", text))]
    return [(lines[int(line) - 1] + int(column) - 1, message) for line, column, message in _ERROR.findall(done.stderr)]


def _change(code: DeviceCode, place: int) -> tuple[tuple[int, int], bool] | None:
    """The lexemes to be replaced for an error at `place`, and whether they are a statement that may be reached."""
    at = max((i for i, lexeme in enumerate(code.lexemes) if lexeme.place <= place), default=-1)
    piece = _innermost(code.pieces, at)
    while piece is not None and (member := _innermost(code.members(piece), at)) is not None:
        piece = member
    is_kernel = piece is not None and piece.body and "__global__" in code.tokens[piece.start : piece.body]
    if piece is None or (is_kernel and at < piece.body):  # the kernel's own parameters
        return None
    if piece.body is None or at <= piece.body:
        return (piece.start, piece.end), False
    start, end = Statements(code.tokens, code.close).around(piece.body, at)
    words = code.tokens[start:end]
    only_declares = words[:1] in (["using"], ["typedef"]) or not {"(", "=", "return", "{"} & set(words)
    return (start, end), not only_declares


def _innermost(pieces: Sequence[Piece], at: int) -> Piece | None:
    return next((piece for piece in pieces if piece.start <= at < piece.end), None)


def _outermost(changes: dict[tuple[int, int], str]) -> Iterator[tuple[tuple[int, int], str]]:
    end = -1
    for span, new in sorted(changes.items(), key=lambda change: (change[0][0], -change[0][1])):
        if span[0] >= end:
            yield span, new
            end = span[1]
