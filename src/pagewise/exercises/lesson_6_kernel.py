"""Exercise of lesson 6: the forward pass as a Triton kernel."""

import torch

from pagewise.exercises.code import variants
from pagewise.exercises.exercise import Case
from pagewise.exercises.triton import launching, triton_exercise
from pagewise.exercises.values import small_numbers


def _flash(T: int, S: int, what: str, factor: float = 0.1) -> Case:
    """Tiles of 16 × 16, head size 16, scale 1/4; the values' columns are their key's index, its square and noise."""

    def launch(kernel: object, device: torch.device) -> object:
        keys = torch.arange(S, dtype=torch.float32)[:, None]
        q, k = factor * small_numbers(T, 16), small_numbers(S, 16) * (1 + keys) / 8
        v = torch.cat([keys, keys**2, small_numbers(S, 14)], dim=1)
        q, k, v = (x.to(device) for x in (q, k, v))
        out = torch.full((T + 2, 16), -7.0, device=device)
        kernel[(-(-T // 16),)](q, k, v, out, T, S, 0.25, BR=16, BC=16, D=16)
        return {"the first two columns of out": out[:T, :2], "the rest": out[:T, 2:], "behind out": out[T:, 0]}

    return launching(f"T = {T}, S = {S}, D = 16, BR = BC = 16, scale = 1/4: {what}", launch)


FLASH_KERNEL = triton_exercise(
    "flash_kernel",
    [
        _flash(1, 1, "one query, one key"),
        _flash(2, 2, "the second query sees both keys"),
        _flash(3, 28, "two tiles; the queries see 26, 27 and 28 keys"),
        _flash(4, 2, "the first two queries see nothing"),
        _flash(1, 20, "two tiles; large scores, the first tile has the largest", factor=5.0),
        _flash(17, 18, "two programs"),
    ],
    variants(
        "flash_kernel.py",
        acc_does_not_shrink=(
            "The maximum rose with a later tile, l shrank and acc did not: both are relative to m.",
            ("acc = acc * shrink[:, None] + ", "acc = acc + "),
        ),
        l_does_not_shrink=(
            "The maximum rose with a later tile, acc shrank and l did not: both are relative to m.",
            ("l = l * shrink + ", "l = l + "),
        ),
        the_tile_s_own_maximum=(
            "exp2 overflows: m has to be the largest score so far, not that of the last tile, and is subtracted from "
            "all.",
            ("m_new = tl.maximum(m, tl.max(scores, axis=1))", "m_new = tl.max(scores, axis=1)"),
        ),
        m_stays=(
            "m is still −inf after the first tile: it becomes m_new at the end of every turn.",
            ("        m = m_new\n", ""),
        ),
        base_e_for_base_2=(
            "The scores are in base 2, and you raise e to them: with scale_2 = scale · log₂ e it is exp2.",
            ("tl.exp2(", "tl.exp("),
        ),
        base_2_for_base_e=(
            "You raise 2 to scores in base e: exp(scale · x) is exp2(scale_2 · x), where scale_2 = scale · log₂ e.",
            ("products * scale_2", "products * scale"),
        ),
        minus_a_million=(
            "A query that sees no key must give 0: with −10⁶ in place of −inf its largest score is −10⁶, and "
            "each hidden key weighs exp2(0) = 1.",
            ('tl.where(visible, products * scale_2, float("-inf"))', "tl.where(visible, products * scale_2, -1e6)"),
        ),
        NaN_where_nothing_is_seen=(
            "No key was visible so far: m_new is −inf, and (−inf) − (−inf) is NaN. Subtract 0 there.",
            ('m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)', "m_safe = m_new"),
        ),
        top_left=(
            "Query t sees the keys up to t + S − T, so that the last query sees the last key: S − T is missing.",
            ("row[:, None] + S - T", "row[:, None]"),
        ),
    ),
    "the forward pass of FlashAttention-2, for any number of queries and keys.",
)

EXERCISES = [FLASH_KERNEL]
