"""A CUDA source as the C++ that, behind simt.h, the host's compiler takes: as it stands, or what one kernel needs."""

import bisect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from cudascope.cpp.device_code import needed_by, only, replaced
from cudascope.cpp.file import File, Piece, Statements
from cudascope.cpp.signature import base_name
from cudascope.cpp.source import OF_TORCH, CompileError, Source
from cudascope.cpp.tokens import NAME
from cudascope.cpp.types import FUNDAMENTAL
from cudascope.cpp.variables import Variable, plain_variables, variables_in
from cudascope.toolchain.compiler import find_compiler, result_of_compiler
from cudascope.toolchain.headers import HEADERS, shown
from cudascope.toolchain.precompiled import precompiled
from cudascope.translate.entry_points import DYNAMIC_MEMORY, table_of
from cudascope.translate.host_only import may_be_used, used_in
from cudascope.translate.preprocess import MARKER, Part, file_of, files_in, line_at, parts_of, preprocess
from cudascope.translate.ptx import translate
from cudascope.translate.returns import marks

_ROUNDS = 8  # each round may leave other names without a declaration
_ERROR = re.compile(r"^<stdin>:(\d+):(\d+): (?:fatal )?error: (.*)$", re.MULTILINE)
_LACKS_WORD = re.compile(
    r"^<stdin>:(\d+):(\d+): (?:warning|error): ((?:expected|use) .template. keyword"
    r"|.constexpr. needed for in-class initialization of static data member ‘[^’]*>(?:::\w+)+’).*$",
    re.MULTILINE,
)
_IN_ANY_CLASS = {"static", "const", "volatile", "public", "private", "protected", *FUNDAMENTAL}
_UNKNOWN = re.compile(
    "not declared|not been declared|does not name|is not a member|is not a class|is not a template|undeclared"
    "|incomplete type|not a namespace|no type named"
)
# Libraries that the host calls: a kernel has nothing of theirs but a type in a struct that it shares with the host.
_FOR_HOST = re.compile(r"\b(cublas|cudnn|cufft|cusparse|cusolver|curand(?=\.h)|nvml|nccl|nvtx|nvToolsExt|MPI|mpi|omp)")


def with_traps(text: str, missing: Sequence[str], command: Sequence[str], cut: Callable[[str], File]) -> str:
    """`text`, which lacks the headers `missing`, as `command` takes it; `cut` makes declarations of it.

    The compiler lists the names without a declaration. A statement with such a name becomes a call that stops the
    kernel and names the header. A declaration with such a name is left out, and so are the declarations that need this
    one. A statement of the kernel itself under no condition is always reached, so it is an error at once
    (CompileError).
    """
    whys: dict[str, str] = {}  # for the names in what was left out
    for number in range(_ROUNDS):
        code = cut(text)
        changes: dict[tuple[int, int], str] = {}
        for place, message in _errors(text, command):
            names = [name for quoted in re.findall("[‘'](.*?)[’']", message) for name in NAME.findall(quoted)]
            headers = _headers(names, missing)
            if number == 0 and not (headers and _UNKNOWN.search(message)):
                continue  # the user's own mistake. In later rounds it follows from what was left out
            if found := _change(code, place):
                said = f"{message.partition(';')[0]}: {_origin(headers)}"
                why = next((whys[name] for name in names if name in whys), said)
                if found.is_reached:
                    file, line = line_at(text, place)
                    at = "the kernel's name" if file == "<cudascope>" else f"{file}:{line}"
                    raise CompileError(f"{at}: error: {why}")
                whys = {word: why for word in code.tokens[slice(*found.span)] if NAME.fullmatch(word)} | whys
                trap = f"simt_lacks({json.dumps(why, ensure_ascii=False)});" if found.is_statement else ""
                changes.setdefault(code.span(*found.span), trap)
        if not changes:
            break
        text = replaced(text, [(*span, new) for span, new in changes.items()])
    return text


