"""The declarations that stand outside of functions, and the members of classes.

They are found by their tokens alone: no type is looked up, and no macro is known but those that make device code.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from cudascope.cpp.tokens import Tokens, after_angle

DEVICE_WORDS = {"__device__", "__global__", "constexpr", "consteval"}
CONSTANT_WORDS = {"__constant__", "__shared__", "__managed__", "const", "concept"}
ATTRIBUTES = {"__launch_bounds__", "__maxnreg__", "__cluster_dims__", "__block_size__", "__attribute__", "alignas"}
_WITH_BRACKETS = ATTRIBUTES | {"__declspec", "decltype", "noexcept", "explicit", "__align__"}
_WITH_BRACKETS |= {"C10_LAUNCH_BOUNDS_1", "C10_LAUNCH_BOUNDS_2"}  # torch's, in a text whose macros stay
_STAY_IN_CLASS = {"virtual", "override", "default", "delete", "using", "typedef", "static_assert"}
_CLASS_KEYS = {"struct", "class", "union", "enum"}
_AFTER_PARAMETERS = {"const", "volatile", "noexcept", "override", "final", "try", "requires", "throw"} | _WITH_BRACKETS
_AFTER_NAME = {";", ",", "=", "[", "{", "(", ":"}
_NO_NAME = {"operator", "const", "static", "inline", "extern", "typename", "final", "void", "unsigned", "int", "float"}


class Piece(NamedTuple):
    """A declaration: tokens start to end, the words of its name, and what decides whether a kernel needs it."""

    start: int
    end: int
    names: frozenset[str] = frozenset()
    on_device: bool = False
    namespace: tuple[str, ...] = ()  # an unnamed one has no part in it
    is_function: bool = False
    is_variable: bool = False
    body: int | None = None  # the brace that opens the body of a function
    parameters: int | None = None  # the bracket that opens the parameters of a function
    always: bool = False
    members: tuple["Piece", ...] = ()  # of a class

    @property
    def is_operator(self) -> bool:
        return self.is_function and "operator" in self.names

    @property
    def host_members(self) -> list["Piece"]:
        """The members of a class, and of classes in it, that are for the host."""
        host = [each for each in self.members if each.is_function and not each.on_device]
        return sorted(sum((each.host_members for each in self.members), host))

    @property
    def dropped(self) -> list[tuple[int, int]]:
        """Where these members begin and end."""
        return [(each.start, each.end) for each in self.host_members]


class Outline:
    """The pieces among `tokens`, of which `close` says where each bracket ends. `device_words` make device code."""

    def __init__(self, tokens: Tokens, close: Mapping[int, int], device_words: Collection[str] = DEVICE_WORDS) -> None:
        self.tokens, self.close, self.device_words = tokens, close, device_words
        self.pieces = list(self._pieces())

    def after(self, i: int, stop: int) -> int:
        """Return the index after the bracket that opens at `i`; a < may be a comparison."""
        if self.tokens[i] == "<":
            return after_angle(self.tokens, self.close, i, stop)
        return min(self.close.get(i, stop), stop - 1) + 1

    def _pieces(self) -> Iterator[Piece]:
        i, scopes = 0, []  # of each brace that is open, the namespace it opened
        while i < len(self.tokens):
            opened = self._opened(i)
            if opened is not None:
                names, i = opened
                scopes.append(names)
            elif self.tokens[i] in (";", "}"):
                if self.tokens[i] == "}" and scopes:
                    scopes.pop()
                i += 1
            else:
                piece = _Declaration(self, i, len(self.tokens)).piece()
                yield piece._replace(namespace=tuple(name for scope in scopes for name in scope))
                i = piece.end

    def _opened(self, i: int) -> tuple[list[str], int] | None:
        """The names in `namespace a::b {` or `extern "C" {` and the index after the brace, if one begins at `i`."""
        if self.tokens[i] == "extern" and self.tokens[i + 2 : i + 3] == ["{"]:
            return [], i + 3
        i += self.tokens[i] == "inline"
        if self.tokens[i : i + 1] != ["namespace"]:
            return None
        i, names = i + 1, []
        while i < len(self.tokens) and (self.tokens[i] in ("::", "[") or self.tokens[i].isidentifier()):
            names += [self.tokens[i]] if self.tokens[i] not in ("::", "[", "inline") else []
            i = self.close.get(i, i) + 1  # its name, attributes
        return (names, i + 1) if self.tokens[i : i + 1] == ["{"] else None

    def members(self, body: int, stop: int) -> Iterator[Piece]:
        """The members of the class whose body opens at `body`."""
        i = body + 1
        while i < stop:
            if self.tokens[i] in ("public", "private", "protected", ";", ":", "}"):
                i += 1
                continue
            piece = _Declaration(self, i, stop, in_class=True).piece()
            yield piece
            i = max(piece.end, i + 1)


class _Declaration:
    """One declaration: where its parts begin and where it ends."""

    def __init__(self, outline: Outline, start: int, stop: int, *, in_class: bool = False) -> None:
        self.outline, self.tokens, self.start, self.stop, self.in_class = outline, outline.tokens, start, stop, in_class
        self.outer: list[int] = []  # the tokens in no bracket
        self.parameters: int | None = None
        self.class_body: int | None = None
        self.body: int | None = None
        self.assigned = self.initialising = self.is_macro = False
        i = start
        while i < stop and self.tokens[i] not in (";", "}") and self.body is None and not self.is_macro:
            self.outer.append(i)
            i = self._step(i)
        ends_here = i < stop and self.tokens[i] == ";" and self.body is None and not self.is_macro
        self.end = i + ends_here

    def _step(self, i: int) -> int:
        """Take note of token `i` and return the index of the next one that is in no bracket."""
        token = self.tokens[i]
        if token == "operator":
            return self._after_operator(i)
        if token in ("(", "{"):
            self._note_bracket(i)
        if token in ("(", "{", "[") or (token == "<" and not self.assigned):
            after = self.outline.after(i, self.stop)
            self.is_macro = token == "(" and self._is_macro(after)
            return after
        if token == "__global__":  # a call of a macro before it was no list of parameters
            self.parameters = None
        self.assigned |= token == "="
        self.initialising |= token == ":" and self.parameters is not None
        return i + 1

    def _after_operator(self, i: int) -> int:
        i += 3 if self.tokens[i + 1 : i + 3] == ["(", ")"] else 1
        while i < self.stop and self.tokens[i] not in ("(", ";"):
            i += 1
        return i

    def _note_bracket(self, i: int) -> None:
        before = self.tokens[i - 1]
        if self.assigned:
            return
        if self.tokens[i] == "(":
            if self.parameters is None and before not in _WITH_BRACKETS:
                self.parameters = i
        elif self.parameters is not None:
            is_member = self.initialising and (before.isidentifier() or before == ">")
            self.body = None if is_member else i
        elif self.class_body is None and any(self.tokens[j] in _CLASS_KEYS for j in self.outer):
            self.class_body = i

    def _is_macro(self, after: int) -> bool:
        """Whether the bracket that ends here is a macro's call, with no ; behind it."""
        if self.parameters != self.start + 1 or self.in_class or after >= self.stop:
            return False
        return self.tokens[after].isidentifier() and self.tokens[after] not in _AFTER_PARAMETERS

    # -------------------------------------------------------------------------------------------- what it is

    def piece(self) -> Piece:
        tokens, start, end = self.tokens, self.start, self.end
        words = [tokens[j] for j in self.outer]
        while words[:2] == ["template", "<"]:
            del words[:2]
        is_instance = tokens[start] == "template" and tokens[start + 1 : start + 2] != ["<"]
        if self.is_macro or is_instance or words[:1] in ([], ["static_assert"], ["asm"], ["__asm__"]):
            return Piece(start, end)
        if words[:2] == ["using", "namespace"]:
            return Piece(start, end, on_device=True, always=True)
        if self.class_body is not None:
            return self._class(self.class_body)
        if words[0] in ("using", "typedef", "namespace") or (words[0] in _CLASS_KEYS and self.parameters is None):
            return Piece(start, end, self._declared(), on_device=True)
        on_device = not self.outline.device_words.isdisjoint(words)
        if self.parameters is not None and (self.body is not None or not self.assigned or self.in_class):
            on_device |= self.in_class and not _STAY_IN_CLASS.isdisjoint(words)
            names = self._function_names()
            return Piece(start, end, names, on_device, is_function=True, body=self.body, parameters=self.parameters)
        on_device = on_device or not CONSTANT_WORDS.isdisjoint(words)
        return Piece(start, end, self._declared(), on_device, is_variable=True)

    def _words(self, start: int, end: int) -> Iterator[str]:
        """The names among the tokens of start to end that are in no bracket."""
        return (self.tokens[j] for j in self.outer if start <= j < end and self.tokens[j].isidentifier())

    def _class(self, body: int) -> Piece:
        end = self.outline.close.get(body, len(self.tokens))
        key = next(j for j in self.outer if self.tokens[j] in _CLASS_KEYS)
        colon = next((j for j in self.outer if j > key and self.tokens[j] == ":"), body)
        name = [*self._words(key + 1, min(colon, body))]
        names = {word for word in name[-2:] if word not in _CLASS_KEYS | {"final"}} | {*self._words(end + 1, self.end)}
        members = () if self.tokens[key] == "enum" else tuple(self.outline.members(body, end))
        if not members:  # of an enum the names are known everywhere
            names |= set(filter(str.isidentifier, self.tokens[body:end]))
        return Piece(self.start, self.end, frozenset(names), on_device=True, members=members)

    def _function_names(self) -> frozenset[str]:
        """The words of a function's name: `f`, `operator`; of a member defined outside, the class if that says more."""
        before = [self.tokens[j] for j in self.outer if j < self.parameters]
        words = [j for j, word in enumerate(before) if word.isidentifier()]
        if not words:
            return frozenset()
        at = before.index("operator") if "operator" in before else words[-1]
        if at >= 2 and before[at - 1] == "::" and before[at] == "operator":
            return frozenset(before[j] for j in words if j < at and j >= at - 3)
        return frozenset({before[at]})

    def _declared(self) -> frozenset[str]:
        """The names that a variable, an alias or a forward declaration introduces, and perhaps a few more."""
        tokens, words = self.tokens, [*self._words(self.start, self.end)]
        if "using" in words:
            new = words[words.index("using") + 1 :]
            return frozenset(new[:1] if "=" in tokens[self.start : self.end] else new[-1:])
        pairs = [(tokens[j], tokens[j + 1]) for j in self.outer if j + 1 < len(tokens)]
        names = {word for word, after in pairs if word.isidentifier() and after in _AFTER_NAME}
        stars = (j for j in range(self.start, self.end - 2) if tokens[j] == "*" and tokens[j + 2] == ")")
        pointers = {tokens[j + 1] for j in stars if tokens[j + 1].isidentifier()}
        return frozenset((names - _NO_NAME) | pointers)
