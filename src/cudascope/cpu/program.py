"""A whole program built for the CPU: its files, host code and kernels together, are one library that has its main.

cpu/api has the functions of the CUDA runtime API that the program calls. The kernels run on the runtime of every other
kernel.
"""

import ctypes
import functools
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cudascope.arguments.launch_shape import MAX_SHARED_BYTES
from cudascope.cpp.source import CompileError, Source
from cudascope.cpu.build import (
    Kept,
    build_key,
    compile_assembly,
    compiler_flags,
    link,
    runtime,
    runtime_built_meanwhile,
)
from cudascope.cpu.library import Library, load
from cudascope.toolchain.cache import UNFINISHED, cache_dir, code_of, digest, used
from cudascope.toolchain.compiler import BYTES, find_compiler, run_compiler, without_own_headers
from cudascope.toolchain.headers import API, content_of, nvidia_headers, our_headers
from cudascope.translate.entry_points import DYNAMIC_MEMORY
from cudascope.translate.program import LIBRARIES, program_file

# In host code these functions do what the host's libraries do (cpu/api/api.cpp).
_OF_PROGRAM = re.compile(r"\bsimt_(shared_at|throw|fail|host_exit|clock|printf|free_memory)\b")
_THREAD_LOCAL = re.compile(r"\b([\w$.]+)@(?:tlsgd|tlsld|gottpoff|dtpoff|tpoff)\b|:tlsgd:([\w$.]+)")


class Program(NamedTuple):
    """A built program. `files` are the user's files that are in it, besides the first source."""

    path: Path
    sources: tuple[Source, ...]
    files: tuple[str, ...]

    def load(self) -> Library:
        """Load the program. The constructors of its global objects run."""
        first = self.sources[0]
        tables = [i for i, source in enumerate(self.sources) if not source.filename.endswith(".c")]
        symbols = tuple(f"simt_variables_{i}" for i in tables)
        try:
            return load(self.path, first.filename, first.folder, self.files, symbols)
        except CompileError as error:
            raise _lacking(error) from None


def build_program(sources: Sequence[Source], *, instrumented: bool) -> Program:
    """Return the program that `sources` make, from the cache or from the compiler (CompileError)."""
    key, flags = [*build_key(), code_of(__name__)], []
    for source in sources:
        included = source.with_included()
        of_source = compiler_flags(source, included, instrumented=instrumented)
        flags.append([flag for flag in of_source if flag != "-Werror=vla"])  # host code may have such an array
        key += [source.text, source.filename, *included.key(source.folder), *source.defines, *flags[-1]]
    stem = Path(sources[0].filename).stem
    kept = Kept(f"{stem}-program-instrumented" if instrumented else f"{stem}-program", digest(*key))
    if not (found := kept.found()):
        with runtime_built_meanwhile():
            _compile(sources, flags, kept, instrumented=instrumented)
        found = kept.found()
    if not found:
        file = sources[0].filename
        raise CompileError(f"{file}: a file of the program is written while it is compiled: compile again")
    path, opened = found
    others = [source.filename for source in sources[1:]]
    return Program(path, tuple(sources), tuple(dict.fromkeys([*others, *opened])))


def _compile(sources: Sequence[Source], flags: Sequence[list[str]], kept: Kept, *, instrumented: bool) -> None:
    with tempfile.TemporaryDirectory(dir=cache_dir(), prefix=UNFINISHED) as folder:
        assemblies, opened, arrays = [], [], set()
        for i, (source, of_source) in enumerate(zip(sources, flags, strict=True)):
            try:
                if source.filename.endswith(".c"):
                    assemblies.append(_compiled_c(source, Path(folder, f"{i}.s")))
                    continue
                translated, made = program_file(source, of_source, i), Path(folder, f"{i}.so")
                options = {"gaps": instrumented, "opened": translated.opened}
                assembly, own = compile_assembly(translated.text, of_source, made, source, **options)
            except CompileError as error:
                raise _explained(error, source) from None
            text = _OF_PROGRAM.sub(r"simt_program_\1", assembly.read_text(**BYTES))
            assembly.write_text(text, **BYTES)
            arrays |= _dynamic_symbols(text, translated.dynamic_arrays)
            assemblies.append(assembly)
            opened += own
        common = Path(folder, "common.so")
        text = DYNAMIC_MEMORY * bool(arrays) + 'extern "C" void simt_base() {}\n'
        assembly, _ = compile_assembly(text, flags[0], common, sources[0], gaps=instrumented)
        with assembly.open("a", **BYTES) as file:
            file.writelines(f"\t.globl {name}\n\t.set {name}, simt_dynamic\n" for name in sorted(arrays))
        made = Path(folder, "program.so")
        uses_openmp = any(re.search(r"include\s*<omp\.h>", source.text) for source in sources)
        link([*assemblies, assembly], made, ["-lgomp"] * uses_openmp)
        kept.keep(made, list(dict.fromkeys(opened)), [])


