"""A CUDA source, read once: what its names stand for, its kernels, and the pieces that it is made of."""

import functools
from collections.abc import Mapping
from typing import NamedTuple

from cudascope.cpp.conditions import Conditions, Macro
from cudascope.cpp.definitions import Definition, Scope, constants_of, enumerators_of
from cudascope.cpp.outline import DEVICE_WORDS, Outline, Piece
from cudascope.cpp.tokens import Lexemes, Tokens, lexemes_of, partners, tokens_of

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
        """Every declaration of a `__global__` function, in their order."""
        return [*filter(None, map(self._kernel, self.pieces))]

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
        definitions: dict[str, Definition | None] = dict.fromkeys(
            name for name, body in macros.items() if body == [AMBIGUOUS]
        )
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
        name, closed = tokens[opened - 1], self.close[opened]
        if not name.isidentifier():  # `f<float>(…)`: a template written out for one type
            return None
        template, bounds = None, []
        bounds_are_certain = not self._has_alternatives(piece.start, opened)
        for i in range(piece.start, piece.body or piece.end):
            if template is None and tokens[i : i + 2] == ["template", "<"]:
                template = tokens[i + 2 : self.after(i + 1, opened) - 1]
            elif tokens[i] == "__launch_bounds__" and bounds_are_certain:
                bounds = tokens[i + 2 : self.close.get(i + 1, i + 2)]
        parameters = tokens[opened + 1 : closed]
        return Kernel(
            name, piece.namespace, template, bounds, parameters, self._has_alternatives(opened, closed), piece
        )

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


def declares_return(file: File, function: str) -> bool:
    """Whether kernel `function` has a `return` in its body: its threads may leave early. True where none is found."""
    leaves = {"return", *(macro.name for macro in file.macros if "return" in macro.body)}
    bodies = [piece for piece in file.pieces if piece.body is not None and function in piece.names]
    return not bodies or any(not leaves.isdisjoint(file.tokens[piece.body : piece.end]) for piece in bodies)
