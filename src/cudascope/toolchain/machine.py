"""The machines that the CPU runner makes code for, x86-64 and aarch64, and the options of the compiler on each.

cpu/runtime/machine.h has the part of the runtime, and translate/assembly.py knows the assembly of both machines.
"""

import platform

from cudascope.cpp.source import CompileError

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
    """Return the options that `compiler` needs on this machine.

    Raises:
        CompileError: the runtime is not written for this machine, or not for this compiler on it.
    """
    machine = platform.machine()
    if machine not in _OPTIONS:
        raise CompileError(
            f"running a CUDA kernel on the CPU needs an x86-64 or aarch64 machine, and this one is {machine}"
        )
    if machine != "x86_64" and "clang" in compiler:
        raise CompileError(
            f"running a CUDA kernel on the CPU needs g++ on {machine}, and the C++ compiler is {compiler}: set CXX=g++"
        )
    return _OPTIONS[machine]
