"""The C++ compiler that the CPU runner uses, and the binutils that come with it."""

import functools
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cudascope.cpp.source import CompileError, Source, read_source
from cudascope.cpp.tokens import tokens_of
from cudascope.toolchain.cache import UNFINISHED, cache_dir, digest, used
from cudascope.toolchain.headers import is_foreign

_NEEDS = "running a CUDA kernel on the CPU needs"
_OPTIONS = {
    "x86_64": (),
    "aarch64": (
        # A kernel gives the same results on both machines.
        "-fsigned-char",
        "-ffp-contract=off",
        # Thread-local variables are found by __tls_get_addr. The runtime takes the place of this function.
        "-mtls-dialect=trad",
        # No variable is addressed from another one: translate/assembly.py puts gaps between them.
        "-fno-section-anchors",
    ),
}


def machine_options(compiler: str) -> tuple[str, ...]:
    """The options that `compiler` needs on this machine. CompileError: the runtime is not written for the two."""
    machine = platform.machine()
    if machine not in _OPTIONS:
        raise CompileError(f"{_NEEDS} an x86-64 or aarch64 machine, and this one is {machine}")
    if machine != "x86_64" and "clang" in compiler:
        raise CompileError(f"{_NEEDS} g++ on {machine}, and the C++ compiler is {compiler}: set CXX=g++")
    return _OPTIONS[machine]


# Headers and file names have any encoding: bytes that are not UTF-8 pass through Python unchanged.
BYTES = {"encoding": "utf-8", "errors": "surrogateescape"}


