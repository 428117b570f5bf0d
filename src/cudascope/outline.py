"""A CUDA source as its outline: the declarations that stand outside of functions, and the members of its classes.

Found by their tokens alone: no type is looked up, and no macro known but those that are named as device code.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from cudascope.tokens import NAME, Lexeme, partners

DEVICE_WORDS = {"__device__", "__global__", "constexpr", "consteval"}
CONSTANT_WORDS = {"__constant__", "__shared__", "__managed__", "const", "concept"}
_STAY_IN_CLASS = {"virtual", "override", "default", "delete", "using", "typedef", "static_assert"}
_CLASS_KEYS = {"struct", "class", "union", "enum"}
_WITH_BRACKETS = {
    "__attribute__",
    "__declspec",
    "alignas",
    "decltype",
    "noexcept",
    "explicit",
    "__launch_bounds__",
    "__cluster_dims__",
    "__maxnreg__",
    "__block_size__",
    "__align__",
    "C10_LAUNCH_BOUNDS_1",  # torch's, in a text whose macros stay
    "C10_LAUNCH_BOUNDS_2",
}
_AFTER_PARAMETERS = {"const", "volatile", "noexcept", "override", "final", "try", "requires", "throw"} | _WITH_BRACKETS
_AFTER_NAME = {";", ",", "=", "[", "{", "(", ":"}
_NO_NAME = {"operator", "const", "static", "inline", "extern", "typename", "final", "void", "unsigned", "int", "float"}


class Piece(NamedTuple):
    """A declaration: lexemes start to end, the words of its name, and what decides whether a kernel needs it."""

    start: int
    end: int
    names: frozenset[str]
    on_device: bool
    namespace: tuple[str, ...] = ()  # an unnamed one has no part in it
    is_function: bool = False
    is_variable: bool = False
    body: int | None = None  # the brace that opens the body of a function
    class_body: int | None = None
    parameters: int | None = None  # the bracket that opens the parameters of a function
    always: bool = False
    dropped: tuple[tuple[int, int], ...] = ()  # the members of a class that are for the host

    @property
    def is_operator(self) -> bool:
        return self.is_function and "operator" in self.names


class Outline:
    """The pieces of a source. `is_device` are macros that make device code, beside CUDA's own words."""

    def __init__(self, lexemes: Sequence[Lexeme], is_device: Iterable[str] = ()) -> None:
        self.lexemes = lexemes
        self.tokens = [lexeme.token for lexeme in lexemes]
        self.close = partners(self.tokens)
        self._device_words = DEVICE_WORDS.union(is_device)
        self.pieces = list(self._pieces(0, len(self.tokens)))

    def members(self, piece: Piece) -> list[Piece]:
        """The members of a class; of any other piece none."""
        if piece.class_body is None:
            return []
        return list(self._members(piece.class_body + 1, self.close.get(piece.class_body, piece.end)))

    def _pieces(self, i: int, stop: int) -> Iterator[Piece]:
        scopes: list[list[str]] = []  # of each brace that is open, the namespace it opened
        while i < stop:
            opened = self._opened(i)
            if opened is not None:
                words = filter(NAME.fullmatch, self.tokens[i:opened])
                scopes.append([word for word in words if word not in ("inline", "namespace", "extern")])
                i = opened
            elif self.tokens[i] in (";", "}"):
                if self.tokens[i] == "}" and scopes:
                    scopes.pop()
                i += 1
            else:
                piece = self._piece(i, stop)
                yield piece._replace(namespace=tuple(name for scope in scopes for name in scope))
                i = piece.end

    def _opened(self, i: int) -> int | None:
        """Return the index after the brace of `namespace a {` or `extern "C" {`, if one begins at `i`."""
        i += self.tokens[i] == "inline"
        if self.tokens[i : i + 3] == ["extern", '"C"', "{"]:
            return i + 3
        if self.tokens[i : i + 1] != ["namespace"]:
            return None
        i += 1
        while i < len(self.tokens) and (self.tokens[i] in ("::", "[") or NAME.fullmatch(self.tokens[i])):
            i = self.close.get(i, i) + 1  # its name, attributes
        return i + 1 if self.tokens[i : i + 1] == ["{"] else None

    def _piece(self, start: int, stop: int, in_class: bool = False) -> Piece:
        tokens, i = self.tokens, start
        is_instance = tokens[i : i + 1] == ["template"] and tokens[i + 1 : i + 2] != ["<"]
        outer: list[int] = []  # the tokens in no bracket
        parameters = class_body = function_body = None
        assigned = initialising = False
        while i < stop:
            token = tokens[i]
            if token in (";", "}"):
                i += token == ";"
                break
            outer.append(i)
            if token in _WITH_BRACKETS and tokens[i + 1 : i + 2] == ["("]:
                i = self._after(i + 1, stop)
            elif token == "operator":
                i += 3 if tokens[i + 1 : i + 3] == ["(", ")"] else 1
                while i < stop and tokens[i] not in ("(", ";"):
                    i += 1
            elif token == "[":  # the parentheses in the length of an array do not belong to a function
                i = self._after(i, stop)
            elif token == "<" and not assigned:
                i = self.after_angle(i, stop)
            elif token == "(":
                if parameters is None and not assigned:
                    parameters = i
                i = self._after(i, stop)
                is_macro = parameters == start + 1 and not in_class
                if is_macro and i < stop and NAME.fullmatch(tokens[i]) and tokens[i] not in _AFTER_PARAMETERS:
                    return Piece(start, i, frozenset(), False)  # a macro's call, with no ; behind it
            elif token == "{":
                has_class = parameters is None and not assigned
                if has_class and class_body is None and any(tokens[j] in _CLASS_KEYS for j in outer):
                    class_body = i
                elif parameters is not None and not assigned:
                    is_member = initialising and (NAME.fullmatch(tokens[i - 1]) or tokens[i - 1] == ">")
                    function_body = None if is_member else i
                i = self._after(i, stop)
                if function_body is not None:
                    break
            else:
                assigned |= token == "="
                initialising |= token == ":" and parameters is not None
                i += 1
        words = [tokens[j] for j in outer]
        while words[:2] == ["template", "<"]:
            del words[:2]
        if is_instance or words[:1] in (["static_assert"], ["asm"], ["__asm__"]):
            return Piece(start, i, frozenset(), False)
        if words[:2] == ["using", "namespace"]:
            return Piece(start, i, frozenset(), True, always=True)
        if class_body is not None:
            names, dropped = self._class(outer, class_body)
            return Piece(start, i, names, True, dropped=dropped, class_body=class_body)
        is_device = not self._device_words.isdisjoint(words)
        if words[0] in ("using", "typedef", "namespace") or (words[0] in _CLASS_KEYS and parameters is None):
            return Piece(start, i, self._declared(start, i, outer), True)
        if parameters is not None and (function_body is not None or not assigned or in_class):
            names = self._function_names(outer, parameters)
            return Piece(start, i, names, is_device, is_function=True, body=function_body, parameters=parameters)
        is_constant = not CONSTANT_WORDS.isdisjoint(words)
        return Piece(start, i, self._declared(start, i, outer), is_device or is_constant, is_variable=True)

    def _class(self, outer: Sequence[int], body: int) -> tuple[frozenset[str], tuple[tuple[int, int], ...]]:
        tokens, end = self.tokens, self.close.get(body, len(self.tokens))
        key = next(j for j in outer if tokens[j] in _CLASS_KEYS)
        colon = next((j for j in outer if j > key and tokens[j] == ":"), body)
        name = [tokens[j] for j in outer if key < j < min(colon, body) and NAME.fullmatch(tokens[j])]
        names = {word for word in name[-2:] if word not in _CLASS_KEYS | {"final"}}
        names |= {tokens[j] for j in outer if j > end and NAME.fullmatch(tokens[j])}
        if tokens[key] == "enum":
            return frozenset(names | set(filter(NAME.fullmatch, tokens[body:end]))), ()
        return frozenset(names), tuple(self._host_members(body, end))

    def _members(self, i: int, stop: int) -> Iterator[Piece]:
        while i < stop:
            if self.tokens[i] in ("public", "private", "protected", ";", ":", "}"):
                i += 1
                continue
            piece = self._piece(i, stop, in_class=True)
            yield piece
            i = max(piece.end, i + 1)

    def _host_members(self, body: int, stop: int) -> Iterator[tuple[int, int]]:
        for piece in self._members(body + 1, stop):
            words = self.tokens[piece.start : piece.body or piece.end]
            if piece.dropped:
                yield from piece.dropped
            elif piece.is_function and not piece.on_device and _STAY_IN_CLASS.isdisjoint(words):
                yield piece.start, piece.end

    def _function_names(self, outer: Sequence[int], parameters: int) -> frozenset[str]:
        """The words of a function's name: `f`, `operator`; of a member defined outside, the class if that says more."""
        before = [self.tokens[j] for j in outer if j < parameters]
        words = [j for j, word in enumerate(before) if NAME.fullmatch(word)]
        if not words:
            return frozenset()
        at = before.index("operator") if "operator" in before else words[-1]
        if at >= 2 and before[at - 1] == "::" and before[at] == "operator":
            return frozenset(before[j] for j in words if j < at and j >= at - 3)
        return frozenset({before[at]})

    def _declared(self, start: int, end: int, outer: Sequence[int]) -> frozenset[str]:
        """The names that a variable, an alias or a forward declaration introduces, and perhaps a few more."""
        tokens = self.tokens
        if "using" in (tokens[j] for j in outer):
            words = [tokens[j] for j in outer if NAME.fullmatch(tokens[j])]
            return frozenset({words[words.index("using") + 1] if "=" in tokens[start:end] else words[-1]})
        names = {
            tokens[j]
            for j in outer
            if NAME.fullmatch(tokens[j]) and tokens[j] not in _NO_NAME and tokens[j + 1] in _AFTER_NAME
        }
        pointers = (tokens[j + 1] for j in range(start, end - 2) if tokens[j] == "*" and tokens[j + 2] == ")")
        return frozenset(names | set(filter(NAME.fullmatch, pointers)))

    # -------------------------------------------------------------------------------------------- brackets

    def _after(self, opening: int, stop: int) -> int:
        return min(self.close.get(opening, stop), stop - 1) + 1

    def after_angle(self, i: int, stop: int) -> int:
        """Return the index after the > that closes the < at `i`, or i + 1 if the < is a comparison."""
        depth, j = 0, i
        while j < stop and self.tokens[j] not in (";", "{", "}", ")"):
            depth += (self.tokens[j] == "<") - (self.tokens[j] == ">")
            if depth == 0:
                return j + 1
            j = self._after(j, stop) if self.tokens[j] in ("(", "[") else j + 1
        return i + 1
