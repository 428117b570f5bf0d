"""Compiles Triton kernels for a GPU that need not be there, and says what each needs of it.

Where kernels are interpreted, Triton's own library is too, so compiling happens in a second process that has
`TRITON_INTERPRET=0`. It is started at the first call, serves all others, and ends with the tests. Its answers are kept
in build/compiled/ for the next run, until a kernel, cudascope or Triton changes.
"""

import functools
import importlib.metadata
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]


class Compiled(NamedTuple):
    """A kernel as the GPU gets it: registers per thread, bytes spilled per thread, shared bytes per thread block."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    ptx: str


def compile_triton(
    kernel: Any, signature: Mapping[str, str | list], constexprs: Mapping[str, Any], sm: int, **options: Any
) -> Compiled:
    """Compile a `@triton.jit` function, interpreted or not, for compute capability `sm` (80, 90).

    Args:
        signature: the type of each argument that is not `tl.constexpr`, such as {"x_ptr": "*fp16", "num_cols": "i32"}.
            Pointers are taken to be 16-byte aligned, as torch's are. "i32:16" is an int that is divisible by 16, as
            Triton finds out at a launch. A list is a tuple of such types; a number in the list is a constant, as
            Triton takes a stride of 1.
        constexprs: value of each `tl.constexpr` argument.
        options: of the launch, e.g. num_warps=8.

    Raises:
        AssertionError: it does not compile; the message is the compiler's.
    """
    names = list(inspect.signature(kernel.fn).parameters)
    missing = [name for name in names if name not in signature and name not in constexprs]
    assert not missing, f"neither signature nor constexprs say what {', '.join(missing)} is"
    answer = _ask(
        path=inspect.getsourcefile(kernel.fn),
        name=kernel.fn.__name__,
        signature={name: signature.get(name, "constexpr") for name in names},
        constexprs=dict(constexprs),
        sm=sm,
        options=options,
    )
    assert "error" not in answer, f"{kernel.fn.__name__} does not compile for sm_{sm}:\n{answer['error']}"
    return Compiled(**answer)


def compile_launched(sm: int, name: str, call: Callable[[], Any]) -> Compiled:
    """Compile the kernel `name` as `call` last launches it on a GPU of capability `sm`, and execute nothing."""
    from cudascope import triton_compiled  # not above: the second process runs this file without the package
    from cudascope.triton import launches
    from cudascope.triton.compiler import specialised

    requests = {}

    def keep(target: Any, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launch = specialised(kernel, target.sm, args, options)
        requests[launch.name] = launch.request

    executed, launches._run = launches._run, keep
    try:
        with triton_compiled(f"sm_{sm}"):
            call()
    finally:
        launches._run = executed
    answer = _ask(request=json.loads(requests[name]))
    assert "error" not in answer, f"{name} does not compile for sm_{sm}:\n{answer['error']}"
    return Compiled(**answer)


def _ask(**question: Any) -> dict[str, Any]:
    from cudascope.toolchain.cache import digest, publish

    asked = json.dumps(question)
    kept = ROOT / "build" / "compiled" / f"{digest(asked, *_sources())}.json"
    if kept.exists():
        return json.loads(kept.read_text())
    worker = _worker()
    worker.stdin.write(asked + "\n")
    worker.stdin.flush()
    answer = worker.stdout.readline()
    assert answer, "the compiling process ended unexpectedly"
    if "error" not in (found := json.loads(answer)):
        publish(kept, answer.encode())
    return found


@functools.cache
def _sources() -> list[str]:
    """Return everything besides the question that decides an answer."""
    from cudascope.toolchain.cache import code_of

    kernels = [file.read_text() for file in sorted(ROOT.glob("kernels/*.py"))]
    code = [code_of("cudascope.triton.worker"), code_of("cudascope.toolchain.ptxas"), Path(__file__).read_text()]
    return [importlib.metadata.version("triton"), *code, *kernels]


@functools.cache
def _worker() -> subprocess.Popen:
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, __file__], text=True, env=environment, **pipes)


# ------------------------------------------------------------------------------------------------ the second process


def _compile(path: str, name: str, signature: dict, constexprs: dict, sm: int, options: dict) -> dict[str, Any]:
    from triton.compiler import ASTSource

    from cudascope.triton.worker import compiled

    constants = {(i,): constexprs[name] for i, name in enumerate(signature) if name in constexprs}
    types, aligned = {}, {}
    for i, (argument, kinds) in enumerate(signature.items()):
        found = []
        for j, kind in enumerate(kinds if isinstance(kinds, list) else [kinds]):
            where = (i, j) if isinstance(kinds, list) else (i,)
            if not isinstance(kind, str):
                constants[where], kind = kind, "constexpr"
            elif kind.startswith("*") or kind.endswith(":16"):
                aligned[where] = [["tt.divisibility", 16]]
            found.append(kind.removesuffix(":16"))
        types[argument] = tuple(found) if isinstance(kinds, list) else found[0]
    source = ASTSource(getattr(_module(path), name), types, constants, aligned)
    texts, metadata = compiled(source, sm, options)
    return _needs(texts["ptx"], metadata, sm)


def _needs(ptx: str, metadata: Mapping[str, Any], sm: int) -> dict[str, Any]:
    from cudascope.toolchain.ptxas import PtxText, resources_of

    target = re.search(r"\.target (sm_\w+)", ptx)[1]
    resources = resources_of(PtxText(ptx, metadata["name"], target), sm)
    assert resources, "ptxas does not compile the PTX"
    return {
        "registers": resources.registers,
        "spilled_bytes": resources.spilled_bytes,
        "shared_bytes": metadata["shared"],
        "ptx": ptx,
    }


def _compile_request(request: dict) -> dict[str, Any]:
    from cudascope.triton.worker import compile_kernel

    answer = compile_kernel(request)
    return _needs(answer["asm"]["ptx"], answer["metadata"], request["sm"])


@functools.cache
def _module(path: str) -> Any:
    import importlib.util

    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _serve() -> None:
    """Answer one line of JSON with another until the input ends. Triton's own output goes to stderr."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        try:
            question = json.loads(line)
            answer = _compile_request(**question) if "request" in question else _compile(**question)
        except Exception as error:  # the compiler's own, to be raised where the question came from
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
