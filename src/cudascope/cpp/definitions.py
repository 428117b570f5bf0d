"""The names of a source: macros, constants, enumerators, types and template arguments.

A macro stands for tokens: after `#define N 1 + 2`, the expression `N * 2` is 5. A constant, an enumerator and a
template argument stand for a value: after `constexpr int N = 1 + 2;`, `N * 2` is 6.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Optional

from cudascope.cpp.constants import POINTER, RANKS, SIZES, UNKNOWN, Reader, Unreadable, Value, converted, fits
from cudascope.cpp.tokens import Tokens, partners, split, substitute, text_of
from cudascope.cpp.types import INTEGERS, canonical_type

_BUILT_IN = {INTEGERS[name]: name for name in ("signed char", "unsigned char", "short", "unsigned short", *RANKS[:4])}
_NOT_IN_A_TYPE = {"const", "volatile", "typename", "struct", "class", "static", "inline", "constexpr", "constinit"}
_NOT_IN_A_TYPE |= {"extern", "__device__", "__host__", "__constant__", "__managed__", "alignas", "__attribute__"}


class ConstantError(ValueError):
    """An expression to which C++ gives no value: an overflow, a division by zero, a shift by too many bits."""


class Definition(NamedTuple):
    """The declaration of a name, in tokens."""

    tokens: Tokens  # a type; the expression of a constant; the name of an enumerator
    type: Tokens | None = None  # of a constant, or the one that an enumeration is given. None: the name is a type
    enumerators: tuple[tuple[str, Tokens], ...] = ()  # all of the enumeration, each with its expression


class Scope:
    """The meanings of names in a source, or in a template inside of the scope `outer`."""

    def __init__(
        self,
        macros: Mapping[str, Tokens],
        definitions: Mapping[str, Definition | None],  # by each way to qualify a name; None: they differ
        outer: Optional["Scope"] = None,
    ) -> None:
        self._macros, self._definitions, self._outer = macros, definitions, outer
        self._values = {"true": Value("bool", 1), "false": Value("bool", 0)}
        self._types: dict[str, str] = {}

    def inner(self) -> "Scope":
        """A scope in this one, still without names of its own."""
        return Scope(self._macros, {}, self)

    def bind(self, name: str, value: Value, type: str = "") -> None:
        """Let `name` stand for a value or a type."""
        self._values[name], self._types[name] = value, type

    def evaluate(self, expression: Tokens, type: str | None = None) -> Value:
        """The value of a constant expression, converted to `type` if given. ConstantError: C++ gives it no value."""
        try:
            value = Reader(substitute(expression, self._macros), self.value, self.type).read()
            return value if type is None else converted(value, type)
        except Unreadable:
            return Value(type or "", None)
        except ArithmeticError as error:
            raise ConstantError(f"`{text_of(expression)}` {error}") from None

    def value(self, name: str) -> Value:
        """The value of a name, which may be qualified: "n::N"."""
        if name not in self._values:
            if name not in self._definitions:
                return self._outer.value(name) if self._outer else UNKNOWN
            self._values[name] = UNKNOWN  # as long as it is looked for: it may need itself
            definition = self._definitions[name]
            if definition is None or definition.type is None:
                return UNKNOWN
            try:
                if definition.enumerators:
                    self._values[name] = self._enumerated(definition)[definition.tokens[0]]
                else:
                    type = None if "auto" in definition.type else self.type(definition.type)
                    self._values[name] = self.evaluate(definition.tokens, type)
            except ConstantError:
                del self._values[name]
                raise
        return self._values[name]

    def type(self, tokens: Tokens) -> str:
        """The type that `tokens` name, if `SIZES` has it; else ""."""
        words = [token for token in substitute(tokens, self._macros) if token not in _NOT_IN_A_TYPE]
        if words[-1:] == ["*"]:
            return POINTER
        if (named := self._named_type("".join(words).removeprefix("::"))) is not None:
            return named
        known = canonical_type(words)
        if known in INTEGERS and known.endswith("_t"):
            return _BUILT_IN[INTEGERS[known]]
        return known if known in SIZES else ""

    def _named_type(self, name: str) -> str | None:
        if name not in self._types:
            if name not in self._definitions:
                return self._outer._named_type(name) if self._outer else None
            definition = self._definitions[name]
            self._types[name] = ""
            if definition is not None and definition.type is None:
                self._types[name] = self.type(definition.tokens)
        return self._types[name]

    def _enumerated(self, enumeration: Definition) -> dict[str, Value]:
        """The enumerators of an enumeration. If it is given no type, one follows from all values together."""
        inside, values = self.inner(), {}
        given = self.type(enumeration.type)
        last = Value(given or "int", -1)
        for name, expression in enumeration.enumerators:
            if expression:
                last = inside.evaluate(expression, given or None)
            elif last.number is not None:
                type = next((each for each in (last.type, *RANKS) if fits(last.number + 1, each)), "")
                last = Value(type, last.number + 1)
            inside.bind(name, last)
            values[name] = last
        if given:
            return values
        numbers = [value.number for value in values.values()]
        if enumeration.type or None in numbers:  # its type is unknown
            return dict.fromkeys(values, UNKNOWN)
        type = next((each for each in RANKS if all(fits(number, each) for number in numbers)), "")
        return {name: converted(value, type) for name, value in values.items()}


def constants_of(declaration: Tokens) -> Iterator[tuple[str, Definition]]:
    """The constants that a declaration of variables defines: `constexpr int A = 1, B{2}`, without a semicolon."""
    type: Tokens = []
    for i, part in enumerate(split(declaration)):
        at = next((j for j, token in enumerate(part) if token in ("=", "{")), 0)
        if i == 0:
            type = _outside_brackets(part[: max(at - 1, 0)])
        if not at or not part[at - 1].isidentifier() or (i > 0 and at > 1):  # an array, a pointer
            continue
        value = part[at + 1 :] if part[at] == "=" else part[at:]
        if value[:1] == ["{"] and value[-1] == "}":
            value = value[1:-1] or ["0"]
        yield part[at - 1], Definition(value, type)


def enumerators_of(declaration: Tokens) -> Iterator[tuple[str, Definition]]:
    """The enumerators that a declaration defines, by each way to name them: `A` and `E::A`."""
    start = 2 if declaration[:1] == ["typedef"] else 1
    if declaration[start - 1 : start] != ["enum"] or "{" not in declaration:
        return
    body = declaration.index("{")
    head = _outside_brackets(declaration[start:body])
    if "=" in head:  # a variable
        return
    is_scoped = head[:1] in (["class"], ["struct"])
    colon = head.index(":") if ":" in head else len(head)
    name = [word for word in head[is_scoped:colon] if word.isidentifier()]
    type = head[colon + 1 :] or ["int"] * is_scoped
    parts = split(declaration[body + 1 : partners(declaration).get(body, len(declaration))])
    pairs = tuple((part[0], part[part.index("=") + 1 :] if "=" in part else []) for part in parts if part)
    for each, _ in pairs:
        definition = Definition([each], type, pairs)
        yield "::".join((*name, each)), definition
        if not is_scoped:
            yield each, definition


def _outside_brackets(tokens: Tokens) -> Tokens:
    close, i, outside = partners(tokens), 0, []
    while i < len(tokens):
        if i not in close:
            outside.append(tokens[i])
        i = close.get(i, i) + 1
    return outside
