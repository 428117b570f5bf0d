"""Compiles a .cu file for the CPU, with g++ or clang++ against include/simt.h, and keeps the result on disk.

A kernel has two builds: the plain one to run, and an instrumented one (-fsanitize=thread with our own hooks in place of
the sanitizer's) to observe and to check. A build is found again by its content: source, included files, definitions,
options, compiler, and the code of cudascope that has a part in it. `CUDASCOPE_CACHE` moves the folder.

The compiler runs in the source's folder, where it then finds what the source includes with quotes.
"""

import contextlib
import ctypes
import functools
import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from cudascope.arguments.launch_shape import MAX_SHARED_BYTES, MAX_THREADS
from cudascope.cpp.signature import address_of
from cudascope.cpp.source import CompileError, Included, Source
from cudascope.cpu.library import Library, load, warnings_of
from cudascope.cpu.rules import FLAGS
from cudascope.toolchain.cache import UNFINISHED, cache_dir, code_of, digest, prune_at_times, publish, used
from cudascope.toolchain.compiler import (
    BYTES,
    find_compiler,
    in_words,
    prerequisites,
    result_of_compiler,
    run_compiler,
    unset_variables,
    with_conditions,
)
from cudascope.toolchain.headers import (
    HEADERS,
    RUNTIME,
    STAND_INS,
    header_folder,
    is_foreign,
    lenient_folders,
    nvidia_headers,
    nvidia_version,
    our_headers,
)
from cudascope.toolchain.precompiled import precompiled, without_std
from cudascope.translate.assembly import changed, has_empty_loop
from cudascope.translate.cuda import (
    as_it_stands,
    must_be_cut,
    only_what_is_needed,
    preprocessed,
    with_marked_returns,
    with_words_for_gcc,
    written,
)
from cudascope.translate.host_only import explained
from cudascope.translate.shifts import open_shifts, with_exact_shifts

_OF_SYSTEM = (Path("/usr/local/include"), Path("/usr/include"))  # where a missing header may appear

COMMON_FLAGS = ["-std=c++17", "-fPIC", "-g1", "-ftls-model=global-dynamic", "-fstack-clash-protection"]
COMMON_FLAGS += ["-fno-finite-loops", "-fno-strict-aliasing", "-fsanitize=shift-exponent"]
COMMON_FLAGS += ["-Wno-attributes", "-Wno-unknown-pragmas"]
PLAIN_FLAGS = ("-O2",)
# A loop that waits for memory that is not volatile: -O2 reads its condition once only, as a compiler may.
READ_AT_EACH_TURN = ("-O1", "-fno-tree-fre", "-fno-tree-loop-im", "-fno-tree-dominator-opts")
READ_AT_EACH_TURN += ("-fno-move-loop-invariants",)
GCC_FLAGS = ("-fno-gnu-unique", "-fno-extern-tls-init", "-fmax-errors=8", "-Werror=vla")
# Every access calls a hook, and shall be the one that the source asks for: not split into words (sra), not moved out of
# a loop that might not execute it (loop-im), not merged with its neighbours or made a memset (both begin with -O2).
KEEP_ACCESSES = ("-fno-tree-sra", "-fno-tree-loop-im", "-fno-tree-phiprop")
INSTRUMENTED_FLAGS = ("-O1", "-DSIMT_INSTRUMENTED", "-fsanitize=thread,alignment,object-size", *KEEP_ACCESSES)
# A volatile access has a hook of its own.
GCC_INSTRUMENTED_FLAGS = ("--param=tsan-distinguish-volatile=1", "-Wuninitialized", "-Wmaybe-uninitialized")
CLANG_INSTRUMENTED_FLAGS = ("-mllvm", "-tsan-distinguish-volatile=1", "-Wuninitialized", "-Wreturn-stack-address")

# Other optimizations make the runtime slower to compile, and launches are not faster with them.
_RUNTIME_PARTS = {"runtime.cpp": ["-O1"], "calls.cpp": ["-O2", "-fno-tree-pre", "-fno-gcse", "-fno-tree-vrp"]}