def find_compiler() -> tuple[list[str], str]:
    """The command of the C++ compiler ($CXX, g++ or clang++) and what identifies it in the cache."""
    if sys.platform != "linux":
        raise CompileError(f"{_NEEDS} Linux (on Windows: WSL; on a Mac: a Linux container)")
    command = (os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++")), "g++")).split()
    path = shutil.which(command[0])
    if path is None:
        raise CompileError(
            f"{_NEEDS} a C++ compiler, and there is no {command[0]} on the PATH: "
            "install one (Debian and Ubuntu: apt install g++; conda: conda install gxx), or name one with CXX="
        )
    stat = os.stat(path)
    identity = f"{platform.machine()} {os.path.realpath(path)} {stat.st_size} {stat.st_mtime_ns} {command[1:]}"
    identity += "".join(f" {os.environ.get(name, '')}" for name in ("CPATH", "CPLUS_INCLUDE_PATH"))
    return [os.path.abspath(path), *machine_options(path), *command[1:]], identity


# Compilers write their working folder into a library. This name is that of any folder, so a library does not name one.
HERE = "/proc/self/cwd"


def result_of_compiler(
    command: Sequence[str], source: str | None = None, folder: Path | None = None, *, may_fail: bool = False
) -> subprocess.CompletedProcess:
    """Run the compiler in `folder`, and return its output and its messages. Raises CompileError unless it `may_fail`.

    The messages are in English in every locale, because cudascope reads them.
    """
    if folder and not folder.is_dir():
        raise CompileError(f"the folder from which the source includes is not there any more: {folder}")
    environment = os.environ | {"LC_ALL": "C.UTF-8", "LANGUAGE": ""} | ({"PWD": HERE} if folder else {})
    done = subprocess.run(command, input=source, capture_output=True, cwd=folder, env=environment, **BYTES)
    if done.returncode and not may_fail:
        said = _with_folder(done.stderr, folder) if folder else done.stderr
        said = said.strip().encode(**BYTES).decode(errors="replace")  # the messages quote lines in any encoding
        raise CompileError(f"{Path(command[0]).name} cannot compile the kernel for the CPU:\n{said}")
    return done


def run_compiler(command: Sequence[str], source: str | None = None, folder: Path | None = None) -> str:
    """Return the output of the compiler, run in `folder`. Raises CompileError with its messages."""
    return result_of_compiler(command, source, folder).stdout


def cached_library(source: Path, flags: Sequence[str]) -> Path:
    """Return the shared library of a C++ file, compiled with `flags`, or what the cache has of it.

    It may include headers of its own folder. Names that it lacks are found in the process that loads the library.

    Raises:
        CompileError: there is no compiler, or it refuses the file.
    """
    compiler, identity = find_compiler()
    texts = (file.read_bytes() for file in (source, *sorted(source.parent.glob("*.h"))))
    path = cache_dir() / f"{source.stem}-{digest(*texts, *flags, identity)}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=UNFINISHED) as folder:
            run_compiler([*compiler, "-fPIC", *flags, "-c", str(source), "-o", f"{folder}/made.o"])
            run_compiler([*compiler, "-shared", f"{folder}/made.o", "-o", f"{folder}/made.so"])
            os.replace(f"{folder}/made.so", path)
    return used(path)


_UNSET = "uninitialized|return-local-addr|return-stack-address|dangling-pointer=?"
_SAID = re.compile(
    rf"^(.+?):(\d+):(\d+): (?:warning: (.*) \[-W({_UNSET}|(?:maybe|conditional)-uninitialized)\]"
    r"|note: ‘(\w+)’ .*declared here)$",
    re.M,
)
_OPERATORS = {"+", "-", "*", "/", "%", "&", "|", "^"}


def unset_variables(said: str, source: Source) -> list[tuple[int, str, bool]]:
    """What compilers said about variables of `source` without a value: line, sentence, and whether it is a guess."""
    found: dict[tuple[int, str], bool] = {}
    last = None
    for name, line, column, message, flag, variable in _SAID.findall(said):
        if name != source.filename:
            last = None
        elif message:
            last = int(line), f"{re.sub('[‘’]', '', message)} (a warning of the compiler: -W{flag})"
            found.setdefault(last, flag.endswith("-uninitialized"))
        elif last and found[last] and _is_read_first(source.text, int(line), int(column), variable):
            found[last] = False
    return [(line, sentence, is_guess) for (line, sentence), is_guess in found.items()]


def _is_read_first(text: str, line: int, column: int, variable: str) -> bool:
    """Whether the first statement with a variable after its declaration reads it, as `sum += x` or `m = max(m, x)`."""
    lines = text.splitlines(keepends=True)
    tokens = tokens_of(lines[line - 1][column - 1 :] + "".join(lines[line:]))
    at = next((i for i, token in enumerate(tokens[1:], 1) if token == variable), len(tokens))
    one, two, *rest = [*tokens[at + 1 :], "", ""]
    assigned = [two, *rest[: rest.index(";")]] if one == "=" and ";" in rest else []
    is_step = one + two in ("++", "--") or tokens[at - 2 : at] in (["+"] * 2, ["-"] * 2)
    is_step |= one in ("<<=", ">>=") or (one in _OPERATORS and two == "=")
    return is_step or variable in assigned


def _with_folder(said: str, folder: Path) -> str:
    """Return the messages `said` of a compiler, with `folder` before the names of its files."""

    def whole(match: re.Match) -> str:
        return f"{match[1]}{folder / match[2]}" if (folder / match[2]).is_file() else match[0]

    return re.sub(r"^((?:In file included from | +from )?)([^\s/<][^:\n]*)(?=:)", whole, said, flags=re.MULTILINE)


def prerequisites(rule: str) -> list[str]:
    """The files that a rule of make names after its target. A backslash stands before a space in a name."""
    words = re.findall(r"(?:\\[ #]|\S)+", rule.replace("\\\n", " ").partition(": ")[2])
    return [re.sub(r"\\([ #])", r"\1", word).replace("$$", "$") for word in words]


_LACKS = re.compile(  # g++ and clang++
    r"^(\S.*?:\d+):\d+: error: (?:‘(\w+)’ (?:in namespace|is not a member of) ‘([\w:]+)’"
    r"|no (?:template|type|member) named '(\w+)' in namespace '([\w:]+)')",
    re.MULTILINE,
)
_LACKS_CLASS = re.compile(  # of a static member function that is called
    r"^(\S.*?:\d+):\d+: error: ‘([\w:]+)::(\w+)’ has not been declared", re.MULTILINE
)
_STAND_INS = {"cub", "cuda", "cuda::std", "cooperative_groups", "nvcuda", "nvcuda::wmma"}


_CHAIN = re.compile(r"^(?:In file included| +) ?from ([^\n]+):(\d+):\n([^\n:]+):", re.MULTILINE)
_WANTS = re.compile(r"^(\S.*?):(\d+):\d+: error: #error ?(.*)$", re.MULTILINE)
_CONDITION = re.compile(r"^[ \t]*#[ \t]*(if|ifdef|ifndef|elif|else|endif)\b((?:\\\n|[^\n])*)", re.MULTILINE)


def with_conditions(error: CompileError, file: str, text: str) -> CompileError:
    """`error`, or a sentence: an #error is reached, and which names decide that. `text` is that of `file`."""
    wants = _WANTS.search(str(error))
    if not wants:
        return error
    if wants[1] != file:
        text = read_source(Path(wants[1])) if Path(wants[1]).is_file() else ""
    before = "".join(text.splitlines(keepends=True)[: int(wants[2]) - 1])
    opened: list[list[str]] = []  # of each #if that is open, its conditions so far
    for word, rest in _CONDITION.findall(before):
        if word.startswith("if"):
            opened.append([rest])
        elif opened and word == "endif":
            opened.pop()
        elif opened:
            opened[-1].append(rest)
    innermost = opened[-1] if opened else []
    names = [name for rest in innermost for name in re.findall(r"\b[A-Za-z_]\w*", rest)]
    names = [name for name in dict.fromkeys(names) if name != "defined"]
    remedy = f': define {" or ".join(names)}, as in defines=["{names[0]}=1"] or --define {names[0]}=1' if names else ""
    return CompileError(f"{wants[1]}:{wants[2]}: error: #error {wants[3]}{remedy}")


def in_words(error: CompileError, source: Source, name: str) -> CompileError:
    """`error`, or a sentence: the library lacks a name, or the compiler refuses nothing but the name of the kernel."""
    file = source.filename
    lacking = [(place, *filter(None, names)) for place, *names in _LACKS.findall(str(error))]
    lacking += [(place, lacks, library) for place, library, lacks in _LACKS_CLASS.findall(str(error))]
    for place, lacks, library in lacking:
        if library in _STAND_INS:
            why = f"cudascope has a stand-in of its own for {library}, and {lacks} is not in it"
            return CompileError(f"{place}: error: {why} (README: what runs): give the kernel a plain C++ path")
    said = str(error)
    first = re.search(r"^(\S.*?):\d+:\d+: (?:fatal )?error: ", said, re.MULTILINE)
    before = said[: first.end()] if first else ""  # a note after the error may show other headers
    chain = next(reversed([*_CHAIN.finditer(before)]), None)
    if chain and chain[1] == file and chain[3] == first[1] and (source.folder / first[1]).parent != source.folder:
        return CompileError(
            f"{file}:{chain[2]}: error: this line includes {chain[3]}, which the compiler refuses. If the kernel does "
            f"without it, put the line under #ifndef CUDASCOPE; else declare here what it needs\n{error}"
        )
    refused = re.findall(r"^(\S.*?):\d+:\d+: (?:fatal )?error: (.*)$", str(error), re.MULTILINE)
    if not refused or {place for place, _ in refused} != {"<cudascope>"}:
        return CompileError(without_own_headers(str(error), file))
    if returns := re.search(r"call to .call\((?!void)([^()]+?) \(\*\)\(", said):
        return CompileError(f"{file}: kernel {name!r} returns {returns[1]}: a __global__ function must return void")
    whys = [what for _, what in refused if not re.search("overloaded function|no matches converting|simt", what)]
    why = whys[0] if whys else "its template arguments are of another kind, break a condition, or fit several kernels"
    return CompileError(f"{file}: there is no kernel {name!r}: {why}; compare the name with the kernel's declaration")


_CONTEXT = re.compile(r": In (static |member )*(function|instantiation|substitution|lambda)|:  +required (from|by) ")
_PLACE = re.compile(r"(?:/.*?|\S+?)(?::\d+)*: |\S.*?(?::\d+)+: ")  # a path may have a space


def without_own_headers(said: str, file: str) -> str:
    """Return what the compiler said about the user's files. An error in a header of the runner moves to its caller."""
    kept: list[str] = []
    context: list[str] = []  # lines that introduce the next error
    caller, is_own = file, False
    for line in said.split("\n"):
        place = _PLACE.match(line)
        chain = re.match(r"(?:In file included| +) ?from (.*?)(?::\d+)*[:,]?$", line)
        is_own_here = is_foreign(re.sub(r"(?::\d+)*: $", "", place[0])) if place else False
        if chain:
            context += [] if is_foreign(chain[1]) else [line]
        elif place is None:  # the text of a source line
            kept += [] if is_own else [line]
        elif _CONTEXT.search(line):
            is_own = is_own_here
            if not is_own:
                caller = place[0].removesuffix(": ")
                context.append(line)
        elif is_own := is_own_here:
            what = re.search(": (?:fatal )?error: (.*)", line)
            kept += [f"{caller}: error: {what[1]}"] if what else []
            context = []
        else:
            kept += [*context, line]
            context = []
    said = re.sub(r"simt::value_of<[^’]*>’ \{aka ‘([^’]*)’\}", r"\1’", "\n".join(kept))
    return re.sub(r"\bsimt::(ptx::)?", "", said)


def run_tool(name: str, *arguments: str, lines: Sequence[str] = ()) -> str:
    """Return the output of `nm` or `addr2line` for the input `lines`."""
    command = [_tool(name), *arguments]
    return subprocess.run(command, input="\n".join(lines), capture_output=True, check=True, **BYTES).stdout


@functools.cache
def _tool(name: str) -> str:
    """The compiler knows where its own is: under conda it is not on the PATH by this name."""
    compiler, _ = find_compiler()
    command = [*compiler, f"-print-prog-name={name}"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    path = next(filter(None, map(shutil.which, (found, name, f"llvm-{name}"))), None)
    if path is None:
        raise CompileError(f"the C++ compiler comes without {name}: install binutils")
    return path
