"""Exercise of lesson 3: online softmax as a Triton kernel."""

import math

import torch

from pagewise.exercises.code import solution_text, stub_text, variants
from pagewise.exercises.exercise import Case
from pagewise.exercises.triton import TritonExercise, launching
from pagewise.exercises.values import text
from pagewise.tools.launch import launch

INF = math.inf


def _softmax_rows(what: str, rows: list[list[float]], tile: int = 4) -> Case:
    """Rows in the middle of memory: behind them lie other numbers, which nobody may count in or overwrite."""

    def run(kernel: object, device: torch.device) -> object:
        x = torch.tensor(rows, device=device)
        read = torch.cat([x.flatten(), x.new_full((16,), 3.0)])
        written = torch.full_like(read, -7.0)
        launch(kernel, (len(rows),), read, written, x.shape[1], outputs=(written,), TILE=tile)
        return {"out": written[: x.numel()].view_as(x), "behind out": written[x.numel() :][:4]}

    return launching(f"x = {text(rows)}, TILE = {tile}{what}", run)


_INSIDE = "inside = start + cols < num_cols"

ONLINE_SOFTMAX_KERNEL = TritonExercise(
    "online_softmax_kernel",
    [
        _softmax_rows("", [[1.0, 2.0, 3.0, 4.0]]),
        _softmax_rows("", [[1.0, 2.0, 3.0]]),
        _softmax_rows("", [[5.0, 1.0, 1.0, 1.0, 2.0, 3.0]]),
        _softmax_rows("", [[1.0, 1.0, 1.0, 1.0, 5.0, 6.0]]),
        _softmax_rows("", [[1.0, 2.0, 3.0], [1000.0, 1001.0, 0.0]]),
        _softmax_rows(" (the first tile is all masked)", [[-INF] * 4 + [1.0, 2.0]]),
        _softmax_rows("", [[-INF, -INF]]),
    ],
    variants(
        "online_softmax_kernel.py",
        mask_before_the_offset=(
            "Keys past the end got weight: your mask compares before the offset `start` is added.",
            (_INSIDE, "inside = cols < num_cols"),
        ),
        padding_of_0=(
            "What stands past the row's end was loaded as 0, a score like any other: `other` must be −inf.",
            ('mask=inside, other=float("-inf")', "mask=inside, other=0.0"),
        ),
        no_mask_on_loading=(
            "The tile goes past the row's end, and what lies there was counted in: load with `mask` and `other`.",
            (', mask=inside, other=float("-inf")', ""),
        ),
        no_mask_on_storing=(
            "Numbers behind the end were overwritten: store with the mask, too.",
            ("/ l_safe, mask=inside", "/ l_safe"),
        ),
        l_does_not_shrink=(
            "The maximum rose with a later tile, and l kept what was summed relative to the old one: it shrinks by "
            "exp(m − m_new).",
            ("l = l * tl.exp(m - m_safe) + ", "l = l + "),
        ),
        only_the_last_tile=(
            "l forgets the tiles before: the sum of this one is added to what l was, shrunk.",
            ("l = l * tl.exp(m - m_safe) + ", "l = "),
        ),
        the_other_way_round=(
            "exp(m_new − m) is infinite while m is −inf, and 0 · inf is NaN: l shrinks by exp(m − m_new).",
            ("l * tl.exp(m - m_safe)", "l * tl.exp(m_safe - m)"),
        ),
        NaN_in_a_masked_tile=(
            "No key was visible so far: m_new is −inf, and (−inf) − (−inf) is NaN. Subtract 0 there.",
            ('m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)', "m_safe = m_new"),
        ),
    ),
    solution_text("online_softmax_kernel.py"),
    stub_text("online_softmax_kernel.py"),
    "two passes over the row, any length, and nothing behind its end was read or written.",
)

EXERCISES = [ONLINE_SOFTMAX_KERNEL]
