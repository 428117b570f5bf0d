"""What the Triton forward needs of a GPU in tiles of 64 or 128 queries and keys, for lesson 6: compiled, not run.

python tests/flash_attention_tiles.py       writes lessons/measurements/flash_attention_tiles.json, in a few minutes
"""

import datetime
import itertools
import json
from importlib.metadata import version
from pathlib import Path

from triton_compile import compile_triton

FILE = Path(__file__).parent.parent / "lessons/measurements/flash_attention_tiles.json"
HEAD_SIZE, STAGES = 128, 2
POINTERS = {
    "slopes_ptr": "*fp32", "mask_ptr": "*u8", "seed_ptr": "*i64", "cu_q_ptr": "*i32", "cu_k_ptr": "*i32",
    "lse_ptr": "*fp32", "m_ptr": "*fp32", "log_l_ptr": "*fp32",
}  # fmt: skip
FLOATS = ("scale", "softcap", "growth")


def compiled(rows: int, cols: int, num_warps: int, sm: int) -> dict[str, int]:
    """Registers and spilled bytes of a thread, shared bytes of a thread block: float16, no options."""
    from pagewise.kernels.flash_attention import flash_attention_kernel

    options = ("CAUSAL", "WINDOW", "SOFTCAP", "ALIBI", "MASK", "DROPOUT", "PACKED", "LEARNS", "REST")
    constants = {"D": HEAD_SIZE, "BLOCK_D": HEAD_SIZE, "ROWS": rows, "COLS": cols} | dict.fromkeys(options, False)
    signature = {}
    for name in flash_attention_kernel.arg_names:
        if name.endswith("_ptr"):
            signature[name] = POINTERS.get(name, "*fp16")
        elif name not in constants:
            signature[name] = "fp32" if name in FLOATS else "i32:16" if "stride" in name else "i32"
    kernel = compile_triton(flash_attention_kernel, signature, constants, sm, num_warps=num_warps, num_stages=STAGES)
    return {"registers": kernel.registers, "spilled": kernel.spilled_bytes, "shared": kernel.shared_bytes}


def sweep() -> dict:
    """{64, 128} queries × {64, 128} keys × 4 or 8 warps, for an A100 and an H100."""
    rows = []
    for sm, warps, queries, keys in itertools.product((80, 90), (4, 8), (64, 128), (64, 128)):
        rows.append({"sm": sm, "warps": warps, "queries": queries, "keys": keys} | compiled(queries, keys, warps, sm))
        print(rows[-1], flush=True)
    kind = {"kernel": "flash_attention_kernel", "dtype": "float16", "head_size": HEAD_SIZE, "stages": STAGES}
    return kind | {"triton": version("triton"), "date": datetime.date.today().isoformat(), "rows": rows}


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(sweep(), indent=1) + "\n")
