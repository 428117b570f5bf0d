"""Compiles a .cu file for the CPU, with g++ or clang++ against kernels/simt.h, and keeps the result on disk.

A kernel has two builds: the plain one to run, and an instrumented one (-fsanitize=thread with our own hooks in place of
the sanitizer's) to observe and to check. A build is found again by its content: source, included files, definitions,
options, compiler. `PAGEWISE_CACHE` moves the folder.
"""

import ctypes
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pagewise.tools.cuda_build import CompileError, cache_dir, digest, included_files, nvidia_headers
from pagewise.tools.cuda_limits import MAX_SHARED_BYTES, MAX_THREADS
from pagewise.tools.cuda_signature import plain_kernels
from pagewise.tools.simt_library import KERNELS, Library, load

COMMON_FLAGS = (
    "-std=c++17", "-fPIC", "-fno-strict-aliasing", "-Wno-attributes", "-Wno-unknown-pragmas",
)  # fmt: skip
PLAIN_FLAGS = ("-O2",)
GCC_FLAGS = ("-fno-gnu-unique", "-fno-extern-tls-init", "-fmax-errors=8")
_RTL = "-dP"  # GCC writes each instruction's RTL into the assembly as a comment: `_with_alignments` reads it
# Every access calls a hook, and shall be the one that the source asks for: not split into words (sra), not moved out of
# a loop that might not execute it (loop-im), not merged with its neighbours or made a memset (both begin with -O2).
INSTRUMENTED_FLAGS = (
    "-O1", "-DSIMT_INSTRUMENTED", "-fsanitize=thread", "-fno-tree-sra", "-fno-tree-loop-im", "-fno-tree-phiprop",
)  # fmt: skip

