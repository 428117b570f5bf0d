"""pagewise: "Attention, Page by Page".

The attention algorithms behind LLM serving, each derived in a lesson and tested.

Everything is importable from its module: `from pagewise.naive_attention import attention`. Importing `pagewise` alone
compiles no kernel; it only settles whether Triton kernels will be compiled or interpreted (see `tools.device`).
"""

import importlib.util as _util
from pathlib import Path as _Path

__version__ = "0.2.0"


def _check_kernels() -> None:
    """Raise ImportError if `pagewise.kernels` is not the one beside this package.

    An editable install finds the kernels of its own checkout, even if PYTHONPATH names another checkout's pagewise. A
    kernel that someone changes there would never run.
    """
    here, found = _Path(__file__).parent.resolve(), _util.find_spec("pagewise.kernels")
    folders = (found and found.submodule_search_locations) or ()
    kernels = next((_Path(folder).resolve() for folder in folders), None)
    if kernels not in (None, here / "kernels", here.parents[1] / "kernels"):
        raise ImportError(
            f"pagewise comes from {here}, but pagewise.kernels comes from {kernels}, so the kernels beside this "
            f"pagewise would never run: install this checkout (pip install -e {here.parents[1]}), or take it off "
            f"PYTHONPATH"
        )


_check_kernels()  # before torch is imported, which takes seconds

from pagewise.tools import device as _device  # noqa: E402

_device.choose_triton_mode()
_device.explain_missing_triton()
