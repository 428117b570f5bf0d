"""The branches of #if, #ifdef, … that a source takes, as far as its text and the command line tell."""

import itertools
import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from cudascope.cpp.constants import UNKNOWN, Value, condition
from cudascope.cpp.tokens import Tokens, Truth, every, negated, substitute, tokens_of

_PARTS = re.compile(r"#\s*(\w*)\s*(.*)", re.DOTALL)
_NAMED = re.compile(r"#\s*(\w*)\s*(\w*)")
_MACRO = re.compile(r"(\w+)(\(?)\s*(.*)", re.DOTALL)


class Macro(NamedTuple):
    """A #define that may be in force, in tokens. The body of one with parameters begins with them."""

    name: str
    has_parameters: bool
    body: Tokens
    place: int


class Conditions:
    """The conditions over the text at hand, which `follow` changes with each directive of those `written`.

    `defines` is the command line. Without it, every name may be defined, and only #if 0 is certain.
    """

    def __init__(self, written: Mapping[int, str], defines: Mapping[str, str] | None) -> None:
        directives = [(i, *_NAMED.match(text).groups()) for i, text in written.items()]
        defined = Counter(name for _, kind, name in directives if kind == "define")
        # `#ifndef N`, then the only definition of N: no text before this line defines N
        pairs = itertools.pairwise(directives)
        guards = {name for (i, kind, name), after in pairs if kind == "ifndef" and after == (i + 1, "define", name)}
        self._later = defined.keys() - {name for name in guards if defined[name] == 1}
        self._is_defined: dict[str, Truth] = dict.fromkeys(defines or {}, True)
        self._bodies = {name: tokens_of(text) for name, text in (defines or {}).items()}  # of those without parameters
        self._knows_defines = defines is not None
        self._open: list[tuple[Truth, Truth]] = []  # is this branch taken, is any after this one taken
        self.macros: list[Macro] = []

    @property
    def depth(self) -> int:
        """How many conditions are open."""
        return len(self._open)

    @property
    def taken(self) -> Truth:
        """Whether the text here is taken; None if that is unknown."""
        return every(*(taken for taken, _ in self._open))

    def follow(self, directive: str, place: int) -> str:
        """Take note of a directive. Return "if", "else" or "endif" where alternatives begin, change or end."""
        kind, rest = _PARTS.match(directive).groups()
        if kind in ("if", "ifdef", "ifndef"):
            truth = self._truth(rest if kind == "if" else f"{'!' * (kind == 'ifndef')}defined {rest}")
            self._open.append((truth, negated(truth)))
            return "if"
        if kind in ("elif", "else") and self._open:
            (ended, others), truth = self._open[-1], kind == "else" or self._truth(rest)
            self._open[-1] = every(others, truth), every(others, negated(truth))
            return "else" if ended is None else ""  # a branch that is certain has no alternative
        if kind == "endif" and self._open:
            self._open.pop()
            return "endif"
        if kind in ("define", "undef") and self.taken is not False and (macro := _MACRO.match(rest)):
            self._define(kind, *macro.groups(), place)
        return ""

    def _define(self, kind: str, name: str, parenthesis: str, body: str, place: int) -> None:
        self._bodies.pop(name, None)
        if kind == "define":
            macro = Macro(name, bool(parenthesis), tokens_of(body), place)
            self.macros.append(macro)
            if self.taken and not macro.has_parameters:
                self._bodies[name] = macro.body
        self._is_defined[name] = kind == "define" if self.taken else None

    def _truth(self, written: str) -> Truth:
        tokens = tokens_of(written)
        while "defined" in tokens:
            at = tokens.index("defined")
            end = at + (4 if tokens[at + 1 : at + 2] == ["("] else 2)
            truth = self._look_up("".join(tokens[at + 1 : end]).strip("()"))
            tokens[at:end] = ["__unknown" if truth is None else str(int(truth))]
        return condition(substitute(tokens, self._bodies), self._value)

    def _look_up(self, name: str) -> Truth:
        """Whether a macro is defined."""
        # a compiler's or NVIDIA's macro is unknown, and so is one that a file may define before it includes this text
        unknown = name.startswith(("_", "CUDA", "NDEBUG")) or name in self._later or not self._knows_defines
        return self._is_defined.get(name, None if unknown else False)

    def _value(self, name: str) -> Value:
        """The value of a name that no macro replaces: 0, unless a macro may replace it elsewhere."""
        if name == "defined" or self._look_up(name) is not False:
            return UNKNOWN
        return Value("long", int(name == "true"))
