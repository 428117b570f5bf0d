"""The device code of a CUDA source: what a kernel needs of it, and what is only for the host.

A source is cut into the declarations that stand outside of functions. A kernel needs the functions, types, variables
and aliases whose names it mentions, then the names that these mention, and so on. Everything else becomes blank, and
every line stays in its place. Two rules of CUDA say what is host code and never needed: a function that is neither
`__device__`, `__global__` nor constexpr, and a variable that is neither of these nor constant.

No types are looked up: a declaration is needed if anything needed has a word of its name. This rule may keep
more than a kernel needs, and never less.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from cudascope.cpp.file import File, Piece, read
from cudascope.cpp.source import Source
from cudascope.cpp.tokens import NAME, split
from cudascope.cpp.types import C_TYPES, VECTORS

_TYPE_WORDS = {"const", *VECTORS, *(word for name in C_TYPES for word in name.split())}


def needed_by(file: File, name: str) -> list[Piece]:
    """The pieces that kernel `name` needs, itself among them, and those that are always kept."""
    by_name: dict[str, list[Piece]] = {}
    for piece in file.pieces:
        for word in piece.names if piece.on_device and not piece.is_operator else ():
            by_name.setdefault(word, []).append(piece)
    needed = {piece.start: piece for piece in file.pieces if piece.always}
    seen: set[str] = set()

    def follow(words: Iterable[str]) -> None:
        new = set(words) - seen
        while new:
            seen.update(new)
            found = {piece.start: piece for word in new for piece in by_name.get(word, ())}
            found = {start: piece for start, piece in found.items() if start not in needed}
            needed.update(found)
            new = {word for piece in found.values() for word in words_of(file, piece)} - seen

    follow(NAME.findall(name))
    operators = [piece for piece in file.pieces if piece.is_operator and piece.on_device]
    while ready := [each for each in operators if each.start not in needed and _types(file, each, by_name) <= seen]:
        for piece in ready:  # a + b names no operator: it is needed where the types of its operands are
            needed[piece.start] = piece
            follow(words_of(file, piece))
    kept = {_operator(file, piece) for piece in needed.values() if piece.is_operator}
    needed |= {piece.start: piece for piece in file.pieces if _operator_of_using(file, piece) in kept}
    return sorted(needed.values())


def _operator(file: File, piece: Piece) -> tuple[str, ...]:
    """The tokens that name an operator: `operator "" _km`."""
    tokens = file.tokens[piece.start : piece.parameters]
    return tuple(tokens[tokens.index("operator") :]) if "operator" in tokens else ()


def _operator_of_using(file: File, piece: Piece) -> tuple[str, ...] | None:
    """The operator that a using-declaration brings in; None for other pieces."""
    tokens = file.tokens[piece.start : piece.end]
    if tokens[:1] != ["using"] or "operator" not in tokens:
        return None
    return tuple(tokens[tokens.index("operator") : -1])


def device_text(source: Source, name: str, folders: Sequence[Path]) -> str:
    """Return the part of `source` that kernel `name` needs, for NVRTC, which finds headers in `folders`.

    NVRTC has a preprocessor of its own and does not have the host's headers. Those are left out, and no macro is
    expanded: one that makes kernels stays, and every line stays in its place.
    """
    included = source.with_included(lambda header: any((folder / header).is_file() for folder in folders))
    file = read(included.text, None)
    needed = needed_by(file, " ".join((name, *(word for macro in file.macros for word in macro.body))))
    calls = [piece for piece in file.pieces if file.tokens[piece.start] in file.device_macros]
    return only(file, [*{piece.start: piece for piece in (*needed, *calls)}.values()])


def only(file: File, pieces: Sequence[Piece], changes: Iterable[tuple[int, int, str]] = ()) -> str:
    """The text, with `changes`, and with every other piece and the host's members of classes left blank.

    A constructor for the host is deleted, not left blank: without it a class might get another one from the compiler.
    An explicit one keeps the class from being an aggregate, too.
    """
    kept = {piece.start for piece in pieces}
    blank = [(piece.start, piece.end) for piece in file.pieces if piece.start not in kept]
    changes = [*changes, *((*file.span(*each), "") for each in blank)]
    deleted = {member.start for member in host_constructors(file, pieces)}
    for member in (member for piece in pieces for member in piece.host_members):
        new = _deleted(file, member) if member.start in deleted else ""
        changes.append((*file.span(member.start, member.end), new))
    return replaced(file.text, changes)


def host_constructors(file: File, pieces: Sequence[Piece]) -> list[Piece]:
    """The constructors for the host, in the classes of `pieces`, that device code might call by mistake.

    They neither copy nor move, and `pieces` declare the types of their parameters: no std::string, for example.
    """
    known = _TYPE_WORDS.union(*(piece.names for piece in pieces))
    return [each for piece in pieces for each in piece.host_members if _is_constructor(file, piece, each, known)]


def _deleted(file: File, constructor: Piece) -> str:
    name = constructor.parameters - 1
    before, declared = file.tokens[constructor.start : name], file.tokens[name : file.close[name + 1] + 1]
    explicit = [] if "explicit" in before else ["explicit"]
    return " ".join([*before, *explicit, *declared, "= delete;"])


def _is_constructor(file: File, piece: Piece, member: Piece, known: set[str]) -> bool:
    classes = [piece.names, *(each.names for each in piece.members if each.members)]
    opened = member.parameters
    parameters = file.tokens[opened + 1 : file.close.get(opened, opened)]
    if opened not in file.close or file.tokens[opened - 2] == "~" or "::" in parameters:
        return False
    if not any(member.names <= names and names.isdisjoint(parameters) for names in classes):
        return False
    words = ([word for word in each if word.isidentifier()] for each in split(parameters))
    return all(known.issuperset(each[:-1] or each) for each in words)


def words_of(file: File, piece: Piece) -> Iterator[str]:
    """The names in a piece, without those in members for the host."""
    for start, end in piece.kept:
        yield from filter(str.isidentifier, file.tokens[start:end])


def _types(file: File, operator: Piece, declared: Iterable[str]) -> set[str]:
    parameters = file.tokens[operator.parameters : file.close[operator.parameters]]
    first = file.tokens[operator.start : operator.start + 2] == ["template", "<"]
    own = file.tokens[operator.start : file.after(operator.start + 1, operator.end)] if first else []
    return {word for word in parameters if word in declared and word not in own}


_BLANKED = re.compile(r"^([ \t]*#(?![ \t]*pragma)(?:\\\n|[^\n])*)|[^\n]+", re.MULTILINE)


def replaced(text: str, changes: Iterable[tuple[int, int, str]]) -> str:
    """`text` with each (start, end, new) put in, the outer one of two; lines and directives of the old text stay."""
    parts, at = [], 0
    for start, end, new in sorted(changes, key=lambda change: (change[0], -change[1])):
        if start < at:
            continue
        parts += [text[at:start], new, _BLANKED.sub(lambda match: match[1] or "", text[start:end])]
        at = end
    return "".join((*parts, text[at:]))
