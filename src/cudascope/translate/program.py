"""A file of a program: its host code and its kernels together, as the host's compiler takes them.

`kernel<<<grid, block>>>(x, n)` becomes `(::simt::configure(grid, block), kernel(x, n))`, as nvcc does it. Overloads,
deduced template arguments, function pointers and default arguments keep their meaning, because the call stays a call. A
kernel that the host calls hands its own arguments over: its first lines say so.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from cudascope.cpp.device_code import needed_by, replaced
from cudascope.cpp.file import File, Kernel
from cudascope.cpp.source import CompileError, Source
from cudascope.cpp.tokens import Tokens, split
from cudascope.cpp.types import FUNDAMENTAL
from cudascope.cpp.variables import variables_in
from cudascope.translate.cuda import UNDEFINED, preprocessed, refuse, renamed, written
from cudascope.translate.entry_points import table_of
from cudascope.translate.host_only import is_of_another
from cudascope.translate.preprocess import file_of, files_in, line_at, parts_of
from cudascope.translate.ptx import translate
from cudascope.translate.returns import marks

_API = '#include "simt/program.h"\n'
_QUALIFIERS = {"const", "volatile", "__restrict__", "__restrict", "restrict", "__grid_constant__"}
_NO_NAME = {*FUNDAMENTAL, *_QUALIFIERS, "auto", "typename", "class"}
_BEFORE_TYPE = {"::", "typename", "struct", "class", "enum", "union", "template"}

Change = tuple[int, int, str]


class ProgramFile(NamedTuple):
    """A translated file of a program."""

    text: str
    opened: list[str]  # the user's files in it, besides the source
    dynamic_arrays: set[str]  # the names of its `extern __shared__` arrays


def defines_main(file: File) -> bool:
    """Whether a file has the `main` of a program, and not only its declaration."""
    return any(each.is_function and each.body is not None and "main" in each.names for each in file.pieces)


def program_file(source: Source, flags: Sequence[str], number: int) -> ProgramFile:
    """Translate `source`, the file with this `number` of a program, for a compiler with `flags`.

    CompileError: it includes a header that is not there, or a kernel needs what the CPU runner does not have.
    """
    parts, missing = preprocessed(_API + written(source), flags, source)
    if missing:
        raise CompileError(f"{source.filename}: {_about(missing)}")
    opened, file = files_in(parts, source), file_of(parts)
    kernels = [each for each in (*file.kernels, *file.specialisations) if each.piece.body is not None]
    needed = {piece.start: piece for each in kernels for piece in needed_by(file, each.function)}
    refuse(file, sorted(needed.values()))
    _refuse_calls(file)
    changes = [*renamed(file, range(len(file.tokens)))]
    changes += [change for kernel in kernels for change in _with_prologue(file, kernel)]
    changes += _launches(file)
    changes += marks(file, needed.values(), lambda place: line_at(file.text, place)[1])
    parts = parts_of(replaced(file.text, changes))
    text = _API + UNDEFINED + "".join(translate(part) if is_own else part for is_own, part in parts)
    variables = table_of(((each.name, f"::{each.name}") for each in variables_in(file, file.pieces)), f"_{number}")
    return ProgramFile(f'{text}\n#line 1 "<cudascope>"\n{variables}', opened, {*_dynamic_arrays(file)})


def _dynamic_arrays(file: File) -> Iterator[str]:
    for i, token in enumerate(file.tokens):
        if token == "extern" and "__shared__" in file.tokens[i : i + 8]:
            declared = file.tokens[i : next((j for j in range(i, len(file.tokens)) if file.tokens[j] == ";"), i)]
            yield from (name for name, after in pairwise(declared) if after == "[" and name.isidentifier())


# The start of the names of a library's headers and functions, and the library.
LIBRARIES = {"cublas": "cuBLAS", "cufft": "cuFFT", "curand": "the host's side of cuRAND", "cusparse": "cuSPARSE"}
LIBRARIES |= {"cusolver": "cuSOLVER", "cudnn": "cuDNN", "nccl": "NCCL"}
_HEADERS = LIBRARIES | {"mpi": "MPI", "nvml": "NVML", "npp": "NPP", "GL/": "OpenGL"}
_HEADERS |= {"thrust/": "thrust's containers and algorithms", "cub/device": "cub's functions for the whole device"}


def _about(missing: Sequence[str]) -> str:
    """Say which headers are missing, and what the program may want of them."""
    for header in missing:
        for start, library in _HEADERS.items():
            if header.startswith(start):
                return f"the program includes <{header}>, and cudascope does not have {library}"
    headers, are = " and ".join(f"<{header}>" for header in missing), "are" if len(missing) > 1 else "is"
    return f"the program includes {headers}, which {are} not there: name the folder with --include"


def _launches(file: File) -> Iterator[Change]:
    """The changes that make calls of launches."""
    tokens, places = file.tokens, file.places
    for i in range(len(tokens) - 3):
        if tokens[i : i + 3] != ["<", "<", "<"] or places[i + 2] != places[i] + 2:
            continue
        end = _end_of_configuration(file, i + 3)
        start = _start_of_name(file, i)
        if end is None or start is None or tokens[end + 3 : end + 4] != ["("] or end + 3 not in file.close:
            at = "{}:{}".format(*line_at(file.text, places[i]))
            raise CompileError(f"{at}: error: this launch is not understood: write kernel<<<grid, block>>>(…)")
        yield places[start], places[start], f"(::simt::configure({file.text[places[i + 3] : places[end]]}), "
        yield places[i], places[end + 2] + 1, ""
        closed = file.close[end + 3]
        yield places[closed] + 1, places[closed] + 1, ")"


def _refuse_calls(file: File) -> None:
    """Raise a CompileError where a kernel is called like a function.

    A name that may also be something else's is left alone, and a call through a pointer is found when it happens.
    """
    tokens, kernels = file.tokens, (*file.kernels, *file.specialisations)
    if ("using", "namespace") in pairwise(tokens):  # a call of `fill` may be one of std::fill
        return
    declared = {each.piece.name for each in kernels}
    for name in dict.fromkeys(each.function for each in kernels):
        used = [i for i, token in enumerate(tokens) if token == name and i not in declared]
        if any(tokens[i - 1] in ("*", "&") or is_of_another(tokens[i - 1 : i]) for i in used):
            continue
        for i in used:
            has_arguments = tokens[i + 1 : i + 2] == ["<"] and tokens[i + 2 : i + 3] != ["<"]
            after = file.after(i + 1, len(tokens)) if has_arguments else i + 1
            if tokens[after : after + 1] == ["("]:
                at = "{}:{}".format(*line_at(file.text, file.places[i]))
                raise CompileError(f"{at}: error: {name} is a kernel: launch it with {name}<<<grid, block>>>(…)")


def _end_of_configuration(file: File, i: int) -> int | None:
    """The index of the first > of >>>, for a configuration that begins at token `i`."""
    tokens, places = file.tokens, file.places
    while i < len(tokens) - 2:
        if tokens[i : i + 3] == [">", ">", ">"] and places[i + 2] == places[i] + 2:
            while tokens[i + 3 : i + 4] == [">"] and places[i + 3] == places[i] + 3:  # Config<4>>>>
                i += 1
            return i
        if tokens[i] in (";", "}"):
            return None
        i = file.close.get(i, i) + 1
    return None


def _start_of_name(file: File, end: int) -> int | None:
    """The index at which the expression begins that names the kernel, and ends before token `end`."""
    tokens = file.tokens
    opening = {close: start for start, close in file.close.items()}
    i = end - 1
    while i >= 0:
        if tokens[i] == ">":
            depth = 0
            while i >= 0:
                if tokens[i] in (")", "]", "}"):
                    i = opening.get(i, i)
                depth += (tokens[i] == ">") - (tokens[i] == "<")
                if depth == 0:
                    break
                i -= 1
            i -= 1
            if i < 0 or not tokens[i].isidentifier():
                return None
        elif tokens[i] in (")", "]"):
            i = opening.get(i, -1)
            if i > 0 and (tokens[i - 1].isidentifier() or tokens[i - 1] in (")", "]")) and tokens[i - 1] != "return":
                i -= 1
                continue
        elif not tokens[i].isidentifier():
            return None
        if i > 0 and tokens[i - 1] == "template":
            i -= 1
        if i < 1 or tokens[i - 1] not in ("::", ".", "->"):
            return i
        if tokens[i - 1] == "::" and not (tokens[i - 2].isidentifier() or tokens[i - 2] == ">"):
            return i - 1  # ::kernel
        i -= 2
    return None


def _with_prologue(file: File, kernel: Kernel) -> Iterator[Change]:
    """The changes by which a kernel hands its launch over where the host calls it."""
    piece = kernel.piece
    opened, body = piece.parameters, piece.body
    first, names, types = opened + 1, [], []
    for position, tokens in enumerate(split(kernel.parameters)):
        last = first + len(tokens)
        if tokens != ["void"]:
            name = _name_of(tokens)
            if name is None:
                name = f"simt_unnamed_{position}"
                declared = tokens.index("=") if "=" in tokens else len(tokens)
                at = file.span(first, first + declared)[1]
                yield at, at, f" {name}"
            pack = "..." if "..." in tokens else ""
            names.append(f"(void*)__builtin_addressof({name}){pack}")
            types.append(f"::simt::Passed<decltype({name})>{pack}")
        first = last + 1
    address = f"static_cast<void (*)({', '.join(types)})>({_spelled(file, kernel)})"
    at = file.places[body] + 1
    arguments = "".join(f"{name}, " for name in names)
    launch = f"void* simt_arguments[] = {{{arguments}nullptr}}; return ::simt::launch<{address}>(simt_arguments);"
    yield at, at, f" if (simt_on_host()) {{ {launch} }}"


def _spelled(file: File, kernel: Kernel) -> str:
    """The kernel as its own body names it, with its template arguments."""
    if kernel.specialises is not None:
        return f"{kernel.function}<{' '.join(kernel.specialises)}>"
    if not kernel.template:
        return kernel.function
    arguments = []
    for tokens in split(kernel.template):
        declared = tokens[: tokens.index("=")] if "=" in tokens else tokens
        name = _name_in_template(declared)
        if name is None:
            break  # a condition, which has a default
        arguments.append(name + ("..." if "..." in declared else ""))
    return f"{kernel.function}<{', '.join(arguments)}>"


def _name_of(declared: Tokens) -> str | None:
    """The name that a parameter of a function declares; None if it has none."""
    tokens = declared[: declared.index("=")] if "=" in declared else declared
    for i, token in enumerate(tokens[:-2]):
        if token == "(" and tokens[i + 1] in ("*", "&") and tokens[i + 2].isidentifier():
            return tokens[i + 2]  # a pointer to a function, or to an array
    while tokens[-1:] == ["]"]:
        tokens = tokens[: len(tokens) - 1 - tokens[::-1].index("[")]
    *type_words, name = tokens or [""]
    is_named = name.isidentifier() and name not in _NO_NAME and type_words and type_words[-1] not in _BEFORE_TYPE
    return name if is_named and not _QUALIFIERS.issuperset(type_words) else None


def _name_in_template(declared: Tokens) -> str | None:
    """The name that a parameter of a template declares; None if it has none."""
    if len(declared) > 1 and declared[-2] in ("typename", "class", "...") and declared[-1].isidentifier():
        return declared[-1]
    return _name_of(declared)
