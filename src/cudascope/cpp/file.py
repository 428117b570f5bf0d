"""A CUDA source, read once: what its names stand for, its kernels, and the pieces that it is made of.

Pieces are the declarations that stand outside of functions, and the members of classes. They are found by their tokens
alone: no type is looked up, and no macro is known but those that make device code.
"""

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from cudascope.cpp.conditions import Conditions, Macro
from cudascope.cpp.definitions import Definition, Scope, constants_of, enumerators_of
from cudascope.cpp.tokens import Lexemes, Tokens, after_angle, lexemes_of, partners, tokens_of

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
    name: int | None = None  # of a function: the last word of its name
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
    def kept(self) -> list[tuple[int, int]]:
        """Where the parts between these members begin and end."""
        host = self.host_members
        starts, ends = [self.start, *(each.end for each in host)], [*(each.start for each in host), self.end]
        return list(zip(starts, ends, strict=True))


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
            i += 3 if self.tokens[i + 1 : i + 3] == ["(", ")"] else 1
            return next((j for j in range(i, self.stop) if self.tokens[j] in ("(", ";")), self.stop)
        if token in ("(", "{") and not self.assigned:
            self._note_bracket(i)
        if token in ("(", "{", "[") or (token == "<" and not self.assigned):
            after = self.outline.after(i, self.stop)
            if token == "(" and self.parameters == self.start + 1 and not self.in_class and after < self.stop:
                # a name, brackets and a name: a macro's call with no ; behind it
                self.is_macro = self.tokens[after].isidentifier() and self.tokens[after] not in _AFTER_PARAMETERS
            return after
        if token == "__global__":  # a call of a macro before it was no list of parameters
            self.parameters = None
        self.assigned |= token == "="
        self.initialising |= token == ":" and self.parameters is not None
        return i + 1

    def _note_bracket(self, i: int) -> None:
        before = self.tokens[i - 1]
        if self.tokens[i] == "(":
            if self.parameters is None and before not in _WITH_BRACKETS:
                self.parameters = i
        elif self.parameters is not None:
            is_member = self.initialising and (before.isidentifier() or before == ">")
            self.body = None if is_member else i
        elif self.class_body is None and any(self.tokens[j] in _CLASS_KEYS for j in self.outer):
            self.class_body = i

    def piece(self) -> Piece:
        tokens, start, end = self.tokens, self.start, self.end
        words = [tokens[j] for j in self.outer]
        while words[:2] == ["template", "<"]:
            del words[:2]
        first = start + (tokens[start] == "extern")
        is_instance = tokens[first : first + 1] == ["template"] and tokens[first + 1 : first + 2] != ["<"]
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
            words = [j for j in self.outer if j < self.parameters and tokens[j].isidentifier()]
            parts = {"body": self.body, "name": words[-1] if words else None, "parameters": self.parameters}
            return Piece(start, end, self._function_names(words), on_device, is_function=True, **parts)
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

    def _function_names(self, words: Sequence[int]) -> frozenset[str]:
        """The last of `words`; `operator`; of an operator defined outside of its class, the class."""
        names = [self.tokens[j] for j in words]
        if "operator" not in names:
            return frozenset(names[-1:])
        at = names.index("operator")
        is_outside = self.tokens[words[at] - 1] == "::"
        return frozenset(names[at - 1 : at] if is_outside else names[at : at + 1])

    def _declared(self) -> frozenset[str]:
        """The names that a variable, an alias or a forward declaration introduces, and perhaps a few more."""
        tokens, words = self.tokens, [*self._words(self.start, self.end)]
        if "using" in words:
            if "operator" in words:  # device_code.needed_by decides
                return frozenset()
            new = words[words.index("using") + 1 :]
            return frozenset(new[:1] if "=" in tokens[self.start : self.end] else new[-1:])
        pairs = [(tokens[j], tokens[j + 1]) for j in self.outer if j + 1 < len(tokens)]
        names = {word for word, after in pairs if word.isidentifier() and after in _AFTER_NAME}
        stars = (j for j in range(self.start, self.end - 2) if tokens[j] == "*" and tokens[j + 2] == ")")
        pointers = {tokens[j + 1] for j in stars if tokens[j + 1].isidentifier()}
        return frozenset((names - _NO_NAME) | pointers)


