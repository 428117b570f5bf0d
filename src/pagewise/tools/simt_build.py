"""Compiles a .cu file for the CPU, with g++ or clang++ against simt_headers/simt.h, and keeps the result on disk.

A kernel has two builds: the plain one to run, and an instrumented one (-fsanitize=thread with our own hooks in place of
the sanitizer's) to observe and to check. A build is found again by its content: source, included files, definitions,
options, compiler. `PAGEWISE_CACHE` moves the folder.
"""

import ctypes
import functools
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pagewise.tools.cuda_build import cache_dir, digest, included_files, nvidia_headers
from pagewise.tools.simt_compiler import find_compiler, run_compiler
from pagewise.tools.simt_library import HEADERS, KERNELS, MAX_SHARED_BYTES, Library, load

COMMON_FLAGS = (
    "-std=c++17", "-fPIC", "-fno-strict-aliasing", "-Wno-attributes", "-Wno-unknown-pragmas",
)  # fmt: skip
PLAIN_FLAGS = ("-O2",)
GCC_FLAGS = ("-fno-gnu-unique", "-fno-extern-tls-init", "-fmax-errors=8")
# Every access calls a hook, and shall be the one that the source asks for: not split into words (sra), not moved out of
# a loop that might not execute it (loop-im), not merged with its neighbours or made a memset (both begin with -O2).
INSTRUMENTED_FLAGS = (
    "-O1", "-DSIMT_INSTRUMENTED", "-fsanitize=thread,alignment",
    "-fno-tree-sra", "-fno-tree-loop-im", "-fno-tree-phiprop",
)  # fmt: skip

# On the host their half2 and bfloat162 are copied one half at a time; a GPU moves the 4 bytes at once, and so do we.
_COPY_IN_HALVES = re.compile(
    r"NV_IF_ELSE_TARGET\(NV_IS_DEVICE,\s*(__(?:HALF2|BFLOAT162)_TO_UI\(\*this\) =[^;]*;)\s*,.*?\n\)", re.S
)


def build(
    source: str, filename: str, name: str, *, instrumented: bool, defines: Sequence[str], options: Sequence[str],
    include_dirs: Sequence[str],
) -> Library:  # fmt: skip
    """The compiled file that holds kernel `name`, from the cache or from the compiler. Raises CompileError."""
    compiler, identity = find_compiler()
    folders = [Path(filename).parent, *map(Path, include_dirs), KERNELS]
    included = included_files(source, Path(filename).parent, folders)
    texts = [source, *(text for _, text in included)]
    plain_kernels = global_kernels(source)
    entries = plain_kernels if name in plain_kernels else [name]
    flags = [
        *COMMON_FLAGS, *(INSTRUMENTED_FLAGS if instrumented else PLAIN_FLAGS), "-g1",
        *(("-Wno-everything",) if "clang" in compiler[0] else GCC_FLAGS),
        *(f"-D{define}" for define in defines), *(option for option in options if not option.startswith("--")),
        *(f"-I{folder}" for folder in (_header_folder(), HEADERS, *folders, nvidia_headers())),
    ]  # fmt: skip
    key = digest(*texts, filename, *entries, *flags, identity, _own_sources())
    path = cache_dir() / f"{Path(filename).stem}-{key}{'-instrumented' if instrumented else ''}.so"
    if not path.exists():
        has_dynamic = re.search(r"\bextern\b[^;{}]*\b__shared__\b", "\n".join(texts)) is not None
        translation = f'#line 1 "{filename}"\n{source}\n{_epilogue(entries, has_dynamic)}'
        _compile(compiler, translation, flags, path, gaps=instrumented)
    runtime()
    return load(path, filename)


def entry_symbol(name: str) -> str:
    """The C name under which a kernel, or an instance of a template, is called."""
    return "simt_entry_" + (name if name.isidentifier() else digest(name))


