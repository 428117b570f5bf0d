"""CUDA C++ source as tokens: enough of C++'s grammar to find a declaration and to say what a name stands for."""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

Tokens = list[str]
Truth = bool | None  # None: it cannot be told

NAME = re.compile(r"[A-Za-z_]\w*")
_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|[A-Za-z_]\w*|\d[\w.\']*|::|\S')
_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\')', re.DOTALL)
_DIRECTIVE = re.compile(r"^[ \t]*#.*$", re.MULTILINE)
_LINE = re.compile(r"[ \t]*#[ \t]*(\w+)[ \t]*(.*)")
_SET = re.compile(r"(\w+)[ \t]*(.*)")
_DEFINED = re.compile(r"\bdefined\s*(?:\(\s*(\w+)\s*\)|(\w+))")
_NUMBER = re.compile(r"\b(0[xX][\da-fA-F]+|\d+)[uUlL]+\b")
_UNARY = {ast.UAdd: operator.pos, ast.USub: operator.neg, ast.Invert: operator.not_}
_BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_CLOSE = {"(": ")", "[": "]", "{": "}", "<": ">"}
_LEXEME = re.compile(
    r"""//[^\n]* | /\*.*?\*/ | ^[ \t]*\#(?:\\\n|[^\n])*   # a comment or a directive: no lexeme
    | ((?:u8|[uUL])?R"(?P<mark>[^()\\\s]*)\(.*?\)(?P=mark)" | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])+'
    | [A-Za-z_]\w* | \.?\d[\w.']* | :: | -> | \S)""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)


def tokens_of(text: str) -> Tokens:
    """The tokens of `text`, without preprocessor directives. A name, a number and a string are one token each."""
    return _TOKEN.findall(_DIRECTIVE.sub("", text))


class Lexeme(NamedTuple):
    """A token and where it begins in the text."""

    token: str
    place: int


def lexemes_of(text: str, start: int = 0, end: int | None = None) -> Iterator[Lexeme]:
    """The tokens of text[start:end] in their places, without comments and directives."""
    for match in _LEXEME.finditer(text, start, len(text) if end is None else end):
        if match[1]:
            yield Lexeme(match[1], match.start(1))


def partners(tokens: Sequence[str]) -> dict[int, int]:
    """Return the index of the closing bracket for each (, [ and {. A closing bracket without a partner is ignored."""
    close, opened = {}, []
    for i, token in enumerate(tokens):
        if token in ("(", "[", "{"):
            opened.append(i)
        elif token in (")", "]", "}"):
            kinds = [_CLOSE[tokens[each]] for each in opened]
            if token in kinds:
                while _CLOSE[tokens[opened[-1]]] != token:
                    opened.pop()
                close[opened.pop()] = i
    return close


def strip_comments(source: str) -> str:
    """`source` with every comment one space, and lines that end in a backslash joined."""
    return _COMMENT.sub(lambda match: match[1] or " ", source.replace("\\\n", " "))


def live_branches(text: str, defines: Mapping[str, str]) -> str:
    """`text` without the branches of #if, #ifdef, … that are certain not to be taken; `defines` is the command line.

    Kept are all branches of a condition that cannot be told from `text` and `defines`, such as __CUDA_ARCH__ >= 900.
    """
    lines, kept = text.split("\n"), []
    state: dict[str, str | bool | None] = dict(defines)  # a macro's text, False if it is undefined, None if unknown
    later = [match[2].split("(")[0].split()[0] for match in map(_LINE.match, lines) if match and match[1] == "define"]
    branches: list[tuple[Truth, Truth]] = []  # is this branch taken, was neither this one nor one before it

    def look_up(name: str) -> str | bool | None:
        # a compiler's or NVIDIA's macro is unknown, and so is one that a file may define before it includes this text
        unknown = name.startswith(("_", "CUDA", "NDEBUG", "true")) or name in later
        return state.get(name, None if unknown else False)

    def value(name: str) -> int | None:
        text = look_up(name)
        return 0 if text is False else None if text is None else evaluate(text)

    def defined(match: re.Match) -> str:
        text = look_up(match[1] or match[2])
        return "__unknown" if text is None else "0" if text is False else "1"

    def condition(written: str) -> Truth:
        number = evaluate(_DEFINED.sub(defined, written), value)
        return None if number is None else bool(number)

    for i, line in enumerate(lines):
        match = _LINE.match(line)
        kind, rest = match.groups() if match else ("", "")
        if kind in ("if", "ifdef", "ifndef"):
            name = rest.strip()
            if kind == "ifndef" and name not in state and later.count(name) == 1:
                following = next((line for line in lines[i + 1 :] if line.strip()), "")
                if re.match(rf"[ \t]*#[ \t]*define[ \t]+{name}\b", following):  # its only definition is this default
                    state[name] = False
            truth = condition(rest if kind == "if" else f"{'!' * (kind == 'ifndef')}defined {name}")
            branches.append((truth, _not(truth)))
        elif kind in ("elif", "else") and branches:
            untaken, truth = branches[-1][1], kind == "else" or condition(rest)
            branches[-1] = _all(untaken, truth), _all(untaken, _not(truth))
        elif kind == "endif" and branches:
            branches.pop()
        elif (taken := _all(*(branch for branch, _ in branches))) is not False:
            kept.append(line)
            if kind in ("define", "undef") and (macro := _SET.match(rest)):
                state[macro[1]] = (kind == "define" and macro[2]) if taken else None
    return "\n".join(kept)


def evaluate(expression: str, value: Callable[[str], int | None] = lambda name: None) -> int | None:
    """An integer constant expression of C, without bitwise operators; None if it cannot be told.

    `value` says what number a name stands for.
    """
    if "~" in expression:
        return None
    python = re.sub(r"!(?!=)", "~", expression.replace("&&", " and ").replace("||", " or "))  # ~ binds as tightly as !
    try:
        return _number(ast.parse(_NUMBER.sub(r"\1", python).strip(), mode="eval").body, value)
    except (SyntaxError, ZeroDivisionError):
        return None


def _number(node: ast.expr, value: Callable[[str], int | None]) -> int | None:
    match node:
        case ast.Constant(int(number)):
            return number
        case ast.Name(name):
            return value(name)
        case ast.UnaryOp(operation, operand) if type(operation) in _UNARY:
            number = _number(operand, value)
            return None if number is None else int(_UNARY[type(operation)](number))
        case ast.BoolOp(ast.And(), operands):
            return _all(*(_number(operand, value) for operand in operands))
        case ast.BoolOp(ast.Or(), operands):
            return _not(_all(*(_not(_number(operand, value)) for operand in operands)))
        case ast.BinOp(left, operation, right) | ast.Compare(left, [operation], [right]) if type(operation) in _BINARY:
            left, right = _number(left, value), _number(right, value)
            return None if None in (left, right) else int(_BINARY[type(operation)](left, right))
    return None


def _all(*truths: Truth) -> Truth:
    """Whether all are true; None is unknown."""
    return False if any(t is not None and not t for t in truths) else None if None in truths else True


def _not(truth: Truth) -> Truth:
    return None if truth is None else not truth


def matching(tokens: Tokens, start: int) -> int:
    """Return the index of the bracket that closes `start`. Angle brackets count only inside angle brackets."""
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
    """Return `tokens` cut at the commas outside all brackets."""
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
    """Return `tokens` with every known name replaced by its definition, and likewise inside definitions."""
    result: Tokens = []
    for token in tokens:
        if token in known and token not in inside:
            result += substitute(known[token], known, inside | {token})
        else:
            result.append(token)
    return result
