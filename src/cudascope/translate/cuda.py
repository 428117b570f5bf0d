"""A CUDA source as the C++ that, behind simt.h, the host's compiler takes: as it stands, or what one kernel needs."""

import bisect
import re
from collections.abc import Iterable, Sequence

from cudascope.cpp.device_code import needed_by, only
from cudascope.cpp.file import File
from cudascope.cpp.outline import Piece
from cudascope.cpp.signature import base_name
from cudascope.cpp.source import OF_TORCH, CompileError, Source
from cudascope.cpp.variables import Variable, plain_variables, variables_in
from cudascope.toolchain.compiler import find_compiler
from cudascope.toolchain.headers import HEADERS, shown
from cudascope.toolchain.precompiled import precompiled
from cudascope.translate.entry_points import DYNAMIC_MEMORY, table_of
from cudascope.translate.host_only import may_be_used, used_in
from cudascope.translate.missing import with_traps
from cudascope.translate.preprocess import Part, file_of, line_at, own_files, parts_of, preprocess
from cudascope.translate.ptx import translate

_TORCH = re.compile(rf'^[ \t]*#[ \t]*include[ \t]*[<"]{OF_TORCH.pattern}', re.MULTILINE)
_PTX = {"asm", "__asm", "__asm__"}
_INTEGER = re.compile(r"int|unsigned|auto|\w+_t")
_DYNAMIC = re.compile(r"\bextern\b[^;{}]*\b__shared__\b")


_RENAMED = {"__noinline__": "SIMT_NOINLINE", "alignas": "SIMT_ALIGNAS"}  # simt/specifiers.h
# the macros of simt.h that must not reach the system's headers after it; the text is expanded already
_UNDEFINED = "".join(f"#undef {word}\n" for word in ("asm", "__asm__", "warpSize", *_RENAMED))
_UNDEFINED += shown("cuda_fp8.h")
_GPU_ONLY = {f"tex{n}{fetch}": "a texture" for n in ("1D", "2D", "3D", "Cubemap") for fetch in ("", "fetch", "Lod")}
_GPU_ONLY |= dict.fromkeys(("this_cluster", "__cluster_map_shared_rank"), "a thread block cluster")
_GPU_ONLY |= {f"surf{n}{access}": "a surface" for n in ("1D", "2D", "3D") for access in ("read", "write")}
_GPU_ONLY |= {name: f"{name} in a kernel" for name in ("cudaDeviceSynchronize", "cudaGetParameterBuffer")}
_SOBOL = [
    f"curandState{scrambled}Sobol{bits}{t}" for scrambled in ("", "Scrambled") for bits in (32, 64) for t in ("", "_t")
]
_NOT_IN_CURAND = {*_SOBOL, "curandStateMtgp32", "curandStateMtgp32_t", "curand_poisson", "curand_poisson4"}
_NOT_IN_CURAND |= {"curand_discrete", "curand_discrete4"}


def written(source: Source) -> str:
    """The text behind its definitions, which come after the runner's headers: one of them may be called N."""
    parted = (define.partition("=") for define in source.defines)
    defines = "".join(f"#define {name} {value if equals else 1}\n" for name, equals, value in parted)
    start = f'#line 1 "{source.filename}"\n'
    defines += _warp_size(source.read(), start)
    return f"{defines}{start}{source.text}\n"


def _warp_size(file: File, start: str) -> str:
    """Lines that make warpSize a constant, and no macro, for a text that gives the name to something of its own."""
    tokens = file.tokens
    places = [i for i, token in enumerate(tokens) if token == "warpSize" and _INTEGER.fullmatch(tokens[i - 1])]
    variables = [range(piece.start, piece.end) for piece in file.pieces if piece.is_variable]
    has_variable = any(i in variable and tokens[i + 1] in ("=", "{") for i in places for variable in variables)
    constant = "" if has_variable else f"{start}constexpr int warpSize = 32;\n"
    return f"#undef warpSize\n{constant}" if places else ""


def must_be_cut(file: File, kernels: Sequence[str]) -> bool:
    """Whether the host's compiler is certain to refuse a file and what it includes, or may take what a GPU refuses."""
    own = bisect.bisect_left(file.places, file.own)
    launches = any(file.tokens[i : i + 3] == ["<", "<", "<"] for i, token in enumerate(file.tokens) if token == "<")
    ptx_in_macro = any(macro.place >= file.own and not _PTX.isdisjoint(macro.body) for macro in file.macros)
    of_torch = _TORCH.search(file.text)
    ptx_in_header = not _PTX.isdisjoint(file.tokens[:own])
    return bool(launches or ptx_in_macro or of_torch or ptx_in_header or may_be_used(file, kernels))


