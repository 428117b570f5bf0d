"""The functions and words for a host only: nvcc refuses them in device code, and so do both ways to run a kernel.

The host's compiler takes a whole file as it is, for it knows no difference between host and device. So a file whose
kernel may use something of the host's is cut (cuda.py): then the host's functions and variables are gone, and the
compiler says whether the kernel needs one.
"""

import re
from collections.abc import Iterable, Iterator

from cudascope.cpp.device_code import host_constructors, needed_by, words_of
from cudascope.cpp.file import File, Piece
from cudascope.cpp.source import CompileError

_KEYWORDS = {"throw", "try", "dynamic_cast", "typeid", "thread_local"}
_OF_C = {"abort", "exit", "fprintf", "fputs", "getenv", "putchar", "puts", "rand", "scanf", "srand", "system"}
_OF_STD = (
    "vector string map unordered_map set unordered_set list deque queue stack sort stable_sort nth_element cout cerr "
    "cin endl unique_ptr make_unique shared_ptr make_shared function thread mutex random_device mt19937 to_string"
)
_OF_STD = {*_OF_STD.split(), *_OF_C}
_CALLS = {"return", "else", "do"}  # the words before a call; another word before a name declares the name


def used_in(file: File, piece: Piece) -> Iterator[tuple[int, str]]:
    """The tokens of a device function at which it uses what only the host has, and a sentence that says so."""
    tokens = file.tokens
    of_c = _OF_C.difference(*(each.names for each in file.pieces if each.on_device))
    for start, end in piece.kept:
        for i in range(start, end):
            token, before, after = tokens[i], tokens[i - 1 : i], tokens[i + 1 : i + 3]
            of_std = tokens[max(i - 2, 0) : i] == ["std", "::"]
            if token in _KEYWORDS and after != ["(", ")"]:
                yield i, f"{token} is not allowed in device code"
            elif of_std and token in _OF_STD:
                yield i, f"std::{token} is for host code only"
            elif token in of_c and after[:1] == ["("] and (of_std or not is_of_another(before)):
                yield i, f"{token}() is for host code only"
            elif token == "__shared__":
                declared = tokens[i : next((j for j in range(i, end) if tokens[j] == ";"), end)]
                if "=" in declared:
                    what = "a __shared__ variable cannot have an initialiser: let a thread assign to it"
                    yield i + declared.index("="), what


def is_of_another(before: list[str]) -> bool:
    """Whether a name after this token is a member, is in a namespace, or is declared here."""
    return before[:1] in (["."], ["->"], ["::"]) or any(word.isidentifier() and word not in _CALLS for word in before)


def may_be_used(file: File, kernels: Iterable[str]) -> bool:
    """Whether one of `kernels` mentions what only the host has: its functions and variables, or the names above."""
    needed = [*{piece.start: piece for name in kernels for piece in needed_by(file, name)}.values()]
    words = {word for piece in needed for word in words_of(file, piece)}
    if host_constructors(file, needed) or not words.isdisjoint(_names(file)):
        return True
    return any(True for piece in needed for _ in used_in(file, piece))


def _names(file: File) -> set[str]:
    """The functions, variables and member functions that only the host has."""
    host = [each for each in file.pieces if not each.on_device and (each.is_function or each.is_variable)]
    host += [member for piece in file.pieces for member in piece.host_members]
    device = (each for each in file.pieces if each.on_device)
    return set().union(*(each.names for each in host)).difference(*(each.names for each in device))


_LACKS = re.compile(
    r"‘(?:[\w:]+::)?(\w+)(?:\(.*?\))?’ (?:was not declared|is not a member)|has no member named ‘(\w+)’"
    r"|deleted function ‘.*?(\w+)\("
)


def explained(error: CompileError, file: File) -> CompileError:
    """`error`, and the remedy if the kernel uses something of the host's."""
    found = _LACKS.search(str(error))
    name = found and next(filter(None, found.groups()))
    if not name or (name not in _names(file) and not found[3]):
        return error
    return CompileError(
        f"{error}\n{name} is for the host only: declare a function __device__ (or __host__ __device__), a variable "
        f"__device__ or __constant__, a constant constexpr"
    )
