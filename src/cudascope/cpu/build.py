"""Compiles a .cu file for the CPU, with g++ or clang++ against include/simt.h, and keeps the result on disk.

A kernel has two builds: the plain one to run, and an instrumented one (-fsanitize=thread with our own hooks in place of
the sanitizer's) to observe and to check. A build is found again by its content: source, included files, definitions,
options, compiler. `CUDASCOPE_CACHE` moves the folder.
"""

import contextlib
import ctypes
import functools
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cudascope.arguments.launch_shape import MAX_SHARED_BYTES, MAX_THREADS
from cudascope.cpp.signature import address_of
from cudascope.cpp.source import CompileError, Source
from cudascope.cpu.library import Library, load
from cudascope.cpu.own_sources import own_sources
from cudascope.toolchain.cache import cache_dir, digest
from cudascope.toolchain.compiler import BYTES, find_compiler, in_words, run_compiler, with_conditions
from cudascope.toolchain.headers import HEADERS, RUNTIME, STAND_INS, header_folder, nvidia_headers
from cudascope.toolchain.precompiled import precompiled, without_std
from cudascope.translate.assembly import changed, has_empty_loop
from cudascope.translate.cuda import as_it_stands, must_be_cut, only_what_is_needed, preprocessed, written
from cudascope.translate.missing import with_template_keywords
from cudascope.translate.shifts import open_shifts, with_exact_shifts

COMMON_FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-ftls-model=global-dynamic",
    "-fstack-clash-protection",
    "-fno-finite-loops",
    "-fno-strict-aliasing",
    "-fsanitize=shift-exponent",
    "-g1",
    "-Wno-attributes",
    "-Wno-unknown-pragmas",
)
PLAIN_FLAGS = ("-O2",)
# A loop that waits for memory that is not volatile: -O2 reads its condition once only, as a compiler may.
READ_AT_EACH_TURN = (
    "-O1",
    "-fno-tree-fre",
    "-fno-tree-loop-im",
    "-fno-tree-dominator-opts",
    "-fno-move-loop-invariants",
)
GCC_FLAGS = ("-fno-gnu-unique", "-fno-extern-tls-init", "-fmax-errors=8")
# Every access calls a hook, and shall be the one that the source asks for: not split into words (sra), not moved out of
# a loop that might not execute it (loop-im), not merged with its neighbours or made a memset (both begin with -O2).
KEEP_ACCESSES = ("-fno-tree-sra", "-fno-tree-loop-im", "-fno-tree-phiprop")
INSTRUMENTED_FLAGS = ("-O1", "-DSIMT_INSTRUMENTED", "-fsanitize=thread,alignment,object-size", *KEEP_ACCESSES)
# A volatile access has a hook of its own.
GCC_INSTRUMENTED_FLAGS = ("--param=tsan-distinguish-volatile=1",)
CLANG_INSTRUMENTED_FLAGS = ("-mllvm", "-tsan-distinguish-volatile=1")

# Other optimizations make the runtime slower to compile, and launches are not faster with them.
_RUNTIME_PARTS = {"runtime.cpp": ["-O1"], "calls.cpp": ["-O2", "-fno-tree-pre", "-fno-gcse", "-fno-tree-vrp"]}


def build(source: Source, name: str, *, instrumented: bool) -> Library:
    """The compiled file that holds kernel `name`, from the cache or from the compiler. Raises CompileError.

    A file that the compiler accepts unchanged is built whole, for all its plain kernels at once. From any other file,
    only the part that kernel `name` needs is built.
    """
    texts = [source.text, *(text for _, text in source.included())]
    file = source.read()
    together = file.plain_kernels
    entries = together if name in together else [name]
    flags, _ = _flags(source, instrumented=instrumented)

    def path(*entries: str) -> Path:
        key = digest(*texts, source.filename, *source.defines, *entries, *flags, find_compiler()[1], own_sources())
        return cache_dir() / f"{Path(source.filename).stem}-{key}{'-instrumented' if instrumented else ''}.so"

    whole, cut = path(*entries), path("only", name)
    if not whole.exists() and not cut.exists():
        with runtime_built_meanwhile():
            _compile(source, name, entries, whole, cut, instrumented)
    runtime()
    return load(whole if whole.exists() else cut, source.filename)


def _compile(source: Source, name: str, entries: list[str], whole: Path, cut: Path, instrumented: bool) -> None:
    """Compile the whole file to `whole`. If the compiler does not accept it, compile to `cut` what `name` needs."""
    file = source.read()
    flags, foreign = _flags(source, instrumented=instrumented)
    if not must_be_cut(file):
        with contextlib.suppress(CompileError):
            translation = as_it_stands(written(source) + _epilogue(entries), file)
            return compile_library(translation, flags, whole, gaps=instrumented, foreign=foreign, may_be_cut=True)
    try:
        translation = only_what_is_needed(written(source) + _epilogue([name]), name, flags, foreign)
    except CompileError as error:
        raise with_conditions(error, source.filename, source.text) from None
    try:
        _compile_cut(translation, flags, cut, instrumented, foreign)
    except CompileError as error:
        raise in_words(error, source.filename, name) from None


def own_text(source: Source) -> str:
    """Return `source` and the user's own headers after the preprocessor. Raises CompileError."""
    parts, _ = preprocessed(written(source), *_flags(source, instrumented=False))
    return "".join(text for is_own, text in parts if is_own)


