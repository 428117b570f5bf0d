"""Registers, shared memory and spills of the Triton forward in tiles of 64 or 128, for lesson 6: compiled, not run.

python tests/flash_attention_tiles.py       writes lessons/measurements/flash_attention_tiles.json, in a few minutes
"""

import datetime
import itertools
import json
from importlib.metadata import version
from pathlib import Path

from flash_compiled import FORWARD
from flash_compiled import compiled as compile_kernel

from pagewise.flash_attention.tuning import Tiles

FILE = Path(__file__).parent.parent / "lessons/measurements/flash_attention_tiles.json"
HEAD_SIZE, STAGES = 128, 2


def compiled(rows: int, cols: int, num_warps: int, sm: int) -> dict[str, int]:
    """Registers and spilled bytes of a thread, shared bytes of a thread block: float16, no options."""
    kernel = compile_kernel(
        FORWARD, Tiles(rows, cols, num_warps, STAGES), HEAD_SIZE, "fp16", sm, "plain", gradient=False
    )
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
