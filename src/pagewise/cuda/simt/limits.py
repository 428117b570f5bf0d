"""Shared memory of a launch on the CPU, where the kernel's own is known: a GPU would refuse what is refused here."""

import re

from pagewise.cuda.limits import MAX_SHARED_BYTES, MAX_STATIC_SHARED_BYTES
from pagewise.cuda.simt.library import Library


def check_shared(name: str, library: Library, shared_bytes: int) -> None:
    """A kernel's own shared arrays, and they and the dynamic memory together, must fit, or ValueError."""
    function = name.partition("<")[0].rpartition("::")[2]
    # what belongs to the functions it calls is not counted
    mangled = re.compile(rf"_ZZ(N.*)?{len(function)}{function}")
    static = sum(array.bytes for array in library.shared if mangled.match(array.symbol))
    if static > MAX_STATIC_SHARED_BYTES:
        raise ValueError(
            f"kernel {name}: its __shared__ arrays of fixed size can have at most {MAX_STATIC_SHARED_BYTES} bytes, "
            f"got {static}: use extern __shared__"
        )
    if static + shared_bytes > MAX_SHARED_BYTES:
        raise ValueError(
            f"kernel {name}: shared_bytes = {shared_bytes}, but a thread block can have at most {MAX_SHARED_BYTES} "
            f"bytes of shared memory, got {static} + {shared_bytes} = {static + shared_bytes} with the arrays it "
            f"declares itself (an H100's limit, kept on the CPU too)"
        )
