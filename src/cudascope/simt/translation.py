"""A CUDA source as the C++ that, behind simt.h, the host's compiler takes: as it stands, or what one kernel needs."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from cudascope.build import OF_TORCH, CompileError, Source
from cudascope.declarations import unconditional
from cudascope.device_code import DeviceCode
from cudascope.limits import MAX_SHARED_BYTES
from cudascope.names import outside_functions
from cudascope.outline import Piece
from cudascope.signature import base_name
from cudascope.simt.compiler import find_compiler
from cudascope.simt.missing import with_traps
from cudascope.simt.precompiled import precompiled
from cudascope.simt.preprocess import Preprocessed, line_at, own_lexemes, parts_of, preprocess
from cudascope.simt.ptx import translate
from cudascope.tokens import strip_comments, tokens_of
from cudascope.variables import Variable, variables_in, variables_of

_ONLY_CUT = re.compile(r"<<<")  # no compiler takes it as it stands
_TORCH = re.compile(rf'^[ \t]*#[ \t]*include[ \t]*[<"]{OF_TORCH.pattern}', re.MULTILINE)
_PTX = re.compile(r"\b(?:asm|__asm|__asm__)\b")
_PTX_IN_MACRO = re.compile(r"^[ \t]*#[ \t]*define\b(?:[^\n]|\\\n)*\b(?:asm|__asm|__asm__)\b", re.MULTILINE)
_DYNAMIC = re.compile(r"\bextern\b[^;{}]*\b__shared__\b")


_RENAMED = {"__noinline__": "SIMT_NOINLINE", "alignas": "SIMT_ALIGNAS"}  # simt_specifiers.h
# the macros of simt.h that must not reach the system's headers after it; the text is expanded already
_UNDEFINED = "".join(f"#undef {word}\n" for word in ("asm", "__asm__", "warpSize", *_RENAMED))
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
    defines += _warp_size("\n".join([source.text, *(text for _, text in source.included())]), start)
    return f"{defines}{start}{source.text}\n"


_NAMES_WARP_SIZE = re.compile(r"\b(?:int|unsigned|auto|\w+_t)\s+warpSize\b")
_DEFINES_WARP_SIZE = re.compile(
    r"(?:^|[;}] )(?:(?:static|inline|constexpr|const|__device__|__constant__) )*\w+ warpSize [={]"
)


def _warp_size(text: str, start: str) -> str:
    """Lines that make warpSize a constant, and no macro, for a text that gives the name to something of its own."""
    if not _NAMES_WARP_SIZE.search(text):
        return ""
    outside = " ".join(outside_functions(tokens_of(strip_comments(text))))
    return "#undef warpSize\n" + (
        "" if _DEFINES_WARP_SIZE.search(outside) else f"{start}constexpr int warpSize = 32;\n"
    )


def must_be_cut(texts: Sequence[str]) -> bool:
    """Whether the host's compiler is certain to refuse a file and what it includes."""
    source, *included = texts
    whys = [(_ONLY_CUT, texts), (_TORCH, texts), (_PTX_IN_MACRO, [source]), (_PTX, included)]
    return any(why.search(text) and why.search(strip_comments(text)) for why, those in whys for text in those)


def as_it_stands(source: str, texts: Sequence[str]) -> str:
    """All of `source`; `texts` are the file and what it includes."""
    variables = variables_of(unconditional(texts[0]))
    source = translate(source) if _PTX.search(source) else source
    return source + _dynamic("\n".join(texts)) + _table(variables)


def preprocessed(source: str, flags: Sequence[str], foreign: Sequence[Path]) -> Preprocessed:
    """`source` with CUDA's words left in it. `foreign` are the folders of headers that are not the user's."""
    compiler, _ = find_compiler()
    return preprocess([*compiler, *flags, "-DSIMT_PREPROCESS", "-include", "simt.h"], source, foreign)


