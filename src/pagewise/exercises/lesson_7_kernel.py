"""Exercise of lesson 7: a split of a decode step as a Triton kernel."""

import torch

from pagewise.exercises.code import variants
from pagewise.exercises.exercise import Case
from pagewise.exercises.triton import launching, triton_exercise
from pagewise.exercises.values import small_numbers


def _splits(S: int, num_splits: int, what: str, factor: float = 0.25) -> Case:
    """Tiles of 4 keys, head size 4, scale 1/2; NaN behind the last key."""

    def launch(kernel: object, device: torch.device) -> object:
        q = torch.tensor([2.0, 0.0, -1.0, 1.0])
        k, v = torch.full((2, S + 4, 4), torch.nan)
        k[:S], v[:S] = factor * small_numbers(S, 4), small_numbers(S, 4)
        m, l, acc = (torch.full(shape, -7.0) for shape in ((num_splits,), (num_splits,), (num_splits, 4)))
        q, k, v, m, l, acc = (x.to(device) for x in (q, k, v, m, l, acc))
        kernel[(num_splits,)](q, k, v, m, l, acc, S, 0.5, TILE=4, D=4)
        return {"m": m, "l": l, "acc": acc}

    return launching(f"S = {S}, {num_splits} splits, TILE = D = 4: {what}", launch)


_KEYS = "t * split // n, t * (split + 1) // n"

DECODE_SPLIT = triton_exercise(
    "decode_split",
    [
        _splits(4, 1, "one tile"),
        _splits(12, 1, "one split of three tiles"),
        _splits(8, 2, "a tile each"),
        _splits(20, 2, "two tiles and three"),
        _splits(6, 1, "the last tile has 2 keys; NaN behind them"),
        _splits(8, 1, "large scores", factor=40.0),
        _splits(4, 2, "one tile for two: the first split has none"),
    ],
    variants(
        "decode_split.py",
        every_tile=(
            "Every program went through all tiles: its share begins at tile t · split // n.",
            (_KEYS, "0, t"),
        ),
        tiles_left_out=(
            "With t // n tiles for each split, the last tiles belong to nobody: t · split // n shares all.",
            (_KEYS, "t // n * split, t // n * (split + 1)"),
        ),
        keys_for_tiles=(
            "Tile j begins at key j · TILE, not at key j.",
            ("key = tile * TILE + token", "key = tile + token"),
        ),
        scores_of_0=(
            "A key behind the last one, loaded as 0, has a score of 0, and exp(0 − m) is a weight: it must be −inf.",
            (
                'tl.where(there, scale * tl.sum(q[None, :] * k, axis=1), float("-inf"))',
                "scale * tl.sum(q[None, :] * k, axis=1)",
            ),
        ),
        NaN_behind_the_last_key=(
            "Behind the last key lies NaN, and 0 · NaN is NaN: load 0 there (`mask`, `other`).",
            ("v = tl.load(v_ptr + offsets, mask=there[:, None], other=0.0)", "v = tl.load(v_ptr + offsets)"),
        ),
        acc_does_not_shrink=(
            "The maximum rose with a later tile, l shrank and acc did not: both are relative to m.",
            ("acc = acc * shrink + ", "acc = acc + "),
        ),
        l_does_not_shrink=(
            "The maximum rose with a later tile, acc shrank and l did not: both are relative to m.",
            ("l = l * shrink + ", "l = l + "),
        ),
        already_divided=(
            "acc is divided by l already: a split stores the sum, and the merge divides once, at its end.",
            ("        m = m_new\n", "        m = m_new\n    acc = acc / tl.where(l == 0.0, 1.0, l)\n"),
        ),
        no_maximum=(
            "exp overflows: subtract the largest score so far, and store it as m.",
            ("m_new = tl.maximum(m, tl.max(scores, axis=0))", "m_new = tl.maximum(m, 0.0)"),
        ),
        no_scale=("The scores lack the scale.", ("scale * tl.sum", "tl.sum")),
    ),
    "half of Flash-Decoding; the other half you merged above.",
)

EXERCISES = [DECODE_SPLIT]