class Kept(NamedTuple):
    """The place of a library in the cache, and the files that its compilation opened.

    All that is known before the compilation is in a library's key. The compiler may open more files than the text
    tells, as for `#include NAME(x)`, and it may look for files that are not there yet. Both are listed under the key,
    and their content is in the library's own name. So a library is found only while these files are as they were.
    """

    stem: str
    key: str

    def found(self) -> tuple[Path, list[str]] | None:
        """Return the library and the user's files that it was made of, if it is there and they are as they were."""
        try:
            opened, absent = json.loads(self._list.read_text(encoding="utf-8"))
        except (FileNotFoundError, TypeError, ValueError):  # not built yet, or not whole
            return None
        library = self._library([*opened, *absent])
        if not library.exists():
            return None
        used(self._list)
        return used(library), opened

    def keep(self, made: Path, opened: Sequence[str], absent: Sequence[str]) -> None:
        """Keep the library `made`. The compiler opened the files `opened`, and would have opened each of `absent`."""
        library = self._library([*opened, *absent])
        if warnings_of(made).exists():
            os.replace(warnings_of(made), warnings_of(library))
        os.replace(made, library)
        publish(self._list, json.dumps([list(opened), list(absent)]).encode())
        prune_at_times()

    @property
    def _list(self) -> Path:
        return cache_dir() / f"{self.key}.files"

    def _library(self, files: Sequence[str]) -> Path:
        parts = [self.key]
        for path in map(Path, files):
            parts += [str(path), str(path.is_file()), path.read_bytes() if path.is_file() else b""]
        return cache_dir() / f"{self.stem}-{digest(*parts)}.so"


def build(source: Source, name: str, *, instrumented: bool) -> Library:
    """The compiled file that holds kernel `name`, from the cache or from the compiler. Raises CompileError.

    A file that the compiler accepts unchanged is built whole, for all its plain kernels at once. From any other file,
    only the part that kernel `name` needs is built.
    """
    included = source.with_included()
    file = source.read(included)
    together = file.plain_kernels
    entries = together if name in together else [name]
    flags = compiler_flags(source, included, instrumented=instrumented)
    parts = [source.text, source.filename, *included.key(source.folder), *source.defines, *flags, *build_key()]

    def kept(*entries: str) -> Kept:
        stem = Path(source.filename).stem
        return Kept(f"{stem}-instrumented" if instrumented else stem, digest(*entries, *parts))

    whole, cut = kept(*entries), kept("only", name)
    if not (found := whole.found() or cut.found()):
        with runtime_built_meanwhile():
            _compile(source, included, name, entries, flags, whole, cut, instrumented)
        found = whole.found() or cut.found()
    if not found:
        raise CompileError(f"{source.filename}: a file that it includes is written while it is compiled: compile again")
    runtime()
    library, files = found
    return load(library, source.filename, source.folder, tuple(files))


def build_key() -> list[str]:
    """Return all that decides a build for the CPU, except its text and its flags."""
    return [find_compiler()[1], our_headers(), nvidia_version(), code_of(__name__)]


def _compile(
    source: Source,
    included: Included,
    name: str,
    entries: list[str],
    flags: list[str],
    whole: Kept,
    cut: Kept,
    instrumented: bool,
) -> None:
    """Compile the whole file for `whole`. If the compiler does not accept it, compile for `cut` what `name` needs."""
    file = source.read(included)
    with tempfile.TemporaryDirectory(dir=cache_dir(), prefix=UNFINISHED) as folder:
        made = Path(folder, "kernel.so")
        if not must_be_cut(file, entries):
            with contextlib.suppress(CompileError):
                marked = with_marked_returns(source, file) if instrumented else source
                translation = as_it_stands(written(marked) + _epilogue(entries), file)
                opened = compile_library(translation, flags, made, source, gaps=instrumented, may_be_cut=True)
                whole.keep(made, opened, _elsewhere(source, opened) if included.is_unread else [])
                return
        try:
            text = written(source) + _epilogue([name])
            translation, opened, missing = only_what_is_needed(text, name, flags, source, marked=instrumented)
        except CompileError as error:
            raise with_conditions(error, source.filename, source.text) from None
        try:
            _compile_cut(translation, flags, made, source, instrumented, opened)
        except CompileError as error:
            raise explained(in_words(error, source, name), file) from None
        absent = _elsewhere(source, opened) if included.is_unread else []
        absent += [str(folder / name) for name in missing for folder in (*_OF_SYSTEM, nvidia_headers())]
        cut.keep(made, opened, absent)