def with_words_for_gcc(text: str, command: Sequence[str]) -> str:
    """`text` with the words that nvcc does without, where `command` names their lack.

    They are the word template, as in `Cast<T>::template to<4>(x)`, and the word constexpr before a constant of a class
    template with a type that the template's arguments decide, as in `static const T half = 0.5f;`.
    """
    words = set()
    for place, message in _errors(text, command, _LACKS_WORD):
        start = place
        if "constexpr" in message:
            start = max(text.rfind(end, 0, place) for end in ";{}") + 1
            if _IN_ANY_CLASS.issuperset(NAME.findall(text, start, place)):
                continue  # nvcc's own host compiler refuses it
            start = text.index("static", start)
        words.add((start, start, "template " if start == place else "constexpr "))
    return replaced(text, words)


def _headers(names: Sequence[str], missing: Sequence[str]) -> list[str]:
    """Those of the missing headers that may declare one of `names`."""
    alike = [h for h in missing if any(len(name) > 2 and name.lower() in h.lower() for name in names)]
    for_host = {h: match[1] for h in missing if (match := _FOR_HOST.search(h))}
    alike += [h for h, library in for_host.items() if any(name.startswith(library) for name in names)]
    return [f"<{header}>" for header in alike or [h for h in missing if h not in for_host][:3]]


_LIBRARIES = {
    OF_TORCH: "cudascope has the device side of torch's headers, and this name is not in it",
    re.compile(r"(?:thrust|cub|cuda)/"): (
        "cudascope has parts of thrust, cub and cuda::std (README: which features run), and this name is not in them"
    ),
    re.compile(r"(?:cutlass|cute)/"): "cudascope does not run CUTLASS and CuTe: give the kernel a plain C++ path",
}


def _origin(headers: Sequence[str]) -> str:
    """Say where a name may come from, and what to do about it."""
    where = " or ".join(headers)
    for of_library, why in _LIBRARIES.items():
        if all(of_library.match(header, 1) for header in headers):
            return f"it may come from {where}, or from `defines`; {why}"
    return f"it may come from {where}, which is missing, or from `defines`; -I<folder> in `options` names a folder"


def _errors(text: str, command: Sequence[str], said: re.Pattern = _ERROR) -> list[tuple[int, str]]:
    """Where the compiler refuses `text`, and what it says."""
    by_line = MARKER.sub("", text)  # then lines are those of the text itself
    quiet = ("-w",) if said is _ERROR else ()
    flags = ("-fsyntax-only", *quiet, "-fmax-errors=0", "-ftrack-macro-expansion=0", "-x", "c++", "-")
    done = result_of_compiler([*command, *flags], by_line, may_fail=True)
    lines = [0, *(match.end() for match in re.finditer("\n", text))]
    return [(lines[int(line) - 1] + int(column) - 1, message) for line, column, message in said.findall(done.stderr)]


class _Change(NamedTuple):
    """The lexemes that an error is about."""

    span: tuple[int, int]
    is_statement: bool  # one that does something
    is_reached: bool  # whenever the kernel runs


def _change(code: File, place: int) -> _Change | None:
    """Return the part to leave out for an error at `place`; None if no part can be left out."""
    at = max((i for i, begins in enumerate(code.places) if begins <= place), default=-1)
    piece = _innermost(code.pieces, at)
    if piece is None:
        return None
    is_kernel = "__global__" in code.tokens[piece.start : piece.body or piece.end]
    if piece.body is None or at <= piece.body:
        return _Change((piece.start, piece.end), False, is_kernel)
    statements = Statements(code.tokens, code.close)
    start, end = statements.around(piece.body, at)
    words = code.tokens[start:end]
    if not words:
        return None
    does = words[0] not in ("using", "typedef") and any(word == "return" or word[-1] in "(={" for word in words)
    return _Change((start, end), does, does and is_kernel and statements.is_always_reached(piece.body, start))


def _innermost(pieces: Sequence[Piece], at: int) -> Piece | None:
    piece = next((piece for piece in pieces if piece.start <= at < piece.end), None)
    return piece and (_innermost(piece.members, at) or piece)