# What NVIDIA's headers include and the nvidia-cuda-runtime package lacks, and what only a GPU has.
_STAND_INS = {
    "assert.h": "#ifndef assert\n#include_next <assert.h>\n#endif\n",  # once it is there, that of kernels/simt.h stays
    "cassert": "#ifndef assert\n#include_next <cassert>\n#endif\n",
    "crt/host_defines.h": "",
    "cuda_runtime.h": "",
    "cuda_runtime_api.h": "",
    "nv/target": "#define NV_IF_ELSE_TARGET(condition, device, ...) { __VA_ARGS__ }\n#define NV_IF_TARGET(...)\n",
    "mma.h": '#error "wmma (mma.h) runs on a GPU only: the CPU runner has no tensor cores"\n',
    "cuda_pipeline.h": '#error "cp.async (cuda_pipeline.h) runs on a GPU only: the CPU has no asynchronous copies"\n',
    "cooperative_groups.h": '#error "the CPU runner has no cooperative groups: use __syncthreads and warp functions"\n',
}  # fmt: skip
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
    together = plain_kernels(source)
    entries = together if name in together else [name]
    flags = [
        *COMMON_FLAGS, *(INSTRUMENTED_FLAGS if instrumented else PLAIN_FLAGS), "-g1",
        *(("-Wno-everything",) if "clang" in compiler[0] else (*GCC_FLAGS, _RTL) if instrumented else GCC_FLAGS),
        *(f"-D{define}" for define in defines), *(option for option in options if not option.startswith("--")),
        *(f"-I{folder}" for folder in (_header_folder(), *folders, nvidia_headers())),
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


# ------------------------------------------------------------------------------------------------ the compiler


def find_compiler() -> tuple[list[str], str]:
    """The command of the C++ compiler ($CXX, g++ or clang++) and what identifies it in the cache."""
    if sys.platform != "linux":
        raise CompileError(
            "running a CUDA kernel on the CPU needs Linux (on Windows: WSL; on a Mac: a Linux container)"
        )
    command = (os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++")), "g++")).split()
    path = shutil.which(command[0])
    if path is None:
        raise CompileError(
            f"running a CUDA kernel on the CPU needs a C++ compiler, and there is no {command[0]} on the PATH: "
            "install one (Debian and Ubuntu: apt install g++; conda: conda install gxx), or name one with CXX="
        )
    stat = os.stat(path)
    return [path, *command[1:]], f"{os.path.realpath(path)} {stat.st_size} {stat.st_mtime_ns}"


@functools.cache
def _header_folder() -> Path:
    """A folder of the stand-ins and of NVIDIA's headers where theirs need a word changed."""
    headers = dict(_STAND_INS)
    for name in ("cuda_fp16.h", "cuda_fp16.hpp", "cuda_bf16.h", "cuda_bf16.hpp"):
        headers[name] = _COPY_IN_HALVES.sub(r"\1", (nvidia_headers() / name).read_text())
    folder = cache_dir() / f"headers-{digest(*headers, *headers.values())}"
    if not folder.exists():
        made = Path(tempfile.mkdtemp(dir=cache_dir()))
        for name, text in headers.items():
            (made / name).parent.mkdir(exist_ok=True)
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
    return digest(*(path.read_text() for path in (*sorted(KERNELS.glob("simt*")), Path(__file__))))


@functools.cache
def runtime() -> ctypes.CDLL:
    """The scheduler and the hooks (kernels/simt_runtime.cpp), for all kernels of the process to call."""
    compiler, identity = find_compiler()
    source = (KERNELS / "simt_runtime.cpp").read_text()
    limits = [f"-DSIMT_MAX_THREADS={MAX_THREADS}", f"-DSIMT_MAX_SHARED={MAX_SHARED_BYTES}"]
    flags = ["-std=c++17", "-O2", "-fPIC", "-pthread", f"-I{KERNELS}", *limits]
    path = cache_dir() / f"simt_runtime-{digest(_own_sources(), *limits, identity)}.so"
    if not path.exists():
        _compile(compiler, source, flags, path, kernel=False)
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def _compile(
    compiler: list[str], source: str, flags: list[str], path: Path, *, kernel: bool = True, gaps: bool = False
) -> None:
    """Compile `source` to the shared library `path`, which appears whole or not at all."""
    if kernel:
        flags = [*flags, "-include", str(KERNELS / "simt.h")]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        assembly, library = f"{folder}/kernel.s", f"{folder}/kernel.so"
        _run([*compiler, *flags, "-S", "-x", "c++", "-", "-o", assembly], source)
        if kernel:
            text = _with_dynamic(Path(assembly).read_text())
            Path(assembly).write_text(_with_gaps(_with_alignments(text)) if gaps else text)
        _run([*compiler, "-shared", assembly, "-o", library, "-pthread", "-ldl"])
        os.replace(library, path)


def _run(command: list[str], source: str | None = None) -> None:
    done = subprocess.run(command, input=source, capture_output=True, text=True)
    if done.returncode:
        compiler = Path(command[0]).name
        raise CompileError(f"{compiler} cannot compile the kernel for the CPU:\n{done.stderr.strip()}")


def _with_dynamic(assembly: str) -> str:
    """With memory behind every `extern __shared__` array: a thread-local symbol that the file uses and lacks."""
    if "\nsimt_dynamic:" not in assembly:
        return assembly
    used = set(re.findall(r"\b([\w$.]+)@(?:tlsgd|tlsld|gottpoff|dtpoff|tpoff)\b", assembly))
    used |= set(re.findall(r":(?:tlsdesc|gottprel|tprel)\w*:([\w$.]+)", assembly))
    defined = set(re.findall(r"^([\w$.]+):", assembly, re.M))
    return assembly + "".join(f"\t.globl {name}\n\t.set {name}, simt_dynamic\n" for name in sorted(used - defined))


_MEMORY = re.compile(r"(\(set )?\(mem[/\w]*:\w+ ((?:(?!\(mem|\(set).)*?) S(8|16) A(\d+)\]", re.S)


def _with_alignments(assembly: str) -> str:
    """GCC calls one hook for 16 bytes whether they are aligned to 16 or to 8; the RTL of the access tells which."""

    def hook(call: re.Match) -> str:
        for access in _MEMORY.finditer(assembly, call.end(), call.end() + 8000):
            stack_or_second_half = " sp)" in access[2] or (access[2].endswith("+8") and access[3] == "8")
            if (access[1] is not None) == (call[2] == "write") and not stack_or_second_half:
                return f"{call[1]}{call[2]}16{'' if int(access[4]) >= 128 else '_by_8'}"
        return call[0]

    assembly = re.sub(r"(\bcall\s+__tsan_)(read|write)16\b", hook, assembly)
    return re.sub(r"^#[( ].*\n|\t# \d+\t\[c=.*$", "", assembly, flags=re.M)


_GUARD_HOOK = re.compile(
    r"(leaq\s+(?:_ZGV\w+|__tls_guard)@\w+\([^)]*\), %rdi\n"
    r"(?:\s*(?:\.value|\.byte|rex64|call\s+__tls_get_addr|movq)\b.*\n){0,6}?)"  # the address, in a template
    r"\s*call\s+__tsan_(?:read|write)1(?:@PLT)?\n"
)


def _with_gaps(assembly: str) -> str:
    """256 bytes of nothing after every shared array, so that who overruns one does not meet the next.

    GCC guards an array of a class with a constructor by a flag of its own, which is no access of the kernel (x86 only).
    """
    assembly = _GUARD_HOOK.sub(r"\1", assembly)
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