def _elsewhere(source: Source, opened: Sequence[str]) -> list[str]:
    """The places at which the compiler may have looked for the files `opened` before it found them."""
    files = [Path(file) for file in opened]
    folders = dict.fromkeys([source.folder, *source.include_path, *(file.parent for file in files)])
    names = {file.relative_to(folder) for file in files for folder in folders if file.is_relative_to(folder)}
    return sorted(str(folder / name) for name in names for folder in folders if not (folder / name).exists())


def own_text(source: Source) -> str:
    """Return `source` and the user's own headers after the preprocessor. Raises CompileError."""
    flags = compiler_flags(source, source.with_included(), instrumented=False)
    parts, _ = preprocessed(written(source), flags, source)
    return "".join(text for is_own, text in parts if is_own)


def compiler_flags(source: Source, included: Included, *, instrumented: bool) -> list[str]:
    """Return the flags with which the compiler gets the text that is made of `source`."""
    compiler, _ = find_compiler()
    flags = [*COMMON_FLAGS, *(INSTRUMENTED_FLAGS if instrumented else PLAIN_FLAGS), *without_std(source)]
    clang = "clang" in compiler[0]
    flags += ["-Wno-everything"] if clang else GCC_FLAGS
    if instrumented:
        flags += CLANG_INSTRUMENTED_FLAGS if clang else GCC_INSTRUMENTED_FLAGS
    # of the options, the host's compiler has a use for the language's version
    flags += [re.sub("^--", "-", option) for option in source.options if re.match("--?std=", option)]
    ours = [header_folder(), HEADERS, STAND_INS, nvidia_headers()]
    folders = [*source.include_path, *ours, *source.late_include_path, *lenient_folders(included)]
    return flags + [f"-I{folder}" for folder in folders]


def entry_symbol(name: str) -> str:
    """The C name under which a kernel, or an instance of a template, is called."""
    return "simt_entry_" + (name if name.isidentifier() else digest(name))


@functools.cache
def runtime() -> ctypes.PyDLL:
    """The scheduler and the hooks (runtime/runtime.cpp and calls.cpp), for all kernels of the process to call."""
    return ctypes.PyDLL(str(_runtime_file()), mode=ctypes.RTLD_GLOBAL)  # simt_launch lets go of Python's lock itself


@functools.cache
def _runtime_file() -> Path:
    limits = [f"-DSIMT_MAX_THREADS={MAX_THREADS}", f"-DSIMT_MAX_SHARED={MAX_SHARED_BYTES}", *FLAGS]
    _, identity = find_compiler()
    how = [flag for part in sorted(_RUNTIME_PARTS.items()) for flag in (part[0], *part[1])]
    path = cache_dir() / f"simt_runtime-{digest(our_headers(), *how, *limits, identity)}.so"
    if not path.exists():
        import fcntl  # Windows does not have it, and has no compiler that gets here

        with open(path.with_suffix(".lock"), "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # compiling takes long: a second process waits for the first
            if not path.exists():
                _compile_runtime(limits, path)
    return used(path)


def _compile_runtime(limits: list[str], path: Path) -> None:
    """Compile the two parts of the runtime at the same time, and link them."""
    compiler, _ = find_compiler()
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=UNFINISHED) as folder:

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


def compile_library(text: str, flags: list[str], path: Path, source: Source, **options: Any) -> list[str]:
    """Compile `text` to the shared library `path`, as `compile_assembly` does. Return the user's files in it."""
    assembly, opened = compile_assembly(text, flags, path, source, **options)
    link([assembly], path)
    return opened


def link(assemblies: Sequence[Path], path: Path, libraries: Sequence[str] = ()) -> None:
    """Make the shared library `path` of files of assembly."""
    compiler, _ = find_compiler()
    run_compiler([*compiler, "-shared", *map(str, assemblies), "-o", str(path), "-pthread", "-ldl", *libraries])