_TORCH = re.compile(rf'^[ \t]*#[ \t]*include[ \t]*[<"]{OF_TORCH.pattern}', re.MULTILINE)
_PTX = {"asm", "__asm", "__asm__"}
_DYNAMIC = re.compile(r"\bextern\b[^;{}]*\b__shared__\b")
_RENAMED = {"__noinline__": "SIMT_NOINLINE", "alignas": "SIMT_ALIGNAS"}  # simt/specifiers.h
# the macros of simt.h that must not reach the system's headers after it; the text is expanded already
UNDEFINED = "".join(f"#undef {word}\n" for word in ("asm", "__asm__", *_RENAMED))
UNDEFINED += shown("cuda_fp8.h")
_GPU_ONLY = {f"tex{n}{fetch}": "a texture" for n in ("1D", "2D", "3D", "Cubemap") for fetch in ("", "fetch", "Lod")}
_GPU_ONLY |= dict.fromkeys(("this_cluster", "__cluster_map_shared_rank"), "a thread block cluster")
_GPU_ONLY |= {f"surf{n}{access}": "a surface" for n in ("1D", "2D", "3D") for access in ("read", "write")}
_GPU_ONLY |= {name: f"{name} in a kernel" for name in ("cudaDeviceSynchronize", "cudaGetParameterBuffer")}
_GPU_ONLY["<<<"] = "a kernel launches another (<<<…>>>), which"
_SOBOL = [f"curandState{kind}Sobol{bits}{t}" for kind in ("", "Scrambled") for bits in (32, 64) for t in ("", "_t")]
_NOT_IN_CURAND = {*_SOBOL, "curandStateMtgp32", "curandStateMtgp32_t", "curand_poisson", "curand_poisson4"}
_NOT_IN_CURAND |= {"curand_discrete", "curand_discrete4"}


def written(source: Source) -> str:
    """The text behind its definitions, which come after the runner's headers: one of them may be called N."""
    parted = (define.partition("=") for define in source.defines)
    defines = "".join(f"#define {name} {value if equals else 1}\n" for name, equals, value in parted)
    start = f'#line 1 "{source.filename}"\n'
    if _defines_warp_size(source.read()):
        defines += "#define warpSize own_warpSize\n"  # simt.h has a variable of this name
    return f"{defines}{start}{source.text}\n"


def _defines_warp_size(file: File) -> bool:
    """Whether the text has a global variable with the name warpSize, as in `constexpr int warpSize = 32;`."""
    tokens = file.tokens
    variables = [piece for piece in file.pieces if piece.is_variable and not piece.namespace]
    places = (i for piece in variables for i in range(piece.start, piece.end) if tokens[i] == "warpSize")
    return any(tokens[i + 1] in ("=", "{") for i in places)


def must_be_cut(file: File, kernels: Sequence[str]) -> bool:
    """Whether the host's compiler is certain to refuse a file and what it includes, or may take what a GPU refuses."""
    own = bisect.bisect_left(file.places, file.own)
    launches = any(file.tokens[i : i + 3] == ["<", "<", "<"] for i, token in enumerate(file.tokens) if token == "<")
    ptx_in_macro = any(macro.place >= file.own and not _PTX.isdisjoint(macro.body) for macro in file.macros)
    of_torch = _TORCH.search(file.text)
    ptx_in_header = not _PTX.isdisjoint(file.tokens[:own])
    return bool(launches or ptx_in_macro or of_torch or ptx_in_header or may_be_used(file, kernels))


def with_marked_returns(source: Source, file: File) -> Source:
    """`source`, which is `file` with what it includes, with the marks of watched builds (translate/returns.py)."""
    own = file.own
    pieces = [piece for piece in file.pieces if file.places[piece.start] >= own]
    found = marks(file, pieces, lambda place: file.text.count("\n", own, place) + 1)
    return source._replace(text=replaced(source.text, [(start - own, end - own, new) for start, end, new in found]))


def as_it_stands(source: str, file: File) -> str:
    """All of `source`, which is `file` as the compiler gets it."""
    source = source if _PTX.isdisjoint(file.tokens) else translate(source)
    return source + _for_runtime(file.text, plain_variables(file))


