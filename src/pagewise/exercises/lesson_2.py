"""Exercises of lesson 2: append and attend, the size of a cache, positions of a decode step."""

from collections.abc import Callable

import torch
from torch import Tensor

from pagewise.exercises.exercise import Case
from pagewise.exercises.python import call, python_exercise
from pagewise.naive_attention import attention


def append_and_attend(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, length: int) -> Tensor:
    """One step with a cache: T new tokens of one head, q, k, v [T, D]; the caches [max_len, D] hold `length` tokens.

    Write k and v into the caches after the `length` old tokens. Return the causal attention of the new queries over all
    tokens so far, the new ones too: out [T, D]. The later rows of the caches hold anything, NaN too.
    `attention` takes and gives [B, H, T, D]: q[None, None] has that shape.
    """
    stop = length + len(q)
    k_cache[length:stop], v_cache[length:stop] = k, v
    seen = k_cache[None, None, :stop], v_cache[None, None, :stop]
    return attention(q[None, None], *seen, causal=True)[0, 0]


def _step(length: int, T: int, max_len: int) -> Case:
    """Return a call on caches of `max_len` rows. The rows that nothing was written to are NaN."""
    generator = torch.Generator().manual_seed(10 * length + T)
    tokens = torch.randint(-2, 3, (3, length + T, 2), generator=generator).float()

    def run(theirs: Callable) -> object:
        caches = torch.full((2, max_len, 2), torch.nan)
        caches[:, :length] = tokens[1:, :length]
        out = theirs(*tokens[:, length:].clone(), *caches, length)
        return {"out": out, "k_cache": caches[0], "v_cache": caches[1]}

    return Case(f"{length} tokens in caches of {max_len} rows, {T} new", run)


APPEND_AND_ATTEND = python_exercise(
    append_and_attend,
    [_step(0, 1, 2), _step(1, 1, 2), _step(2, 1, 4), _step(0, 2, 2), _step(2, 3, 6)],
    [
        "cache not written: The output is right and the cache is as before: the next step will not find these tokens. "
        "`torch.cat` makes a new tensor; assign to rows of the cache.",
        ("    k_cache[length", "    k_cache, v_cache = k_cache.clone(), v_cache.clone()\n    k_cache[length"),
        "old tokens only: A token looks at itself too: write k and v first, then attend over length + T rows.",
        (", :stop]", ", :length]"),
        ("causal=True", "causal=False"),
        "whole buffer: Rows that nobody has written took part: attend over the first length + T rows of the caches, "
        "not all.",
        (", :stop]", "]"),
        "written over the first rows: The new tokens overwrote old ones: they belong into rows length … length + T − "
        "1.",
        ("[length:stop]", "[: len(q)]"),
        "not causal: With several new tokens at once the earlier ones see the later ones: `causal=True`.",
        ("causal=True", "causal=False"),
        "one token at a time: Only the first of T new tokens was written: a prompt brings many at once.",
        ("length + len(q)", "length + 1"),
        ("= k, v", "= k[:1], v[:1]"),
    ],
    "the cache has what the next step needs, and nobody read what nobody wrote.",
    imports="from torch import Tensor\n\nfrom pagewise.naive_attention import attention",
)


def cache_bytes(
    num_tokens: int, num_layers: int, num_heads: int, num_kv_heads: int, head_size: int, itemsize: int
) -> int:
    """Bytes of the KV cache of `num_tokens` tokens, in all layers.

    A number has `itemsize` bytes; `num_heads` query heads share `num_kv_heads` KV heads.
    """
    return 2 * num_tokens * num_layers * num_kv_heads * head_size * itemsize


_SIZES = ("num_tokens", "num_layers", "num_heads", "num_kv_heads", "head_size", "itemsize")

CACHE_BYTES = python_exercise(
    cache_bytes,
    [
        call(**dict(zip(_SIZES, sizes, strict=True)))
        for sizes in [(1, 1, 1, 1, 4, 4), (3, 2, 4, 4, 8, 2), (2048, 32, 32, 8, 128, 2)]
    ],
    [
        "one of two: Half of it: keys *and* values are kept.",
        ("2 * ", ""),
        "one layer: That is one layer: every layer has keys and values of its own.",
        (" * num_layers", ""),
        "elements: That counts numbers, not bytes: each has `itemsize` of them.",
        (" * itemsize", ""),
        "query heads: Only KV heads are kept: query heads that share one read the same keys and values.",
        ("* num_kv_heads", "* num_heads"),
        "all heads: Heads are counted twice: only the KV heads are kept, queries are not.",
        ("* num_kv_heads", "* num_heads * num_kv_heads"),
        "gigabytes: Asked are bytes, a whole number: 1 GB is 10⁹ of them.",
        ("* itemsize", "* itemsize / 1e9"),
    ],
    "2 · tokens · layers · KV heads · head size · bytes of a number.",
)


def decode_positions(num_cached: list[int], T: int) -> Tensor:
    """Positions of the T new tokens of each sequence of a batch: [B, T] int64.

    num_cached[b] tokens of sequence b are in the cache already. The first token of a text has position 0.
    """
    return torch.tensor(num_cached)[:, None] + torch.arange(T)


DECODE_POSITIONS = python_exercise(
    decode_positions,
    [call([0], 3), call([3], 1), call([2, 2], 2), call([4, 1], 1), call([5, 2, 0], 2)],
    [
        "from 0: New tokens do not begin a new text: num_cached[b] stand before them. With position 0 at every step, "
        "RoPE turns their queries and keys by the wrong angle.",
        ("torch.tensor(num_cached)", "0 * torch.tensor(num_cached)"),
        "one too far: Positions count from 0: with n tokens before it, a token has position n.",
        ("arange(T)", "arange(1, T + 1)"),
        "one for all: All sequences got the position of the longest: each continues from its own length.",
        ("torch.tensor(num_cached)", "torch.tensor([max(num_cached)] * len(num_cached))"),
        "transposed: Transposed: a row for each sequence, a column for each new token.",
        ("[:, None] + torch.arange(T)", " + torch.arange(T)[:, None]"),
        "of the text so far: Positions of the new tokens only: the cached ones are not computed again.",
        (
            "torch.tensor(num_cached)[:, None] + torch.arange(T)",
            "torch.arange(max(num_cached) + T).expand(len(num_cached), -1)",
        ),
        "floats: Positions are whole numbers: int64.",
        ("arange(T)", "arange(float(T))"),
    ],
    "every sequence goes on where it was.",
    imports="import torch\nfrom torch import Tensor",
)

EXERCISES = [APPEND_AND_ATTEND, CACHE_BYTES, DECODE_POSITIONS]