def only_what_is_needed(source: str, name: str, flags: Sequence[str], foreign: Sequence[Path]) -> str:
    """Return the part of `source` that kernel `name` needs. Raise CompileError if that part cannot run here."""
    file = preprocessed(source, flags, foreign)
    code = DeviceCode(file.text, file.lexemes)
    needed = code.needed_by(name)
    function = base_name(name)
    if not any(function in piece.names and "__global__" in code.tokens[piece.start : piece.end] for piece in needed):
        raise CompileError(
            f"kernel {name} is not there after the preprocessor: it stands under an #if that is not taken; "
            f"choose by a name in `defines`"
        )
    _refuse(code, needed)
    lexemes = (lexeme for piece in needed for lexeme in code.lexemes[piece.start : piece.end])
    names = _RENAMED | _own_integers(code)
    renamed = ((place, place + len(token), names[token]) for token, place in lexemes if token in names)
    parts = parts_of(code.only(needed, renamed), foreign)
    text = _UNDEFINED + "".join(translate(part) if is_own and _PTX.search(part) else part for is_own, part in parts)
    if file.missing:
        compiler, _ = find_compiler()
        command = [*compiler, *flags, "-include", str(precompiled(flags))]
        text = with_traps(
            text, file.missing, command, lambda text: DeviceCode(text, own_lexemes(parts_of(text, foreign)))
        )
    return text + _dynamic(text) + _table(variables_in(code, needed))


_INTEGERS = {f"{u}int{bits}_t" for u in ("", "u") for bits in (8, 16, 32, 64, "ptr")} | {"size_t", "ptrdiff_t"}


def _own_integers(code: DeviceCode) -> dict[str, str]:
    """New names for what a text without headers defines itself, as NVRTC wants it: `typedef long long int64_t`."""
    names = set()
    for piece in code.pieces:
        tokens = code.tokens[piece.start : piece.end]
        if not piece.namespace and tokens[0] in ("typedef", "using") and "std" not in tokens:
            names |= _INTEGERS & piece.names
    return {name: f"simt_own_{name}" for name in names}


def _refuse(code: DeviceCode, pieces: Sequence[Piece]) -> None:
    """Raise CompileError for constructs that the CPU runner does not support."""
    for piece in pieces:
        tokens = code.tokens[piece.start : piece.end]
        for i, token in enumerate(tokens):
            launch = token == "<" and tokens[i : i + 3] == ["<", "<", "<"]
            if why := "a kernel launches another (<<<…>>>), which" if launch else _GPU_ONLY.get(token):
                file, line = line_at(code.text, code.lexemes[piece.start + i].place)
                raise CompileError(f"{file}:{line}: error: {why} runs on a GPU only: give the kernel a plain C++ path")
            if token in _NOT_IN_CURAND:
                file, line = line_at(code.text, code.lexemes[piece.start + i].place)
                raise CompileError(
                    f"{file}:{line}: error: {token} is not in cudascope's cuRAND, which has XORWOW, Philox4x32-10 and "
                    f"MRG32k3a with uniform, normal and log-normal numbers: give the kernel a plain C++ path"
                )


def _dynamic(text: str) -> str:
    """The memory of `extern __shared__` arrays, which `build` gives out, if there are any."""
    if not _DYNAMIC.search(text):
        return ""
    aligned = "__attribute__((used, aligned(1024)))"
    return f'extern "C" {{ {aligned} thread_local char simt_dynamic[{MAX_SHARED_BYTES}]; }}\n'


def _table(variables: Iterable[Variable]) -> str:
    """Where the variables lie, for `Library.variables`. Since they are listed, none is folded into the code."""
    rows = [f'{{"{each.name}", (void*)&::{each.name}, sizeof(::{each.name})}}, ' for each in variables]
    row = "struct simt_variable { const char* name; void* address; unsigned long bytes; }"
    return f'extern "C" {{ {row} simt_variables[] = {{{"".join(rows)}{{nullptr, nullptr, 0}}}}; }}\n'
