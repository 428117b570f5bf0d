"""CUDA C++ source as tokens: enough of C++'s grammar to find a declaration and to say what a name stands for."""

import operator
import re
from collections.abc import Mapping

Tokens = list[str]

_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|[A-Za-z_]\w*|\d[\w.\']*|::|\S')
_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\')', re.DOTALL)
_DIRECTIVE = re.compile(r"^[ \t]*#.*$", re.MULTILINE)
_LINE = re.compile(r"[ \t]*#[ \t]*(\w+)[ \t]*(.*)")
_SET = re.compile(r"(\w+)[ \t]*(.*)")
_TERM = re.compile(r"\s*(!?)\s*(defined\s)?\s*(\w+)(?:\s*([=!]=|[<>]=?)\s*(\w+))?\s*")
_COMPARE = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_CLOSE = {"(": ")", "[": "]", "{": "}", "<": ">"}


def tokens_of(text: str) -> Tokens:
    """The tokens of `text`, without preprocessor directives. A name, a number and a string are one token each."""
    return _TOKEN.findall(_DIRECTIVE.sub("", text))


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
    branches: list[tuple[bool | None, bool | None]] = []  # is this branch taken, was this one or one before it

    def look_up(name: str) -> str | bool | None:
        # a compiler's or NVIDIA's macro is unknown, and so is one that a file may define before it includes this text
        unknown = name.startswith(("_", "CUDA", "NDEBUG", "true")) or name in later
        return state.get(name, None if unknown else False)

    def number(token: str) -> int | None:
        value = token if token[0].isdigit() else look_up(token)
        try:
            return 0 if value is False else None if value is None else int(value.strip().rstrip("uUlL"), 0)
        except ValueError:
            return None

    def term(written: str) -> bool | None:
        match = _TERM.fullmatch(written)
        if not match or (match[4] and (match[1] or match[2])):
            return None
        if match[4]:
            left, right = number(match[3]), number(match[5])
            return None if None in (left, right) else _COMPARE[match[4]](left, right)
        value = look_up(match[3]) if match[2] else number(match[3])
        truth = None if value is None else value is not False if match[2] else bool(value)
        return _not(truth) if match[1] else truth

    def condition(written: str) -> bool | None:
        written = re.sub(r"\bdefined\s*\(\s*(\w+)\s*\)", r"defined \1", written)
        if "(" in written:
            return None
        return _not(_all(*(_not(_all(*map(term, part.split("&&")))) for part in written.split("||"))))

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
            branches.append((truth, truth))
        elif kind in ("elif", "else") and branches:
            before, truth = branches[-1][1], kind == "else" or condition(rest)
            branches[-1] = _all(_not(before), truth), _not(_all(_not(before), _not(truth)))
        elif kind == "endif" and branches:
            branches.pop()
        elif (taken := _all(*(branch for branch, _ in branches))) is not False:
            kept.append(line)
            if kind in ("define", "undef") and (macro := _SET.match(rest)):
                state[macro[1]] = (kind == "define" and macro[2]) if taken else None
    return "\n".join(kept)


def _all(*truths: bool | None) -> bool | None:
    """Whether all are true; None is unknown."""
    return False if False in truths else None if None in truths else True


def _not(truth: bool | None) -> bool | None:
    return None if truth is None else not truth


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
