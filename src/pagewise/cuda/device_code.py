"""The device code of a CUDA source: what a kernel needs of it, and what is only for the host.

A source is cut into the declarations that stand outside of functions. Of these a kernel needs the functions, types,
variables and aliases whose names it mentions, those that they mention, and so on; everything else becomes blank, so
that lines stay where they are. Two rules of CUDA say what is host code and never needed: a function that is neither
`__device__`, `__global__` nor constexpr, and a variable that is neither of these nor constant.

No types are looked up: a declaration is needed if anything needed has a word of its name. That may keep more than it
must, never less.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pagewise.cuda.tokens import NAME, Lexeme, partners

DEVICE_WORDS = {"__device__", "__global__", "constexpr", "consteval"}
CONSTANT_WORDS = {"__constant__", "__shared__", "__managed__", "const", "concept"}
_STAY_IN_CLASS = {"virtual", "override", "default", "delete", "using", "typedef", "static_assert"}
_CLASS_KEYS = {"struct", "class", "union", "enum"}
_WITH_BRACKETS = {"__attribute__", "__declspec", "alignas", "decltype", "noexcept", "explicit", "__launch_bounds__",
                  "__cluster_dims__", "__maxnreg__", "__block_size__", "__align__"}  # fmt: skip
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


class DeviceCode:
    """`text` as declarations. What lies between its `lexemes`, a system's headers for example, stays as it is."""

    def __init__(self, text: str, lexemes: Sequence[Lexeme], is_device: Iterable[str] = ()) -> None:
        self.text, self.lexemes = text, lexemes
        self.tokens = [lexeme.token for lexeme in lexemes]
        self.close = partners(self.tokens)
        self._device_words = DEVICE_WORDS.union(is_device)
        self.pieces = list(self._pieces(0, len(self.tokens)))

    def needed_by(self, name: str) -> list[Piece]:
        """The pieces that kernel `name` needs, itself among them, and those that are always kept."""
        by_name: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            for word in piece.names if piece.on_device and not piece.is_operator else ():
                by_name.setdefault(word, []).append(piece)
        needed = {piece.start: piece for piece in self.pieces if piece.always}
        seen: set[str] = set()

        def follow(words: Iterable[str]) -> None:
            new = set(words) - seen
            while new:
                seen.update(new)
                found = {piece.start: piece for word in new for piece in by_name.get(word, ())}
                found = {start: piece for start, piece in found.items() if start not in needed}
                needed.update(found)
                new = {word for piece in found.values() for word in self._words(piece)} - seen

        follow(NAME.findall(name))
        operators = [piece for piece in self.pieces if piece.is_operator and piece.on_device]
        while ready := [each for each in operators if each.start not in needed and self._types(each, by_name) <= seen]:
            for piece in ready:  # a + b names no operator: it is needed where the types of its operands are
                needed[piece.start] = piece
                follow(self._words(piece))
        return sorted(needed.values())

    def only(self, pieces: Sequence[Piece], changes: Iterable[tuple[int, int, str]] = ()) -> str:
        """The text, with `changes`, and with every other piece and what `pieces` drop of their classes left blank."""
        kept = {piece.start for piece in pieces}
        blank = [(piece.start, piece.end) for piece in self.pieces if piece.start not in kept]
        blank += [span for piece in pieces for span in piece.dropped]
        return replaced(self.text, [*changes, *((*self.place(*span), "") for span in blank)])

    def place(self, start: int, end: int) -> tuple[int, int]:
        """Where lexemes start to end lie in the text."""
        last = self.lexemes[end - 1]
        return self.lexemes[start].place, last.place + len(last.token)

    # -------------------------------------------------------------------------------------------- words

    def _words(self, piece: Piece) -> Iterator[str]:
        at = piece.start
        for start, end in (*piece.dropped, (piece.end, piece.end)):
            yield from filter(NAME.fullmatch, self.tokens[at:start])
            at = end

    def _types(self, operator: Piece, declared: Iterable[str]) -> set[str]:
        parameters = self.tokens[operator.parameters : self.close[operator.parameters]]
        first = self.tokens[operator.start : operator.start + 2] == ["template", "<"]
        own = self.tokens[operator.start : self._after_angle(operator.start + 1, operator.end)] if first else []
        return {word for word in parameters if word in declared and word not in own}

    # -------------------------------------------------------------------------------------------- declarations

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
        """What follows the brace of `namespace a {` or `extern "C" {`, if one begins at `i`."""
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
            elif token == "[":  # the length of an array may be in parentheses, which are no function's then
                i = self._after(i, stop)
            elif token == "<" and not assigned:
                i = self._after_angle(i, stop)
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

    def members(self, piece: Piece) -> list[Piece]:
        """The members of a class; of any other piece none."""
        if piece.class_body is None:
            return []
        return list(self._members(piece.class_body + 1, self.close.get(piece.class_body, piece.end)))

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
            tokens[j] for j in outer
            if NAME.fullmatch(tokens[j]) and tokens[j] not in _NO_NAME and tokens[j + 1] in _AFTER_NAME
        }  # fmt: skip
        pointers = (tokens[j + 1] for j in range(start, end - 2) if tokens[j] == "*" and tokens[j + 2] == ")")
        return frozenset(names | set(filter(NAME.fullmatch, pointers)))

    # -------------------------------------------------------------------------------------------- brackets

    def _after(self, opening: int, stop: int) -> int:
        return min(self.close.get(opening, stop), stop - 1) + 1

    def _after_angle(self, i: int, stop: int) -> int:
        """What follows the > that closes the < at `i`; i + 1 if it is a comparison."""
        depth, j = 0, i
        while j < stop and self.tokens[j] not in (";", "{", "}", ")"):
            depth += (self.tokens[j] == "<") - (self.tokens[j] == ">")
            if depth == 0:
                return j + 1
            j = self._after(j, stop) if self.tokens[j] in ("(", "[") else j + 1
        return i + 1


_BLANKED = re.compile(r"^([ \t]*#(?![ \t]*pragma)(?:\\\n|[^\n])*)|[^\n]+", re.MULTILINE)


def replaced(text: str, changes: Iterable[tuple[int, int, str]]) -> str:
    """`text` with each (start, end, new) put in, the outer one of two; of what was there lines and directives stay."""
    parts, at = [], 0
    for start, end, new in sorted(changes, key=lambda change: (change[0], -change[1])):
        if start < at:
            continue
        parts += [text[at:start], new, _BLANKED.sub(lambda match: match[1] or "", text[start:end])]
        at = end
    return "".join((*parts, text[at:]))
