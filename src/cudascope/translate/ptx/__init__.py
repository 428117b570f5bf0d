"""Inline PTX on the CPU: every `asm` statement of a source becomes C++ that does the same.

    asm volatile("add.s32 %0, %1, 7;" : "=r"(sum) : "r"(x));

An operand is a variable of the constraint's size, and so is a register that the statement declares. The instructions
are those of `arithmetic`, `memory`, `threads` and `matrix`; one that is not known there stops the kernel with its
name, but only where it is reached.
"""

import ast
import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

from cudascope.cpp.source import CompileError
from cudascope.cpp.tokens import lexemes_of, tokens_of
from cudascope.translate.preprocess import MARKER, line_at
from cudascope.translate.ptx.body import body, stop
from cudascope.translate.ptx.scope import Malformed

_KEYWORDS = ("asm", "__asm__", "__asm")
_KEYWORD = re.compile(rf"\b({'|'.join(_KEYWORDS)})\b")
_QUALIFIERS = ("volatile", "__volatile__", "inline", "__inline__")
_TYPES = {"h": "uint16_t", "r": "uint32_t", "l": "uint64_t", "q": "unsigned __int128", "f": "float", "d": "double"}
_TYPES |= dict.fromkeys("ni", "const uint64_t")


class _Operand(NamedTuple):
    constraint: str
    expression: str


def translate(text: str) -> str:
    """Return `text` without `asm`; every line stays. CompileError: an asm statement that no compiler would take."""
    if not _KEYWORD.search(text):
        return text
    done, labels = [], itertools.count()
    start, lexemes = 0, zip(*lexemes_of(text), strict=True)
    for token, place in lexemes:
        if token not in _KEYWORDS:
            continue
        try:
            parts, end = _parts(text, lexemes)
            replaced = _statement(*parts, next(labels))
        except Malformed as error:
            file, line = line_at(text, place)
            raise CompileError(f"{file}, line {line}: asm: {error}") from None
        lines = re.findall(r"^[ \t]*#[^\n]*|\n", text[place:end], re.MULTILINE)
        done += [text[start:place], replaced, *lines]
        start = end
    return "".join([*done, text[start:]])


def _parts(text: str, lexemes: Iterator[tuple[str, int]]) -> tuple[tuple[str, list[_Operand], list[_Operand]], int]:
    """Template, outputs and inputs of the statement whose `asm` was read last, and where it ends."""
    token, place = next((each for each in lexemes if each[0] not in _QUALIFIERS), ("", 0))
    if token != "(":
        raise Malformed("a parenthesis must follow")
    sections, depth, end = [""], 1, place + 1
    for token, place in lexemes:
        depth += (token in "([{") - (token in ")]}")
        if depth == 0:
            break
        if depth == 1 and token in (":", "::"):
            sections += [""] * len(token)
        elif token[0] != "#":
            sections[-1] += " " * (place > end) + token
        elif not MARKER.match(token):
            raise Malformed("a directive stands in it")
        end = place + len(token)
    else:
        raise Malformed("its parenthesis is not closed")
    semicolon = re.compile(r"\s*;").match(text, place + 1)
    template = "".join(map(_unquoted, tokens_of(sections[0])))
    outputs, inputs = map(_operands, (*sections[1:3], "", "")[:2])
    if len(sections) > 1:
        template = template.replace("%%", "%")
    return (template, outputs, inputs), semicolon.end() if semicolon else place + 1


def _unquoted(literal: str) -> str:
    if literal.startswith("R"):
        return re.fullmatch(r'R"([^(]*)\((.*)\)\1"', literal, re.DOTALL)[2]
    if not literal.startswith('"'):
        raise Malformed(f"its first part must be a string, got {literal}")
    return ast.literal_eval(literal)


def _operands(rest: str) -> list[_Operand]:
    """Operands, each written as "constraint" (expression)."""
    found, rest = [], rest.strip()
    while rest:
        match = re.match(r'("[^"]*")\s*\(', rest)
        if not match:
            raise Malformed(f'an operand is written "constraint" (expression), got {rest}')
        rest, depth, end = rest[match.end() :], 1, 0
        for token, place in zip(*lexemes_of(rest), strict=True):
            depth += (token == "(") - (token == ")")
            if depth == 0:
                end = place
                break
        found.append(_Operand(_unquoted(match[1]), rest[:end]))
        rest = rest[end + 1 :].strip().removeprefix(",").strip()  # nvcc asks for no comma
    return found


def _statement(template: str, outputs: list[_Operand], inputs: list[_Operand], number: int) -> str:
    """The block of C++, on one line."""
    before, after, names = [], [], {}
    for i, operand in enumerate((*outputs, *inputs)):
        kind = _TYPES.get(operand.constraint.strip("=+&%")[:1])
        if kind is None:
            return stop(f'the constraint "{operand.constraint}"')
        register = names[f"%{i}"] = f"simt_{i}"
        if i < len(outputs):
            before.append(f"auto&& simt_out_{i} = ({operand.expression});")
            after.append(f"simt::ptx::output(simt_out_{i}, {register});")
        read = f"simt_out_{i}" if operand.constraint.startswith("+") else f"({operand.expression})"
        is_read = i >= len(outputs) or operand.constraint.startswith("+")
        value = f"simt::ptx::input<{kind.removeprefix('const ')}>({read})" if is_read else "{}"
        before.append(f"{kind} {register}{' = ' * is_read}{value};")
    return " ".join(["{", *before, body(template, names, number), *after, "}"])
