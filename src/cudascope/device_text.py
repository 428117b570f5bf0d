"""A source's device code for NVRTC: the text as it is written, with host code blank and the host's headers left out.

NVRTC has a preprocessor of its own and does not have the host's headers, so this module expands nothing. A macro that
makes kernels stays a macro, and every line stays where it was.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from cudascope.build import OF_TORCH, Source, read_source
from cudascope.device_code import DeviceCode
from cudascope.tokens import NAME, lexemes_of

_SPACES = {"__device__", "__global__", "__constant__", "__shared__", "__managed__"}
_INCLUDE = re.compile(r'^([ \t]*#[ \t]*include[ \t]*)([<"])([^>"\n]+)[>"].*$', re.MULTILINE)
_DEFINE = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)((?:\\\n|[^\n])*)", re.MULTILINE)


def device_text(source: Source, name: str, folders: Sequence[Path]) -> str:
    """Return the part of `source` that kernel `name` needs. `folders` are those in which NVRTC finds headers."""
    text = _with_included(source, folders)
    macros = dict(_DEFINE.findall(text))
    makes_device_code = set(_SPACES)
    while new := {
        macro
        for macro, body in macros.items()
        if macro not in makes_device_code and not makes_device_code.isdisjoint(NAME.findall(body))
    }:
        makes_device_code |= new
    code = DeviceCode(text, list(lexemes_of(text)), makes_device_code)
    needed = code.needed_by(" ".join((name, *macros.values())))
    calls = [piece for piece in code.pieces if code.tokens[piece.start] in makes_device_code - _SPACES]
    return code.only([*{piece.start: piece for piece in (*needed, *calls)}.values()])


def _with_included(source: Source, folders: Sequence[Path]) -> str:
    """The source with the user's own headers put in, and without those that are nowhere."""
    own, seen = [*([source.folder] if source.folder else []), *source.include_path], set()

    def expanded(text: str, filename: str, beside: Path | None) -> str:
        def include(match: re.Match) -> str:
            _, quote, name = match.groups()
            places = [*([beside] if quote == '"' and beside else []), *own]
            found = next((place / name for place in places if (place / name).is_file()), None)
            if found is None:
                if any((folder / name).is_file() for folder in folders):
                    return match[0]
                return "#include <cudascope_torch.h>" if OF_TORCH.match(name) else ""
            if found.resolve() in seen:
                return ""
            seen.add(found.resolve())
            line = match.string.count("\n", 0, match.end()) + 2
            inside = expanded(read_source(found), str(found), found.parent)
            return f'#line 1 "{found}"\n{inside}\n#line {line} "{filename}"'

        return _INCLUDE.sub(include, text)

    return expanded(source.text, source.filename, source.folder)