def compile_assembly(
    text: str,
    flags: list[str],
    path: Path,
    source: Source,
    *,
    gaps: bool,
    opened: Sequence[str] = (),
    may_be_cut: bool = False,
) -> tuple[Path, list[str]]:
    """Compile `text`, made of `source`. Return the file of assembly, beside `path`, and the user's files in it.

    `gaps`: for a watched build. `opened` are those files that are a part of the text already.
    """
    compiler, _ = find_compiler()
    command = [*compiler, *flags, "-include", str(precompiled(flags)), "-S", "-x", "c++", "-"]
    assembly, rule = path.with_suffix(".s"), path.with_suffix(".d")
    done = result_of_compiler([*command, "-o", str(assembly), "-MMD", "-MF", str(rule)], text, source.folder)
    if warned := unset_variables(done.stderr, source):
        warnings_of(path).write_text("".join(f"{json.dumps(each)}\n" for each in warned), encoding="utf-8")
    included = [str(source.folder / file) for file in prerequisites(rule.read_text(**BYTES)) if not is_foreign(file)]
    opened = list(dict.fromkeys([*opened, *included]))
    own = {source.filename, *opened}
    if places := open_shifts(assembly.read_text(**BYTES), lambda file: file in own or str(source.folder / file) in own):
        exact, left = with_exact_shifts(text, places)
        if left and may_be_cut:
            raise CompileError("a shift is in a macro or a header, which are part of the text once it is cut")
        with contextlib.suppress(CompileError):  # of a bit field, for example
            run_compiler([*command, "-o", str(path.with_suffix(".exact.s"))], exact, source.folder)
            text, assembly = exact, path.with_suffix(".exact.s")
    if has_empty_loop(assembly.read_text(**BYTES)):
        run_compiler([*command, *READ_AT_EACH_TURN, "-o", str(assembly)], text, source.folder)
    assembly.write_text(changed(assembly.read_text(**BYTES), gaps=gaps), **BYTES)
    return assembly, opened


def _compile_cut(
    text: str, flags: list[str], path: Path, source: Source, instrumented: bool, opened: Sequence[str]
) -> None:
    """Compile what is left of a file; if the compiler wants a word that nvcc does not want, with the word there."""
    try:
        compile_library(text, flags, path, source, gaps=instrumented, opened=opened)
    except CompileError as error:
        if not re.search("template|constexpr", str(error)):
            raise
        completed = with_words_for_gcc(text, [*find_compiler()[0], *flags, "-include", str(precompiled(flags))])
        if completed == text:
            raise
        compile_library(completed, flags, path, source, gaps=instrumented, opened=opened)


def _epilogue(entries: Sequence[str]) -> str:
    """Return the text after the file: a C function per kernel, and the place of its shared memory for the runtime."""
    lines = ['#line 1 "<cudascope>"', "#undef asm", "#undef __asm__"]
    lines += [f"SIMT_ENTRY({entry_symbol(name)}, {address_of(name)})" for name in entries]
    lines.append('extern "C" { void simt_base() {} }  // tells where the file is loaded')
    return "\n".join(lines) + "\n"


def build_entry(text: str, filename: str, *, instrumented: bool) -> Library:
    """Return the library of a PTX kernel, given as C++. The instrumented one has a hook before each access."""
    compiler, _ = find_compiler()
    flags = [flag for flag in COMMON_FLAGS if "sanitize" not in flag]
    flags += ["-O1", "-DSIMT_PTX", *["-DSIMT_INSTRUMENTED"] * instrumented]
    flags += ["-Wno-everything"] if "clang" in compiler[0] else GCC_FLAGS
    flags += [f"-I{folder}" for folder in (header_folder(), HEADERS, nvidia_headers())]
    key = digest(text, *flags, *build_key())
    path = cache_dir() / f"{Path(filename).stem}-{key}{'-instrumented' if instrumented else ''}.so"
    if not path.exists():
        with runtime_built_meanwhile(), tempfile.TemporaryDirectory(dir=cache_dir(), prefix=UNFINISHED) as folder:
            made = Path(folder, "kernel.so")
            compile_library(text, flags, made, Source(text, filename, Path(folder), (), ()), gaps=instrumented)
            os.replace(made, path)
        prune_at_times()
    runtime()
    return load(used(path), filename, Path())
