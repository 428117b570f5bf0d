"""`%%cuda name`: a notebook's cell of CUDA C++ becomes a `CudaKernel` of that name. Loaded by `%load_ext cudascope`.

    %%cuda scale                          the kernel `scale` of the cell
    %%cuda softmax<float, 128> -DX=4      an instance of a template, with a definition; bound to `softmax`

It is compiled at once, for the GPU if there is one. Lines in messages are the cell's.
"""

from IPython import get_ipython
from IPython.core.error import UsageError

from cudascope.cpp.source import CompileError
from cudascope.kernels.cuda import CudaKernel, default_device


def cuda(line: str, cell: str) -> None:
    """The cell magic. Binds the kernel in the notebook; a compiler's complaint is shown without Python's traceback.

    After such a complaint the name is not bound, so that no later cell runs the kernel that it named before.
    """
    words = line.split()
    first_define = next((i for i, word in enumerate(words) if word.startswith("-D")), len(words))
    name, defines = " ".join(words[:first_define]), words[first_define:]
    bound_name = name.partition("<")[0].rpartition("::")[2].strip()
    if not bound_name.isidentifier() or not all(define.startswith("-D") for define in defines):
        raise UsageError("write the kernel's name: %%cuda name, %%cuda name<float, 128>, %%cuda name -DX=4")
    try:
        # the magic's own line is line 1 of the cell
        kernel = CudaKernel("\n" + cell, name, defines=[define.removeprefix("-D") for define in defines])
        kernel.compile(default_device())
    except (CompileError, ValueError) as error:
        get_ipython().user_ns.pop(bound_name, None)
        message = f"{type(error).__name__}: {error}"
        error._render_traceback_ = lambda: [message]  # what IPython shows
        raise
    get_ipython().push({bound_name: kernel})


def load_ipython_extension(shell: object) -> None:
    """Register `%%cuda`. `%load_ext cudascope` calls this function."""
    shell.register_magic_function(cuda, "cell")