def preprocessed(text: str, flags: Sequence[str], source: Source) -> tuple[list[Part], list[str]]:
    """The parts of `text`, which is made of `source`, with CUDA's words in them, and the headers that are missing."""
    compiler, _ = find_compiler()
    command = [*compiler, *flags, "-DSIMT_PREPROCESS", "-include", str(HEADERS / "simt.h")]
    return preprocess(command, text, source)


def only_what_is_needed(
    text: str, name: str, flags: Sequence[str], source: Source, *, marked: bool = False
) -> tuple[str, list[str], list[str]]:
    """Return the part of `text` that kernel `name` needs, the user's files in it, and the headers that are missing.

    The text is made of `source`. With `marked`, the returns of kernels tell the runtime.

    Raises:
        CompileError: this part cannot run here.
    """
    parts, missing = preprocessed(text, flags, source)
    opened, file = files_in(parts, source), file_of(parts)
    needed = needed_by(file, name)
    function = base_name(name)
    if not any(function in piece.names and "__global__" in file.tokens[piece.start : piece.end] for piece in needed):
        raise CompileError(
            f"kernel {name} is not there after the preprocessor: it stands under an #if that is not taken; "
            f"choose by a name in `defines`"
        )
    refuse(file, needed)
    changes = [*renamed(file, (i for piece in needed for i in range(piece.start, piece.end)))]
    if marked:
        changes += marks(file, needed, lambda place: line_at(file.text, place)[1])
    parts = parts_of(only(file, needed, changes))
    cut = UNDEFINED + "".join(translate(part) if is_own else part for is_own, part in parts)
    if missing:
        compiler, _ = find_compiler()
        command = [*compiler, *flags, "-include", str(precompiled(flags))]
        cut = with_traps(cut, missing, command, lambda cut: file_of(parts_of(cut)))
    return cut + _for_runtime(cut, variables_in(file, needed)), opened, missing


_INTEGERS = {f"{u}int{bits}_t" for u in ("", "u") for bits in (8, 16, 32, 64, "ptr")} | {"size_t", "ptrdiff_t"}


def _own_integers(file: File) -> dict[str, str]:
    """New names for the integers that a text without headers defines, as in `typedef long long int64_t`."""
    aliases = [each for each in file.pieces if not each.namespace and file.tokens[each.start] in ("typedef", "using")]
    own = [each.names for each in aliases if "std" not in file.tokens[each.start : each.end]]
    return {name: f"simt_own_{name}" for name in _INTEGERS.intersection(set().union(*own))}


def renamed(file: File, indices: Iterable[int]) -> Iterator[tuple[int, int, str]]:
    """The changes that give the words of these tokens the meaning which they have on a GPU."""
    names = _RENAMED | _own_integers(file)
    return ((*file.span(i, i + 1), names[file.tokens[i]]) for i in indices if file.tokens[i] in names)


def refuse(file: File, pieces: Sequence[Piece]) -> None:
    """Raise CompileError for constructs that a GPU refuses or the CPU runner does not support."""
    for piece in pieces:
        for i, why in (*used_in(file, piece), *_unsupported(file, piece)):
            where, line = line_at(file.text, file.places[i])
            raise CompileError(f"{where}:{line}: error: {why}")


def _unsupported(file: File, piece: Piece) -> Iterator[tuple[int, str]]:
    for i in range(piece.start, piece.end):
        token = file.tokens[i]
        if what := _GPU_ONLY.get("<<<" if file.tokens[i : i + 3] == ["<", "<", "<"] else token):
            yield i, f"{what} runs on a GPU only: give the kernel a plain C++ path"
        elif token in _NOT_IN_CURAND:
            has = "XORWOW, Philox4x32-10 and MRG32k3a with uniform, normal and log-normal numbers"
            yield i, f"{token} is not in cudascope's cuRAND, which has {has}: give the kernel a plain C++ path"


def _for_runtime(text: str, variables: Iterable[Variable]) -> str:
    """The memory of the `extern __shared__` arrays of `text`, and where its variables lie, for `Library.variables`.

    Since the variables are listed, none is folded into the code.
    """
    dynamic = DYNAMIC_MEMORY if _DYNAMIC.search(text) else ""
    return dynamic + table_of((each.name, f"::{each.name}") for each in variables)