def global_kernels(source: str) -> list[str]:
    """The kernels of a file that are no templates and stand outside of namespaces and of #if: built together."""
    source = re.sub(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", " ", source, flags=re.S)
    source = re.sub(r"^[ \t]*#[ \t]*if.*?^[ \t]*#[ \t]*endif", " ", source, flags=re.S | re.M)
    source = re.sub(r"^[ \t]*#.*(?:\\\n.*)*", " ", source, flags=re.M)
    source = re.sub(r"__launch_bounds__\s*\([^)]*\)", " ", source)
    names, depth = [], 0
    for token in re.finditer(
        r"[{}]|(template\s*<[^{};]*?>\s*)?(?:\w+\s+)*?__global__\s[^{};]*?\b(\w+)\s*\((?=[^{};]*\)\s*\{)", source
    ):
        if token[0] in "{}":
            depth += 1 if token[0] == "{" else -1
        elif depth == 0 and not token[1] and token[2] not in names:
            names.append(token[2])
    return names


# ------------------------------------------------------------------------------------------------ the compiler


@functools.cache
def _header_folder() -> Path:
    """A folder of those of NVIDIA's headers that need a word changed."""
    names = ("cuda_fp16.h", "cuda_fp16.hpp", "cuda_bf16.h", "cuda_bf16.hpp")
    headers = {name: _COPY_IN_HALVES.sub(r"\1", (nvidia_headers() / name).read_text()) for name in names}
    folder = cache_dir() / f"headers-{digest(*headers, *headers.values())}"
    if not folder.exists():
        made = Path(tempfile.mkdtemp(dir=cache_dir()))
        for name, text in headers.items():
            (made / name).write_text(text)
        try:
            made.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(made)
            if not folder.exists():
                raise
    return folder


@functools.cache
def _own_sources() -> str:
    files = sorted(path for path in (*KERNELS.glob("simt_*"), *HEADERS.rglob("*"), Path(__file__)) if path.is_file())
    return digest(*(path.read_text() for path in files))


@functools.cache
def runtime() -> ctypes.CDLL:
    """The scheduler and the hooks (kernels/simt_runtime.cpp), for all kernels of the process to call."""
    compiler, identity = find_compiler()
    source = (KERNELS / "simt_runtime.cpp").read_text()
    flags = ["-std=c++17", "-O2", "-fPIC", "-pthread", f"-I{KERNELS}"]
    path = cache_dir() / f"simt_runtime-{digest(_own_sources(), identity)}.so"
    if not path.exists():
        _compile(compiler, source, flags, path, kernel=False)
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def _compile(
    compiler: list[str], source: str, flags: list[str], path: Path, *, kernel: bool = True, gaps: bool = False
) -> None:
    """Compile `source` to the shared library `path`, which appears whole or not at all."""
    if kernel:
        flags = [*flags, "-include", str(HEADERS / "simt.h")]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        assembly, library = f"{folder}/kernel.s", f"{folder}/kernel.so"
        run_compiler([*compiler, *flags, "-S", "-x", "c++", "-", "-o", assembly], source)
        if kernel:
            text = _with_dynamic(Path(assembly).read_text())
            Path(assembly).write_text(_with_gaps(text) if gaps else text)
        run_compiler([*compiler, "-shared", assembly, "-o", library, "-pthread", "-ldl"])
        os.replace(library, path)


def _with_dynamic(assembly: str) -> str:
    """With memory behind every `extern __shared__` array: a thread-local symbol that the file uses and lacks."""
    if "\nsimt_dynamic:" not in assembly:
        return assembly
    used = set(re.findall(r"\b([\w$.]+)@(?:tlsgd|tlsld|gottpoff|dtpoff|tpoff)\b", assembly))
    used |= set(re.findall(r":(?:tlsdesc|gottprel|tprel)\w*:([\w$.]+)", assembly))
    defined = set(re.findall(r"^([\w$.]+):", assembly, re.M))
    return assembly + "".join(f"\t.globl {name}\n\t.set {name}, simt_dynamic\n" for name in sorted(used - defined))


def _with_gaps(assembly: str) -> str:
    """256 bytes of nothing after every shared array, so that who overruns one does not meet the next."""
    lines, in_shared = [], False
    for line in assembly.splitlines():
        if re.match(r"\s*\.(section|text|data|bss)\b", line):
            in_shared = ".tbss" in line
        lines.append(line)
        if in_shared and re.match(r"\s*\.zero\b", line):
            lines.append("\t.zero\t256")
    return "\n".join(lines) + "\n"


def _epilogue(entries: Sequence[str], has_dynamic: bool) -> str:
    """What follows the file: a C function per kernel, and the memory that `_with_dynamic` gives out."""
    lines = ['#line 1 "pagewise"', "#undef asm", "#undef __asm__"]
    lines += [f"SIMT_ENTRY({entry_symbol(name)}, {name})" for name in entries]
    lines.append('extern "C" { thread_local char simt_anchor; void* simt_anchor_address() { return &simt_anchor; } }')
    if has_dynamic:
        lines.append('extern "C" { __attribute__((used, aligned(1024)))')
        lines.append(f"thread_local char simt_dynamic[{MAX_SHARED_BYTES}]; }}")
    return "\n".join(lines) + "\n"