def _flags(source: Source, *, instrumented: bool) -> tuple[list[str], list[Path]]:
    """The compiler's flags, and the folders of headers that are not the user's."""
    compiler, _ = find_compiler()
    foreign = [header_folder(), HEADERS, STAND_INS, nvidia_headers()]
    flags = [*COMMON_FLAGS, *(INSTRUMENTED_FLAGS if instrumented else PLAIN_FLAGS), *without_std(source)]
    clang = "clang" in compiler[0]
    flags += ["-Wno-everything"] if clang else GCC_FLAGS
    if instrumented:
        flags += CLANG_INSTRUMENTED_FLAGS if clang else GCC_INSTRUMENTED_FLAGS
    # of the options, the host's compiler has a use for the language's version
    flags += [re.sub("^--", "-", option) for option in source.options if re.match("--?std=", option)]
    own = [source.folder or Path(), *source.include_path]
    flags += [f"-I{folder}" for folder in (*foreign[:-1], *own, foreign[-1])]
    return flags, foreign


def entry_symbol(name: str) -> str:
    """The C name under which a kernel, or an instance of a template, is called."""
    return "simt_entry_" + (name if name.isidentifier() else digest(name))


# ------------------------------------------------------------------------------------------------ the compiler


@functools.cache
def runtime() -> ctypes.PyDLL:
    """The scheduler and the hooks (runtime/runtime.cpp and calls.cpp), for all kernels of the process to call."""
    return ctypes.PyDLL(str(_runtime_file()), mode=ctypes.RTLD_GLOBAL)  # simt_launch lets go of Python's lock itself


@functools.cache
def _runtime_file() -> Path:
    limits = [f"-DSIMT_MAX_THREADS={MAX_THREADS}", f"-DSIMT_MAX_SHARED={MAX_SHARED_BYTES}"]
    _, identity = find_compiler()
    path = cache_dir() / f"simt_runtime-{digest(own_sources(), *limits, identity)}.so"
    if not path.exists():
        import fcntl  # Windows does not have it, and has no compiler that gets here

        with open(path.with_suffix(".lock"), "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # compiling takes long: a second process waits for the first
            if not path.exists():
                _compile_runtime(limits, path)
    return path


def _compile_runtime(limits: list[str], path: Path) -> None:
    """Compile the two parts of the runtime at the same time, and link them."""
    compiler, _ = find_compiler()
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:

        def compiled(name: str) -> str:
            made = f"{folder}/{name}.o"
            flags = ["-std=c++17", "-fPIC", "-pthread", *_RUNTIME_PARTS[name], *limits]
            run_compiler([*compiler, *flags, "-c", str(RUNTIME / name), "-o", made])
            return made

        with ThreadPoolExecutor() as pool:
            parts = [*pool.map(compiled, _RUNTIME_PARTS)]
        run_compiler([*compiler, "-shared", *parts, "-o", f"{folder}/runtime.so", "-pthread", "-ldl"])
        os.replace(f"{folder}/runtime.so", path)


@contextlib.contextmanager
def runtime_built_meanwhile() -> Iterator[None]:
    """Compile the runtime, if it is not in the cache, on another core while the `with` block compiles a kernel."""
    with ThreadPoolExecutor(1) as pool:
        built = pool.submit(_runtime_file)
        yield
    built.result()


def compile_library(
    source: str,
    flags: list[str],
    path: Path,
    *,
    gaps: bool = False,
    foreign: Sequence[Path] = (),
    may_be_cut: bool = False,
) -> None:
    """Compile `source` to the shared library `path`, which appears whole or not at all."""
    compiler, _ = find_compiler()
    flags = [*flags, "-include", str(precompiled(flags))]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        assembly, library = f"{folder}/kernel.s", f"{folder}/kernel.so"
        run_compiler([*compiler, *flags, "-S", "-x", "c++", "-", "-o", assembly], source)
        if places := open_shifts(Path(assembly).read_text(**BYTES), foreign):
            exact, left = with_exact_shifts(source, places)
            if left and may_be_cut:
                raise CompileError("a shift is in a macro or a header, which are part of the text once it is cut")
            with contextlib.suppress(CompileError):  # of a bit field, for example
                run_compiler([*compiler, *flags, "-S", "-x", "c++", "-", "-o", f"{folder}/exact.s"], exact)
                source, assembly = exact, f"{folder}/exact.s"
        if has_empty_loop(Path(assembly).read_text(**BYTES)):
            run_compiler([*compiler, *flags, *READ_AT_EACH_TURN, "-S", "-x", "c++", "-", "-o", assembly], source)
        Path(assembly).write_text(changed(Path(assembly).read_text(**BYTES), gaps=gaps), **BYTES)
        run_compiler([*compiler, "-shared", assembly, "-o", library, "-pthread", "-ldl"])
        os.replace(library, path)


def _compile_cut(source: str, flags: list[str], path: Path, instrumented: bool, foreign: Sequence[Path]) -> None:
    """Compile what is left of a file; if the compiler wants the word template at some places, with it there."""
    try:
        compile_library(source, flags, path, gaps=instrumented, foreign=foreign)
    except CompileError as error:
        if "template" not in str(error):
            raise
        completed = with_template_keywords(source, [*find_compiler()[0], *flags, "-include", str(precompiled(flags))])
        if completed == source:
            raise
        compile_library(completed, flags, path, gaps=instrumented, foreign=foreign)


def _epilogue(entries: Sequence[str]) -> str:
    """Return the text after the file: a C function per kernel, and the place of its shared memory for the runtime."""
    lines = ['#line 1 "<cudascope>"', "#undef asm", "#undef __asm__"]
    lines += [f"SIMT_ENTRY({entry_symbol(name)}, {address_of(name)})" for name in entries]
    lines.append('extern "C" { void simt_base() {} }  // tells where the file is loaded')
    return "\n".join(lines) + "\n"
