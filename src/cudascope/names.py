"""What the names in a CUDA source stand for, as far as its text tells: macros, `typedef`, `using A = B`, constants."""

import re
from collections.abc import Mapping, Sequence

from cudascope.tokens import NAME, Tokens, live_branches, strip_comments, tokens_of

AMBIGUOUS = "?"  # what a name stands for that is defined twice, differently
_DEFINE = re.compile(r"^[ \t]*#[ \t]*define[ \t]+([A-Za-z_]\w*)(?!\()[ \t]*(.*)$", re.MULTILINE)


def read_names(source: str, defines: Sequence[str] = ()) -> tuple[Tokens, dict[str, Tokens]]:
    """The tokens of `source`, without branches that are not taken, and what each name in it stands for."""
    macros = dict(define.split("=", 1) if "=" in define else (define, "1") for define in defines)
    text = live_branches(strip_comments(source), macros)
    tokens = tokens_of(text)
    outside = outside_functions(tokens)
    named: dict[str, Tokens] = {}
    for alias, value in [*_macros(text, macros), *_aliases(outside), *_constants(outside)]:
        named[alias] = value if named.get(alias, value) == value else [AMBIGUOUS]
    return tokens, named


def _macros(text: str, defines: Mapping[str, str]) -> list[tuple[str, Tokens]]:
    macros = [(name, tokens_of(value)) for name, value in _DEFINE.findall(text)]
    in_file = {name for name, _ in macros}  # the command line does not override what the file itself defines
    return macros + [(name, tokens_of(value)) for name, value in defines.items() if name not in in_file]


def outside_functions(tokens: Tokens) -> Tokens:
    """`tokens` without what stands in braces, except those of `namespace a {` and `extern "C" {`."""
    outside, skipping = [], 0
    for i, token in enumerate(tokens):
        if token == "{" and not skipping:
            namespace = "namespace" in tokens[max(0, i - 2) : i] or tokens[max(0, i - 1) : i] == ['"C"']
            skipping += not namespace
        elif token == "{":
            skipping += 1
        elif token == "}" and skipping:
            skipping -= 1
            outside += [] if skipping else [";"]
        elif not skipping:
            outside.append(token)
    return outside


def _aliases(tokens: Tokens) -> list[tuple[str, Tokens]]:
    """`typedef A B;` and `using B = A;`."""
    aliases = []
    for i, token in enumerate(tokens):
        if token not in ("typedef", "using"):
            continue
        statement = tokens[i + 1 : tokens.index(";", i)] if ";" in tokens[i:] else []
        if token == "using" and statement[1:2] == ["="]:
            aliases.append((statement[0], statement[2:]))
        elif token == "typedef" and len(statement) >= 2 and NAME.fullmatch(statement[-1]) and "(" not in statement:
            aliases.append((statement[-1], statement[:-1]))
    return aliases


def _constants(tokens: Tokens) -> list[tuple[str, Tokens]]:
    """`constexpr int N = 128;`, for `__launch_bounds__` and template arguments."""
    constants = []
    for i, token in enumerate(tokens):
        if token == "constexpr" and ";" in tokens[i:]:
            statement = tokens[i + 1 : tokens.index(";", i)]
            if "=" in statement[1:]:
                equals = statement.index("=")
                constants.append((statement[equals - 1], statement[equals + 1 :]))
    return constants
