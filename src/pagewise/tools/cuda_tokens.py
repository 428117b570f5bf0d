"""CUDA C++ source as tokens: enough of C++'s grammar to find a declaration and to say what a name stands for."""

import re
from collections.abc import Mapping

Tokens = list[str]

_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|[A-Za-z_]\w*|\d[\w.\']*|::|\S')
_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\')', re.DOTALL)
_DIRECTIVE = re.compile(r"^[ \t]*#.*$", re.MULTILINE)
_CLOSE = {"(": ")", "[": "]", "{": "}", "<": ">"}


def tokens_of(text: str) -> Tokens:
    """The tokens of `text`, without preprocessor directives. A name, a number and a string are one token each."""
    return _TOKEN.findall(_DIRECTIVE.sub("", text))


def strip_comments(source: str) -> str:
    """`source` with every comment one space, and lines that end in a backslash joined."""
    return _COMMENT.sub(lambda match: match[1] or " ", source.replace("\\\n", " "))


def matching(tokens: Tokens, start: int) -> int:
    """The index of what closes the bracket at `start`. Angle brackets count only directly inside angle brackets."""
    expected = [_CLOSE[tokens[start]]]
    for i in range(start + 1, len(tokens)):
        token = tokens[i]
        if token == expected[-1]:
            expected.pop()
            if not expected:
                return i
        elif token in "([{" or (token == "<" and expected[-1] == ">"):
            expected.append(_CLOSE[token])
    raise ValueError(f"the source has an unclosed {tokens[start]!r}")


def split(tokens: Tokens) -> list[Tokens]:
    """`tokens` cut at the commas that stand in no bracket."""
    parts, start, i = [], 0, 0
    while i < len(tokens):
        if tokens[i] in "([{<":
            i = matching(tokens, i)
        elif tokens[i] == ",":
            parts.append(tokens[start:i])
            start = i + 1
        i += 1
    return [*parts, tokens[start:]] if tokens[start:] or parts else []


def substitute(tokens: Tokens, known: Mapping[str, Tokens], inside: frozenset[str] = frozenset()) -> Tokens:
    """`tokens` with every known name replaced by what it stands for, and what that stands for in turn."""
    result: Tokens = []
    for token in tokens:
        if token in known and token not in inside:
            result += substitute(known[token], known, inside | {token})
        else:
            result.append(token)
    return result


def evaluate(expression: Tokens, known: Mapping[str, Tokens]) -> int | None:
    """An integer constant expression in + − * / and parentheses, or None if it needs more than that."""
    text = " ".join(substitute(expression, known))
    if not re.fullmatch(r"[\d\s()+*/-]+", text):
        return None
    try:
        return int(eval(text.replace("/", "//"), {"__builtins__": {}}))
    except (SyntaxError, ZeroDivisionError, TypeError):
        return None