class Statements:
    """The statements among `tokens`, of which `close` says where each bracket ends."""

    def __init__(self, tokens: Sequence[str], close: Mapping[int, int]) -> None:
        self._tokens, self._close = tokens, close

    def around(self, body: int, target: int) -> tuple[int, int]:
        """Start and end of the smallest statement round token `target`, in the function whose body opens at `body`."""
        end = self._close[body]
        *_, smallest = (body + 1, end), *(each for each in self._inside(body, end + 1) if each[0] <= target < each[1])
        return smallest

    def round(self, body: int, target: int) -> list[int]:
        """Where the statements round token `target` begin, in the function whose body opens at `body`."""
        inside = self._inside(body, self._close[body] + 1)
        return [start for start, end in inside if start <= target < end]

    def is_always_reached(self, body: int, start: int) -> bool:
        """Whether the statement that begins at `start` stands in the body itself, under no condition."""
        at = body + 1
        while at < start:
            at = self._end(at)
        return at == start

    def _inside(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The statements inside of the statement start to end: each comes before those inside of it."""
        tokens = self._tokens
        is_block = tokens[start] == "{"
        at = start + 1 if is_block else self._after_head(start)
        while start < at < end - is_block:
            after = max(self._end(at), at + 1)
            yield at, after
            yield from self._inside(at, after)
            at = after if is_block else after + 1 if tokens[after : after + 1] == ["else"] else end

    def _after_head(self, i: int) -> int:
        """Where begins what the statement at `i` governs; `i` if it governs nothing."""
        if self._tokens[i] in ("if", "for", "while", "switch", "catch"):
            i += 1 + (self._tokens[i + 1] == "constexpr")
            return self._close.get(i, i) + 1
        return i + (self._tokens[i] in ("do", "else", "try"))

    def _end(self, i: int) -> int:
        token, tokens = self._tokens[i], self._tokens
        if token == "{":
            return self._close.get(i, i) + 1
        if token in ("case", "default"):
            return next((j for j in range(i, len(tokens)) if tokens[j] == ":"), i) + 1
        governed = self._after_head(i)
        if governed > i:
            i = self._end(governed)
            if tokens[i : i + 1] == ["else"]:
                return self._end(i + 1) if token == "if" else i
            if token != "do":
                return i
        while i < len(tokens) and tokens[i] not in (";", "}"):
            i = self._close.get(i, i) + 1
        return i + (tokens[i : i + 1] == [";"])


AMBIGUOUS = "?"  # what a name stands for that is defined twice, differently
SPACES = {"__device__", "__global__", "__constant__", "__shared__", "__managed__"}


class Kernel(NamedTuple):
    """A `__global__` function as it is declared, in tokens."""

    function: str
    namespace: tuple[str, ...]
    template: Tokens | None
    bounds: Tokens  # what is in __launch_bounds__
    parameters: Tokens
    has_alternatives: bool  # among the parameters is an #if that cannot be told
    piece: Piece
    specialises: Tokens | None = None  # of an explicit specialisation: the template arguments that it gives


class File(Outline):
    """The pieces of `text`, of which `lexemes` are tokens and directives. The rest of the text, a system's headers for
    example, has no part in them, and neither has a branch of an #if that is certain not to be taken.

    `defines` are the macros of the command line. Without them every macro may be defined. The source itself begins at
    `own`, after the headers that it includes.
    """

    def __init__(self, text: str, lexemes: Lexemes, defines: Mapping[str, str] | None = None, own: int = 0) -> None:
        written, places = lexemes
        directives = {i: lexeme for i, lexeme in enumerate(written) if lexeme[0] == "#"}
        conditions = Conditions(directives, defines)
        tokens: Tokens = []
        splits: dict[int, list[str]] = {}
        self.places: list[int] = []
        self.branches: list[int] = []  # the innermost branch of an #if round each token; negative: certain; 0: none
        start = 0
        for at in (*directives, len(written)):
            if (taken := conditions.taken) is not False:
                tokens += written[start:at]
                self.places += places[start:at]
                branch = 0 if not conditions.depth else -start if taken else start
                self.branches += [branch] * (at - start)
            if at < len(written) and (split := conditions.follow(written[at], places[at])):
                splits.setdefault(len(tokens), []).append(split)
            start = at + 1
        self.text, self.defines, self.own = text, defines or {}, own
        self.macros: list[Macro] = conditions.macros
        self.device_macros = self._device_macros()
        super().__init__(tokens, partners(tokens, splits), DEVICE_WORDS | self.device_macros)

    def span(self, start: int, end: int) -> tuple[int, int]:
        """Where tokens start to end are in the text."""
        return self.places[start], self.places[end - 1] + len(self.tokens[end - 1])

    def is_plain(self, piece: Piece) -> bool:
        """Whether every compiler of the source sees the piece: no header has it, and no #if that cannot be told."""
        return self.places[piece.start] >= self.own and self.branches[piece.start] <= 0

    @property
    def plain_kernels(self) -> list[str]:
        """The kernels that can be built together: defined for every compiler, without a template or a namespace."""
        plain = [each for each in self.kernels if each.piece.body is not None and self.is_plain(each.piece)]
        return list(dict.fromkeys(each.function for each in plain if each.template is None and not each.namespace))

    @functools.cached_property
    def kernels(self) -> list[Kernel]:
        """Every declaration of a `__global__` function, in their order, without explicit specialisations."""
        return [each for each in map(self._kernel, self.pieces) if each and each.specialises is None]

    @functools.cached_property
    def specialisations(self) -> list[Kernel]:
        """The explicit specialisations of kernels: `template <> __global__ void k<float>(float* x)`."""
        return [each for each in map(self._kernel, self.pieces) if each and each.specialises is not None]

    @functools.cached_property
    def named(self) -> dict[str, Tokens]:
        """The tokens for which each name stands, as far as the text tells: macros, `typedef`, `using A = B`."""
        named: dict[str, Tokens] = {}
        types = [(name, each.tokens) for _, name, each in self._definitions if each and each.type is None]
        for alias, value in [*self._object_macros(), *types]:
            named[alias] = value if named.get(alias, value) == value else [AMBIGUOUS]
        return named

    @functools.cached_property
    def scope(self) -> Scope:
        """The names that constant expressions use. A name that is defined twice, differently, is unknown."""
        macros = {name: self.named[name] for name, _ in self._object_macros()}
        unclear = [name for name, body in macros.items() if body == [AMBIGUOUS]]
        definitions: dict[str, Definition | None] = dict.fromkeys(unclear)
        for namespace, own_name, definition in self._definitions:
            for i in range(len(namespace) + 1):
                name = "::".join((*namespace[i:], own_name))
                same = name not in macros and definitions.get(name, definition) == definition
                definitions[name] = definition if same else None
        return Scope({name: body for name, body in macros.items() if name not in definitions}, definitions)

    def _object_macros(self) -> list[tuple[str, Tokens]]:
        macros = [(macro.name, macro.body) for macro in self.macros if not macro.has_parameters]
        in_file = {name for name, _ in macros}  # the command line does not override what the file itself defines
        return macros + [(name, tokens_of(text)) for name, text in self.defines.items() if name not in in_file]

    def _device_macros(self) -> set[str]:
        """The macros that make device code."""
        found, makes = set(), SPACES
        while new := {macro.name for macro in self.macros if not makes.isdisjoint(macro.body)} - found:
            found |= new
            makes = SPACES | found
        return found

    def _kernel(self, piece: Piece) -> Kernel | None:
        tokens, opened = self.tokens, piece.parameters
        if not piece.is_function or opened not in self.close or "__global__" not in tokens[piece.start : opened]:
            return None
        name, closed = piece.name, self.close[opened]
        namespace, start = piece.namespace, name
        while tokens[start - 1] == "::":  # `void n::k(…)`, outside of the namespace
            start -= 2
        namespace += tuple(tokens[start:name:2])
        template, bounds = None, []
        bounds_are_certain = not self._has_alternatives(piece.start, opened)
        for i in range(piece.start, piece.body or piece.end):
            if template is None and tokens[i : i + 2] == ["template", "<"]:
                template = tokens[i + 2 : self.after(i + 1, opened) - 1]
            elif tokens[i] == "__launch_bounds__" and bounds_are_certain:
                bounds = tokens[i + 2 : self.close.get(i + 1, i + 2)]
        arguments = tokens[name + 2 : opened - 1] if template == [] else None
        unknown, parameters = self._has_alternatives(opened, closed), tokens[opened + 1 : closed]
        return Kernel(tokens[name], namespace, template, bounds, parameters, unknown, piece, arguments)

    def _has_alternatives(self, first: int, last: int) -> bool:
        """Whether an #if that cannot be told begins or ends between two tokens."""
        return len({max(branch, 0) for branch in self.branches[first : last + 1]}) > 1

    @functools.cached_property
    def _definitions(self) -> list[tuple[tuple[str, ...], str, Definition | None]]:
        """The types, constants and enumerators outside of classes: namespace, name, and None if it cannot be told."""
        definitions: list[tuple[tuple[str, ...], str, Definition | None]] = []
        for piece in self.pieces:
            if piece.is_function:
                continue
            words = self.tokens[piece.start : piece.end - 1]
            found: list[tuple[str, Definition]] = []
            if words[:1] == ["using"] and "=" in words:
                at = words.index("=")
                found = [(words[at - 1], Definition(words[at + 1 :]))]
            elif words[:1] == ["typedef"] and {"(", "{"}.isdisjoint(words):
                found = [(words[-1], Definition(words[1:-1]))]
            elif piece.is_variable and not {"const", "constexpr"}.isdisjoint(words) and "template" not in words:
                found = [*constants_of(words)]
            else:
                found = [*enumerators_of(words)]
            unknown = self._has_alternatives(piece.start, piece.end - 1)
            for name, definition in found:
                if name.rpartition("::")[2].isidentifier():
                    definitions.append((piece.namespace, name, None if unknown else definition))
        return definitions


@functools.lru_cache(maxsize=16)
def read(text: str, defines: tuple[str, ...] | None = (), own: int = 0) -> File:
    """The file with this text; `defines` as for the compiler."""
    macros = (define.split("=", 1) if "=" in define else (define, "1") for define in defines or ())
    return File(text, lexemes_of(text), None if defines is None else dict(macros), own)
