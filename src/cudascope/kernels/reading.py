"""A kernel's signature, from the first that can tell it: the source, its text after the preprocessor, the compiler.

Most kernels say themselves what they take, and reading their source takes milliseconds. The preprocessor shows a kernel
that a macro makes, and one that is under a condition. Only the host's compiler knows the size of a struct and the
meaning of a trait. `completed` asks the build that a launch on the CPU uses.
"""

from collections.abc import Sequence

from cudascope.arguments.values import is_understood
from cudascope.cpp.file import File, Kernel, read
from cudascope.cpp.parameters import Parameter, type_of
from cudascope.cpp.signature import Signature, read_signature
from cudascope.cpp.source import CompileError, Source
from cudascope.cpp.tokens import tokens_of
from cudascope.cpu.build import build, entry_symbol, own_text
from cudascope.cpu.library import ParameterType


def read_kernel(source: Source, name: str) -> tuple[Signature, File]:
    """The signature of kernel `name` of `source`, as far as the text tells, and the file that declares the kernel.

    Raises:
        ValueError: the source has no such kernel, or several.
    """
    file = source.read()
    try:
        return read_signature(file, name), file
    except ValueError as unread:
        try:
            file = read(own_text(source), source.defines)
        except CompileError:  # no compiler, or one that refuses even this
            raise unread from None
        return read_signature(file, name), file


def completed(source: Source, name: str, parameters: Sequence[Parameter]) -> tuple[Parameter, ...]:
    """The `parameters` of kernel `name`, with the sizes and types that only the host's compiler can tell.

    Raises:
        CompileError: the compiler is needed, and it refuses the source.
    """
    if all(map(is_understood, parameters)):
        return tuple(parameters)
    types = build(source, name, instrumented=False).parameters(entry_symbol(name))
    return tuple(_completed(*both) for both in zip(parameters, types, strict=True))


def declared_kernels(source: Source) -> list[Kernel]:
    """The kernels that the text of `source` declares, and with them those that its macros make."""
    file = read(source.text, None)
    if file.kernels and not any("__global__" in macro.body for macro in file.macros):
        return file.kernels
    return read(own_text(source), None).kernels


def _completed(parameter: Parameter, known: ParameterType) -> Parameter:
    if is_understood(parameter):
        return parameter
    ctype, pointer, const = type_of(tokens_of(known.spelled))
    if pointer and not known.bytes:  # a handle, for example
        ctype = "void"
    plain = parameter._replace(ctype=ctype, pointer=pointer, const=const)
    return plain if is_understood(plain) else plain._replace(bytes=known.bytes, alignment=known.alignment)