def _compiled_c(source: Source, path: Path) -> Path:
    """Compile a file in C, which has no kernels. Return its assembly."""
    compiler, _ = find_compiler()
    folders = [f"-I{folder}" for folder in source.include_path]
    text = f'#line 1 "{source.filename}"\n{source.text}\n'
    defines = [f"-D{define}" for define in source.defines]
    flags = ["-O1", "-g1", "-fPIC", "-w", *folders, *defines, "-S", "-x", "c", "-", "-o", str(path)]
    run_compiler([*compiler, *flags], text, source.folder)
    return path


def _dynamic_symbols(assembly: str, arrays: set[str]) -> set[str]:
    """The symbols of the `extern __shared__` arrays that a file uses."""
    used_symbols = {name for pair in _THREAD_LOCAL.findall(assembly) for name in pair if name}
    defined = set(re.findall(r"^([\w$.]+):", assembly, re.MULTILINE))
    mangled = {f"{len(name)}{name}E" for name in arrays}
    return {name for name in used_symbols - defined if name in arrays or any(name.endswith(end) for end in mangled)}


_NAMES = LIBRARIES | {"nvtx": "NVTX", "texture": "textures", "surface": "surfaces"}
_NAMES |= {"cuda": "this function of the CUDA runtime API", "cu": "the CUDA driver API"}
_NOT_HERE = "((?:cu|nccl|nvtx|texture|surface)\\w*)’ (?:was not|does not|has not|undeclared)"
_UNKNOWN = re.compile(rf"^(\S.*?:\d+):\d+: error: ‘(?:struct )?{_NOT_HERE}", re.MULTILINE)
_UNDEFINED = re.compile(r": ((?:cu|nccl|nvtx)\w*)(?:\(.*\))? is declared and has no body")


def _explained(error: CompileError, source: Source) -> CompileError:
    """`error`, or a sentence if the program uses what cudascope does not have."""
    said = without_own_headers(str(error), source.filename)
    lacks = _UNKNOWN.search(said)
    return CompileError(f"{lacks[1]}: error: {_sentence(lacks[2])}" if lacks else said)


def _lacking(error: CompileError) -> CompileError:
    lacks = _UNDEFINED.search(str(error))
    return CompileError(_sentence(lacks[1])) if lacks else error


def _sentence(name: str) -> str:
    start = next(start for start in _NAMES if name.startswith(start))
    return f"the program uses {name}, and cudascope does not have {_NAMES[start]} (README: a program's own main)"


@functools.cache
def api() -> ctypes.CDLL:
    """The CUDA runtime API, for a program to call. The runtime is loaded before it."""
    runtime()
    return ctypes.CDLL(str(api_file()), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def api_file() -> Path:
    """The compiled API, from the cache or from the compiler."""
    compiler, identity = find_compiler()
    flags = ["-std=c++17", "-O2", "-fPIC", f"-DSIMT_MAX_SHARED={MAX_SHARED_BYTES}"]
    path = cache_dir() / f"simt_api-{digest(content_of(API), our_headers(), *flags, identity)}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=cache_dir(), prefix=UNFINISHED) as folder:
            made = f"{folder}/api.so"
            run_compiler([*compiler, *flags, f"-I{nvidia_headers()}", "-shared", str(API / "api.cpp"), "-o", made])
            os.replace(made, path)
    return used(path)
