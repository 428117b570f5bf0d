"""CUDA C++ as tokens. This lexer serves sources, headers, preprocessed text, macros and asm statements alike."""

import re
from collections.abc import Mapping, Sequence

Tokens = list[str]
Lexemes = tuple[Tokens, list[int]]  # tokens and directives, and where each begins in its text
Truth = bool | None  # None: it cannot be told

NAME = re.compile(r"[A-Za-z_]\w*")
_LEXEME = re.compile(
    r"""(?: ([A-Za-z_]\w*+(?!") | [][(){};,*+])     # most lexemes, before the slow alternatives
    | ^(?:[ \t]|(?>/\*.*?\*/))*+(\#(?:\\\n|(?>/\*.*?\*/)|//(?:\\\n|[^\n])*|"(?:\\.|[^"\\\n])*"|[^\n])*+)  # a directive
    | //(?:\\\n|[^\n])* | /\*.*?\*/ | \\\n                        # no lexeme: a comment, the end of a line that goes on
    | ((?:u8|[uUL])?R"(?P<mark>[^()\\\s]*)\(.*?\)(?P=mark)" | [A-Za-z_]\w* | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])+'
    | \.?\d(?:[eEpP][+-]|'\w|[\w.])* | <<= | >>= | [<>=!]= | && | \|\| | :: | -> | \.\.\. | \S)
    )[ \t]*+(?:\n\s*+(?![\#/]))?+  # and the space after it, but for that before a directive, which begins a line""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
_CLOSE = {"(": ")", "[": "]", "{": "}"}
_BRACKETS = {*_CLOSE, *_CLOSE.values()}
_NO_SPACE = re.compile(r"(?<=[(\[]) | (?=[)\],])|(?<=\w) (?=[(\[])|(?<=<) (?=<)|(?<=>) (?=>)|(?<=::) | (?=::)")


def lexemes_of(text: str) -> Lexemes:
    """The tokens of `text` and its directives, and their places. A directive is one lexeme that begins with #.

    A name, a number and a string are one token each. Comments and ends of lines are none.
    """
    lexemes, places = [], []
    for match in _LEXEME.finditer(text):
        if kind := match.lastindex:
            lexemes.append(match[kind])
            places.append(match.start(kind))
    return lexemes, places


def tokens_of(text: str) -> Tokens:
    """The tokens of `text`, without directives."""
    return [lexeme for lexeme in lexemes_of(text)[0] if lexeme[0] != "#"]


def text_of(expression: Tokens) -> str:
    """The text of an expression, for messages."""
    return _NO_SPACE.sub("", " ".join(expression))


def partners(tokens: Sequence[str], splits: Mapping[int, Sequence[str]] | None = None) -> dict[int, int]:
    """Return the index of the closing bracket for each (, [ and {. A closing bracket without a partner is ignored.

    `splits` are the directives in front of a token: "if", "else" and "endif". The branches of an #if are alternatives,
    and each begins with the same open brackets. A bracket that is open at the end of a branch ends there.
    """
    close: dict[int, int] = {}
    opened: list[int] = []
    before: list[list[int]] = []  # the open brackets at the beginning of each #if
    brackets = [i for i, token in enumerate(tokens) if token in _BRACKETS]
    splits = splits or {}
    for i in sorted({*brackets, *splits} - {len(tokens)}) if splits else brackets:
        for kind in splits.get(i, ()):
            if kind == "if":
                before.append(opened.copy())
            elif kind == "else":
                close |= {each: i - 1 for each in opened if each not in before[-1]}
                opened = before[-1].copy()
            else:
                before.pop()
        if tokens[i] in _CLOSE:
            opened.append(i)
        elif fitting := [k for k, each in enumerate(opened) if _CLOSE[tokens[each]] == tokens[i]]:
            close[opened[fitting[-1]]] = i
            del opened[fitting[-1] :]
    return close


def after_angle(tokens: Sequence[str], close: Mapping[int, int], i: int, stop: int) -> int:
    """Return the index after the > that closes the < at `i`, or after the operator if it is a comparison or a shift."""
    if tokens[i + 1 : i + 2] == ["<"]:
        return i + 2
    depth, j = 0, i
    while j < stop and tokens[j] not in (";", "{", "}", ")"):
        if tokens[j] == "<" and tokens[j + 1 : j + 2] == ["<"]:
            j += 2
            continue
        depth += (tokens[j] == "<") - (tokens[j] == ">")
        if depth == 0:
            return j + 1
        j = close.get(j, j) + 1
    return i + 1


def split(tokens: Tokens) -> list[Tokens]:
    """Return `tokens` cut at the commas outside all brackets."""
    close, parts, start, i = partners(tokens), [], 0, 0
    while i < len(tokens):
        if tokens[i] == ",":
            parts.append(tokens[start:i])
            start = i + 1
        i = after_angle(tokens, close, i, len(tokens)) if tokens[i] == "<" else close.get(i, i) + 1
    return [*parts, tokens[start:]] if tokens[start:] or parts else []


def substitute(tokens: Tokens, known: Mapping[str, Tokens], inside: frozenset[str] = frozenset()) -> Tokens:
    """Return `tokens` with every known name replaced by its definition, and likewise inside definitions."""
    result: Tokens = []
    for token in tokens:
        if token in known and token not in inside:
            result += substitute(known[token], known, inside | {token})
        else:
            result.append(token)
    return result


def every(*truths: Truth) -> Truth:
    """Whether all are true; None is unknown."""
    return False if any(t is not None and not t for t in truths) else None if None in truths else True


def negated(truth: Truth) -> Truth:
    """The opposite of a truth; None stays unknown."""
    return None if truth is None else not truth
