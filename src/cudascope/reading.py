"""A kernel's signature, from whoever can tell it: the source's text, its text after the preprocessor, the compiler.

Most kernels say themselves what they take, and reading that takes milliseconds. One that a macro makes, or that stands
under a condition, is plain after the preprocessor; the size of a struct and what a trait stands for, only the host's
compiler knows, and then the build that tells is the one that a launch on the CPU uses.
"""

import re
from typing import NamedTuple

from cudascope.build import CompileError, Source
from cudascope.declarations import Declaration, kernels_of
from cudascope.parameters import Parameter, type_of
from cudascope.signature import Signature, read_signature
from cudascope.simt.build import own_text
from cudascope.simt.launch import CpuKernel
from cudascope.simt.library import ParameterType
from cudascope.tokens import strip_comments, tokens_of
from cudascope.values import is_understood

_IN_MACRO = re.compile(r"^[ \t]*#[ \t]*define\b.*\b__global__\b", re.MULTILINE)


class Reading(NamedTuple):
    """A kernel as it is declared, and the text that said so: the source and the user's headers."""

    function: str
    parameters: tuple[Parameter, ...]
    max_threads: int | None
    text: str


def read_kernel(source: Source, name: str) -> Reading:
    """The signature of kernel `name` of `source`.

    Raises:
        ValueError: the source has no such kernel, or several.
        CompileError: only the compiler could tell what the kernel takes, and it refuses the source.
    """
    text, signature = _read(source, name)
    if not all(map(is_understood, signature.parameters)):
        types = CpuKernel(source, name, ()).parameter_types()
        parameters = tuple(_completed(*both) for both in zip(signature.parameters, types, strict=True))
        signature = signature._replace(parameters=parameters)
    return Reading(*signature, text)


def declared_kernels(source: Source) -> list[Declaration]:
    """The kernels that the text of `source` declares, those with them that its macros make."""
    text = strip_comments(source.text)
    declared = list(kernels_of(tokens_of(text)))
    return declared if declared and not _IN_MACRO.search(text) else list(kernels_of(tokens_of(own_text(source))))


def _read(source: Source, name: str) -> tuple[str, Signature]:
    text = "\n".join([*(included for _, included in source.included()), source.text])
    try:
        return text, read_signature(text, name, source.defines)
    except ValueError as unread:
        try:
            text = own_text(source)
        except CompileError:  # no compiler, or one that refuses even this
            raise unread from None
        return text, read_signature(text, name, source.defines)


def _completed(parameter: Parameter, known: ParameterType) -> Parameter:
    if is_understood(parameter):
        return parameter
    ctype, pointer, const = type_of(tokens_of(known.spelled))
    if pointer and not known.bytes:  # a handle, for example
        ctype = "void"
    plain = parameter._replace(ctype=ctype, pointer=pointer, const=const)
    return plain if is_understood(plain) else plain._replace(bytes=known.bytes, alignment=known.alignment)