def as_it_stands(source: str, file: File) -> str:
    """All of `source`, which is `file` as the compiler gets it."""
    source = source if _PTX.isdisjoint(file.tokens) else translate(source)
    return source + _dynamic(file.text) + _table(plain_variables(file))


def preprocessed(text: str, flags: Sequence[str], source: Source) -> tuple[list[Part], list[str]]:
    """The parts of `text`, which is made of `source`, with CUDA's words in them, and the headers that are missing."""
    compiler, _ = find_compiler()
    command = [*compiler, *flags, "-DSIMT_PREPROCESS", "-include", str(HEADERS / "simt.h")]
    return preprocess(command, text, source)


def only_what_is_needed(text: str, name: str, flags: Sequence[str], source: Source) -> tuple[str, list[str], list[str]]:
    """Return the part of `text` that kernel `name` needs, the user's files in it, and the headers that are missing.

    The text is made of `source`.

    Raises:
        CompileError: this part cannot run here.
    """
    parts, missing = preprocessed(text, flags, source)
    opened = [file for file in own_files(parts) if file != source.filename]
    file = file_of(parts)
    needed = needed_by(file, name)
    function = base_name(name)
    if not any(function in piece.names and "__global__" in file.tokens[piece.start : piece.end] for piece in needed):
        raise CompileError(
            f"kernel {name} is not there after the preprocessor: it stands under an #if that is not taken; "
            f"choose by a name in `defines`"
        )
    _refuse(file, needed)
    names = _RENAMED | _own_integers(file)
    at = (i for piece in needed for i in range(piece.start, piece.end) if file.tokens[i] in names)
    renamed = ((*file.span(i, i + 1), names[file.tokens[i]]) for i in at)
    parts = parts_of(only(file, needed, renamed))
    cut = _UNDEFINED + "".join(translate(part) if is_own else part for is_own, part in parts)
    if missing:
        compiler, _ = find_compiler()
        command = [*compiler, *flags, "-include", str(precompiled(flags))]
        cut = with_traps(cut, missing, command, lambda cut: file_of(parts_of(cut)))
    return cut + _dynamic(cut) + _table(variables_in(file, needed)), opened, missing


_INTEGERS = {f"{u}int{bits}_t" for u in ("", "u") for bits in (8, 16, 32, 64, "ptr")} | {"size_t", "ptrdiff_t"}


def _own_integers(file: File) -> dict[str, str]:
    """New names for what a text without headers defines itself, as NVRTC wants it: `typedef long long int64_t`."""
    names = set()
    for piece in file.pieces:
        tokens = file.tokens[piece.start : piece.end]
        if not piece.namespace and tokens[0] in ("typedef", "using") and "std" not in tokens:
            names |= _INTEGERS & piece.names
    return {name: f"simt_own_{name}" for name in names}


def _refuse(file: File, pieces: Sequence[Piece]) -> None:
    """Raise CompileError for what a GPU refuses, and for constructs that the CPU runner does not support."""
    for piece in pieces:
        for i, why in used_in(file, piece):
            where, line = line_at(file.text, file.places[i])
            raise CompileError(f"{where}:{line}: error: {why}")
        tokens = file.tokens[piece.start : piece.end]
        for i, token in enumerate(tokens):
            launch = token == "<" and tokens[i : i + 3] == ["<", "<", "<"]
            if why := "a kernel launches another (<<<…>>>), which" if launch else _GPU_ONLY.get(token):
                where, line = line_at(file.text, file.places[piece.start + i])
                raise CompileError(f"{where}:{line}: error: {why} runs on a GPU only: give the kernel a plain C++ path")
            if token in _NOT_IN_CURAND:
                where, line = line_at(file.text, file.places[piece.start + i])
                raise CompileError(
                    f"{where}:{line}: error: {token} is not in cudascope's cuRAND, which has XORWOW, Philox4x32-10 and "
                    f"MRG32k3a with uniform, normal and log-normal numbers: give the kernel a plain C++ path"
                )


def _dynamic(text: str) -> str:
    """The memory of `extern __shared__` arrays, which `build` gives out, if there are any."""
    return DYNAMIC_MEMORY if _DYNAMIC.search(text) else ""


def _table(variables: Iterable[Variable]) -> str:
    """Where the variables lie, for `Library.variables`. Since they are listed, none is folded into the code."""
    return table_of((each.name, f"::{each.name}") for each in variables)
