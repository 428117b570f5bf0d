"""The `return` statements of a kernel, marked in a watched build: the runtime then knows how a thread has left.

CUDA allows that a thread returns before a barrier, and not that it goes round the barrier. In a run the two look alike,
so each `return` becomes `return simt_returned(body, from);`. The numbers are lines of the kernel's file: the first line
of the kernel's body, and the line of the `return`. If the `return` is in a loop, the second number is the first line of
the outermost loop. A barrier between the two lines was passed or gone round before the `return` (collectives.h).
"""

from collections.abc import Callable, Iterable, Iterator

from cudascope.cpp.file import File, Piece, Statements

_LOOPS = ("for", "while", "do")


def kernel_bodies(file: File, pieces: Iterable[Piece]) -> list[Piece]:
    """Those of `pieces` that are kernels with a body."""
    return [each for each in pieces if each.body is not None and "__global__" in file.tokens[each.start : each.body]]


def early_returns(file: File, kernel: Piece) -> list[int]:
    """The tokens `return` with which a thread leaves the kernel: not in a lambda or a class, not the last statement."""
    tokens, end = file.tokens, file.close[kernel.body]
    found, i = [], kernel.body + 1
    while i < end:
        inner = _inner_body(file, i)
        if inner is None and tokens[i] == "return" and i + 2 != end:
            found.append(i)
        i = file.close[inner] + 1 if inner is not None else i + 1
    return found


def has_unmarked_return(file: File, function: str) -> bool:
    """Whether kernel `function` may have an early `return` that is not in the text of its body: True if unsure."""
    in_macros = {macro.name for macro in file.macros if "return" in macro.body}
    kernels = kernel_bodies(file, (piece for piece in file.pieces if function in piece.names))
    own = (file.tokens[each.body : each.end] for each in kernels if file.places[each.start] >= file.own)
    bodies = [*own]
    return len(bodies) < max(len(kernels), 1) or any(not in_macros.isdisjoint(body) for body in bodies)


def marks(file: File, pieces: Iterable[Piece], line_at: Callable[[int], int]) -> Iterator[tuple[int, int, str]]:
    """The changes to the text of `file` that mark the early returns of kernels. `line_at` tells the line of a place."""
    for kernel in kernel_bodies(file, pieces):
        body = line_at(file.places[kernel.body])
        statements = Statements(file.tokens, file.close)
        jumps = "goto" in file.tokens[kernel.body : kernel.end]
        for i in early_returns(file, kernel):
            loops = [at for at in statements.round(kernel.body, i) if file.tokens[at] in _LOOPS]
            first = body if jumps else line_at(file.places[min([i, *loops])])
            comma = "" if file.tokens[i + 1] == ";" else ","
            end = file.places[i] + len("return")
            yield end, end, f" simt_returned({body}, {first}){comma}"


def _inner_body(file: File, i: int) -> int | None:
    """The brace that opens the body of a lambda or a class, if one begins at token `i`."""
    tokens = file.tokens
    if tokens[i] in ("struct", "class", "union"):
        return _brace(tokens, file, i + 1)
    before = tokens[i - 1]
    if tokens[i] != "[" or before in (")", "]") or (before.isidentifier() and before != "return"):
        return None
    after = file.close.get(i, i) + 1  # the captures are read
    if tokens[after : after + 1] == ["("]:
        after = file.close.get(after, after) + 1
    return _brace(tokens, file, after)


def _brace(tokens: list[str], file: File, i: int) -> int | None:
    """The next brace, unless the statement, an argument or a bracket ends before."""
    while i < len(tokens) and tokens[i] not in (";", ",", ")", "]", "}", "="):
        if tokens[i] == "{":
            return i
        i = file.close.get(i, i) + 1 if tokens[i] in ("(", "[") else i + 1
    return None
