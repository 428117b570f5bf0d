"""Exercise of lesson 7: a split of a decode step in Triton, the first rung of `kernels/flash_decoding.py`."""

import torch

from pagewise.exercises.code import Gap, with_gaps
from pagewise.exercises.exercise import Case
from pagewise.exercises.triton import RESCALING, TritonExercise, kernel_text, launching
from pagewise.exercises.values import small_numbers
from pagewise.tools.launch import launch


def _splits(S: int, num_splits: int, what: str, *, B: int = 1, heads: int = 1, factor: float = 0.25) -> Case:
    """Tiles of 16 keys, head size 16, scale 1/4, 2 query heads per KV head if there are several.

    K and V have NaN after the last key. Their strides differ.
    """
    kv_heads = max(1, heads // 2)

    def run(kernel: object, device: torch.device) -> object:
        q = small_numbers(B, heads, 16) / 4
        k = torch.full((B, kv_heads, S + 16, 16), torch.nan)
        v = torch.full((B, kv_heads, S + 16, 20), torch.nan)[..., :16]
        rising = 1 + torch.arange(S)[:, None] / 8
        k[:, :, :S], v[:, :, :S] = (
            factor * small_numbers(B, kv_heads, S, 16) * rising,
            small_numbers(B, kv_heads, S, 16),
        )
        m, l, acc = (torch.full((B * heads * num_splits * n,), -7.0) for n in (1, 1, 16))
        q, k, v, m, l, acc = (x.to(device) for x in (q, k, v, m, l, acc))
        arguments = (q, k[:, :, :S], v[:, :, :S], m, l, acc, heads, S, 0.25)
        sizes = {"D": 16, "GROUP": heads // kv_heads, "ROWS": 16, "TILE": 16}
        launch(kernel, (B, kv_heads, num_splits), *arguments, outputs=(m, l, acc), **sizes)
        acc = acc.view(-1, 16)
        return {"m": m, "l": l, "the first two columns of acc": acc[:, :2], "the rest of acc": acc[:, 2:]}

    of = f"{heads} query heads, {kv_heads} KV heads" if heads > 1 else "one head"
    splits = f"{num_splits} split{'s' * (num_splits > 1)}"
    return launching(f"B = {B}, {of}, S = {S}, {splits}, D = TILE = 16: {what}", run)


_RANGE = "num_tiles * split // num_splits, num_tiles * (split + 1) // num_splits"
_SLOT = "slot = (seq * num_heads + head) * num_splits + split"

_KERNEL = kernel_text("flash_decoding", "split_decode_kernel")

SPLIT_DECODE_KERNEL = TritonExercise(
    "split_decode_kernel",
    _KERNEL,
    with_gaps(
        _KERNEL,
        Gap(
            "for tile in range(",
            "m = m_new",
            "the loop over this split's tiles. Load keys and values [TILE, D], as 0 after key S − 1.\n"
            "Compute the scores [ROWS, TILE], then update m, l and acc.",
        ),
        Gap("slot = ", "slot = ", "where this split's results go: m is [B, H, num_splits]", "slot = head"),
    ),
    [
        _splits(16, 1, "one tile"),
        _splits(48, 1, "one split of three tiles"),
        _splits(32, 2, "one tile for each split"),
        _splits(80, 2, "two tiles and three tiles"),
        _splits(22, 1, "the last tile has 6 keys, and NaN after them"),
        _splits(32, 1, "large scores", factor=40.0),
        _splits(16, 2, "one tile for two splits: the first split has no key"),
        _splits(32, 2, "two sequences", B=2),
        _splits(32, 2, "one KV head for two query heads", heads=2),
        _splits(32, 2, "two sequences, two KV heads", B=2, heads=4),
    ],
    [
        "the gap is empty: m, l and acc are as they were before the loop: the loop must update them with each tile of "
        "this split.",
        (_RANGE, "0, 0"),
        "every tile: Every program read all tiles: split i of n begins at tile t · i // n.",
        (_RANGE, "0, num_tiles"),
        "tiles left out: With t // n tiles for each split, no split reads the last tiles: t · i // n shares out all "
        "of them.",
        (_RANGE, "num_tiles // num_splits * split, num_tiles // num_splits * (split + 1)"),
        "tiles in turn: Split i must have neighbouring tiles, t · i // n … t · (i + 1) // n − 1, not every n-th tile.",
        (_RANGE, "split, num_tiles, num_splits"),
        "keys for tiles: Tile j begins at key j · TILE, not at key j.",
        ("tile * TILE + tl.arange", "tile + tl.arange"),
        "scores of 0: A key after the last one, loaded as 0, has a score of 0, and exp(0 − m) is a weight: it must be "
        "−inf.",
        ('        scores = tl.where(is_key[None, :], scores, float("-inf"))\n', ""),
        "NaN after the last key: After the last key there is NaN, and 0 · NaN is NaN: load 0 there (`mask`, `other`).",
        ("tl.load(v_ptr + v_offset, mask=is_key[:, None], other=0.0)", "tl.load(v_ptr + v_offset)"),
        *RESCALING,
        "already divided: acc is divided by l already: a split stores the sum, and the merge divides once, at its end.",
        (f"    {_SLOT}", f"    acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]\n    {_SLOT}"),
        "no maximum: exp overflows: subtract the largest score so far, and store it as m.",
        ("m_new = tl.maximum(m, tl.max(scores, axis=1))", "m_new = tl.maximum(m, 0.0)"),
        "no scale: The scores lack the factor `scale`.",
        ('input_precision="ieee") * scale', 'input_precision="ieee")'),
        "the first sequence: Every program read the keys of sequence 0: add seq times the stride of sequences.",
        ("k_offset = seq * k_seq + ", "k_offset = "),
        ("v_offset = seq * v_seq + ", "v_offset = "),
        "strides of K for V: V has strides of its own: v_seq, v_head and v_token. They differ from those of K.",
        ("v_ptr + v_offset", "v_ptr + k_offset"),
        "the first KV head: Every program read KV head 0: add kv_head times the stride of heads.",
        ("kv_head * k_head + ", ""),
        ("kv_head * v_head + ", ""),
        "slots of one sequence: All sequences stored in the same slots: sequence b has the slots from b · num_heads · "
        "num_splits on.",
        (_SLOT, "slot = head * num_splits + split"),
        "splits before heads: m is [B, H, num_splits]: the splits of a query head are neighbours.",
        (_SLOT, "slot = (seq * num_splits + split) * num_heads + head"),
        "one slot for all splits: All splits of a query head stored in the same slot: each split needs its own.",
        (_SLOT, "slot = seq * num_heads + head"),
    ],
    "this is half of Flash-Decoding. You wrote the other half, the merge, above.",
)

EXERCISES = [SPLIT_DECODE_KERNEL]
