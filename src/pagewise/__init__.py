"""pagewise: "Attention, Page by Page".

The attention algorithms behind LLM serving, each derived in a lesson and tested.

Everything is importable from its module: `from pagewise.naive_attention import attention`. Importing `pagewise` alone
compiles no kernel; it only settles whether Triton kernels will be compiled or interpreted (see `tools.device`).
"""

from pagewise.tools import device as _device

__version__ = "0.2.0"
_device.choose_triton_mode()
