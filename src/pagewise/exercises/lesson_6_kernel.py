"""Exercise of lesson 6: the forward pass as a Triton kernel, the first rung of `kernels/flash_attention.py`."""

import torch

from pagewise.exercises.code import Gap, with_gaps
from pagewise.exercises.exercise import Case
from pagewise.exercises.triton import RESCALING, TritonExercise, kernel_text, launching
from pagewise.exercises.values import small_numbers
from pagewise.tools.launch import launch


def _flash(T: int, S: int, what: str, *, heads: int = 1, causal: bool = True, factor: float = 0.1) -> Case:
    """Tiles of 16 × 16, head size 16, scale 1/4. The values' first columns are their key's index and its square.

    K and V are views of tensors with as many heads as q has. The heads after the KV heads hold 9 and NaN.
    """
    kv_heads = max(1, heads // 2)

    def run(kernel: object, device: torch.device) -> object:
        keys = torch.arange(S, dtype=torch.float32)[:, None]
        q = factor * small_numbers(1, heads, T, 16)
        k, v = torch.full((1, heads, S, 16), 9.0), torch.full((1, heads, S, 16), torch.nan)
        k[:, :kv_heads] = small_numbers(kv_heads, S, 16) * (1 + keys) / 8
        v[:, :kv_heads] = torch.cat([keys, keys**2, small_numbers(S, 14)], dim=1)
        v[:, 1:kv_heads] *= -0.5
        q, k, v = q.to(device), k.to(device)[:, :kv_heads], v.to(device)[:, :kv_heads]
        out = torch.full((1, heads, T + 2, 16), -7.0, device=device)
        lse = torch.full((1, heads, T), torch.nan, device=device)
        arguments = (q, k, v, out, lse, heads // kv_heads, T, S, 0.25)
        sizes = {"D": 16, "BLOCK_D": 16, "ROWS": 16, "COLS": 16, "CAUSAL": causal}
        launch(kernel, (-(-T // 16), heads, 1), *arguments, outputs=(out, lse), **sizes)
        found = {"the first two columns of out": out[0, :, :T, :2], "the rest": out[0, :, :T, 2:]}
        return found | {"lse": lse[0], "out after row T": out[0, :, T:, 0]}

    of = f"{heads} query heads, {kv_heads} KV heads" if heads > 1 else "one head"
    return launching(f"T = {T}, S = {S}, {of}, CAUSAL = {causal}, D = ROWS = COLS = 16, scale = 1/4: {what}", run)


_SCORES = 'tl.where(seen, products * (scale * LOG2_E), float("-inf"))'
_CAUSAL = "            seen &= col[None, :] <= row[:, None] + S - T\n"
_ACC = "        acc = tl.dot(weights.to(v_tile.dtype), v_tile, alpha[:, None] * acc"

_KERNEL = kernel_text("flash_attention", "flash_forward_kernel", "\nfrom pagewise.kernels.scores import LN_2, LOG2_E")

FLASH_FORWARD_KERNEL = TritonExercise(
    "flash_forward_kernel",
    _KERNEL,
    with_gaps(
        _KERNEL,
        Gap(
            "k_head, v_head = ",
            "k_head, v_head = ",
            "where K and V of this query head begin; `group` query heads share a KV head",
            "k_head, v_head = k[0] + batch * k[1], v[0] + batch * v[1]",
        ),
        Gap(
            "seen = col",
            "m = m_new",
            "mask and scale the products, then update m, l and acc. Scores and m are in base 2.\n"
            'Multiply with tl.dot(…, input_precision="ieee"). (−∞) − (−∞) is NaN.',
            "scores = products * (scale * LOG2_E)",
        ),
    ),
    [
        _flash(1, 1, "one query, one key"),
        _flash(2, 2, "the second query sees both keys"),
        _flash(2, 3, "no mask: each query sees all three keys", causal=False),
        _flash(3, 28, "two tiles; the queries see 26, 27 and 28 keys"),
        _flash(4, 2, "the first two queries see nothing"),
        _flash(1, 20, "two tiles; large scores, the first tile has the largest", factor=5.0),
        _flash(17, 18, "two programs"),
        _flash(2, 3, "one KV head for two query heads", heads=2),
        _flash(2, 3, "two query heads for each KV head", heads=4),
    ],
    [
        "the gap is empty: acc is still 0: the loop must add the values of each tile, weighted, to acc.",
        (_ACC, "        tl.dot(weights, v_tile, acc"),
        ("        l = alpha * l + tl.sum(weights, axis=1)\n        tl.dot", "        tl.dot"),
        ("        m = m_new\n", ""),
        *RESCALING,
        "the tile's own maximum: m must be the largest score so far, not the largest of the last tile: exp2 overflows "
        "otherwise.",
        ("m_new = tl.maximum(m, tl.max(scores, axis=1))", "m_new = tl.max(scores, axis=1)"),
        "m stays: m is still −inf after the first tile: set it to m_new at the end of every step of the loop.",
        ("        m = m_new\n", ""),
        "base e for base 2: The scores are in base 2, and you raise e to them. They contain the factor log₂ e: take "
        "exp2.",
        ("tl.exp2(", "tl.exp("),
        "base 2 for base e: You raise 2 to scores in base e: exp(scale · x) is exp2(scale · LOG2_E · x).",
        ("products * (scale * LOG2_E)", "products * scale"),
        "minus a million: A query that sees no key must give 0. With −10⁶ in place of −inf its largest score is −10⁶, "
        "and each hidden key weighs exp2(0) = 1.",
        (_SCORES, "tl.where(seen, products * (scale * LOG2_E), -1e6)"),
        "NaN where nothing is seen: No key was visible so far: m_new is −inf, and (−inf) − (−inf) is NaN. Subtract 0 "
        "there.",
        ('m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)', "m_finite = m_new"),
        "top left: Query t sees the keys up to t + S − T, so that the last query sees the last key: S − T is missing.",
        ("row[:, None] + S - T", "row[:, None]"),
        "always causal: Only a causal kernel hides later keys: apply that mask if CAUSAL is true.",
        (_CAUSAL, _CAUSAL.removeprefix("    ")),
        ("        if CAUSAL:\n", ""),
        "never causal: With CAUSAL, query t may not see keys after t + S − T.",
        (f"        if CAUSAL:\n{_CAUSAL}", ""),
        "keys after the last: The tile has columns after key S − 1. They were loaded as 0, and a score of 0 is a "
        "weight: hide them.",
        ("        seen = col[None, :] < S\n", "        seen = col[None, :] >= 0\n"),
        "a KV head per query head: A KV head serves `group` query heads in a row: query head h reads KV head h // "
        "group, not KV head h.",
        ("head // group", "head"),
        "KV heads in turn: Query heads that share a KV head are neighbours: h // group, not h % (number of KV heads).",
        ("head // group", "(head % (tl.num_programs(1) // group))"),
        "the first KV head: Every query head read KV head 0: query head h reads KV head h // group.",
        ("head // group", "0"),
    ],
    "this is the forward pass of FlashAttention-2, for any number of queries, keys and heads.",
)

EXERCISES = [FLASH_FORWARD_KERNEL]
