"""Exercises of lesson 2: append and attend, the size of a cache, positions of a decode step."""

from collections.abc import Callable

import torch
from torch import Tensor

from pagewise.exercises.exercise import Case, Mistake
from pagewise.exercises.python import call, python_exercise
from pagewise.naive_attention import attention


def append_and_attend(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, length: int) -> Tensor:
    """One step with a cache: T new tokens of one head, q, k, v [T, D]; the caches [max_len, D] hold `length` tokens.

    Write k and v into the caches, behind what is there, and return the attention of the new queries over all tokens so
    far, the new ones too: out [T, D], causal. The rows of the caches behind that hold anything, NaN too.
    `attention` takes and gives [B, H, T, D]: q[None, None] has that shape.
    """
    stop = length + len(q)
    k_cache[length:stop], v_cache[length:stop] = k, v
    seen = k_cache[None, None, :stop], v_cache[None, None, :stop]
    return attention(q[None, None], *seen, causal=True)[0, 0]


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    return attention(q[None, None], k[None, None], v[None, None], causal=causal)[0, 0]


def _step(length: int, T: int, max_len: int) -> Case:
    """A call on caches of `max_len` rows, NaN where nothing was written."""
    generator = torch.Generator().manual_seed(10 * length + T)
    tokens = torch.randint(-2, 3, (3, length + T, 2), generator=generator).float()

    def run(theirs: Callable) -> object:
        caches = torch.full((2, max_len, 2), torch.nan)
        caches[:, :length] = tokens[1:, :length]
        out = theirs(*tokens[:, length:].clone(), *caches, length)
        return {"out": out, "k_cache": caches[0], "v_cache": caches[1]}

    return Case(f"{length} tokens in caches of {max_len} rows, {T} new", run)


def _without_writing(q, k, v, k_cache, v_cache, length):
    return _attend(q, torch.cat([k_cache[:length], k]), torch.cat([v_cache[:length], v]))


def _old_tokens_only(q, k, v, k_cache, v_cache, length):
    out = _attend(q, k_cache[:length], v_cache[:length], causal=False)
    k_cache[length : length + len(q)], v_cache[length : length + len(q)] = k, v
    return out


def _whole_buffer(q, k, v, k_cache, v_cache, length):
    k_cache[length : length + len(q)], v_cache[length : length + len(q)] = k, v
    return _attend(q, k_cache, v_cache)


def _from_the_start(q, k, v, k_cache, v_cache, length):
    k_cache[: len(q)], v_cache[: len(q)] = k, v
    return _attend(q, k_cache[: length + len(q)], v_cache[: length + len(q)])


def _not_causal(q, k, v, k_cache, v_cache, length):
    stop = length + len(q)
    k_cache[length:stop], v_cache[length:stop] = k, v
    return _attend(q, k_cache[:stop], v_cache[:stop], causal=False)


def _one_row(q, k, v, k_cache, v_cache, length):
    k_cache[length], v_cache[length] = k[0], v[0]
    return _attend(q, k_cache[: length + 1], v_cache[: length + 1])


APPEND_AND_ATTEND = python_exercise(
    append_and_attend,
    [_step(0, 1, 2), _step(1, 1, 2), _step(2, 1, 4), _step(0, 2, 2), _step(2, 3, 6)],
    {
        "cache not written": Mistake(
            _without_writing,
            "The output is right and the cache is as before: the next step will not find these tokens. `torch.cat` "
            "makes a new tensor; assign to rows of the cache.",
        ),
        "old tokens only": Mistake(
            _old_tokens_only, "A token looks at itself too: write k and v first, then attend over length + T rows."
        ),
        "whole buffer": Mistake(
            _whole_buffer,
            "Rows that nobody has written took part: attend over the first length + T rows of the caches, not all.",
        ),
        "written over the first rows": Mistake(
            _from_the_start, "The new tokens overwrote old ones: they belong into rows length … length + T − 1."
        ),
        "not causal": Mistake(
            _not_causal, "With several new tokens at once the earlier ones see the later ones: `causal=True`."
        ),
        "one token at a time": Mistake(
            _one_row, "Only the first of T new tokens was written: a prompt brings many at once."
        ),
    },
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


def _sizes(*sizes: int) -> Case:
    return call(**dict(zip(_SIZES, sizes, strict=True)))


CACHE_BYTES = python_exercise(
    cache_bytes,
    [_sizes(1, 1, 1, 1, 4, 4), _sizes(3, 2, 4, 4, 8, 2), _sizes(2048, 32, 32, 8, 128, 2)],
    {
        "one of two": Mistake(lambda *, num_heads, **n: _product(n), "Half of it: keys *and* values are kept."),
        "one layer": Mistake(
            lambda *, num_layers, num_heads, **n: 2 * _product(n),
            "That is one layer: every layer has keys and values of its own.",
        ),
        "elements": Mistake(
            lambda *, itemsize, num_heads, **n: 2 * _product(n),
            "That counts numbers, not bytes: each has `itemsize` of them.",
        ),
        "query heads": Mistake(
            lambda *, num_kv_heads, **n: 2 * _product(n),
            "Only KV heads are kept: query heads that share one read the same keys and values.",
        ),
        "all heads": Mistake(
            lambda **n: 2 * _product(n), "Heads are counted twice: only the KV heads are kept, queries are not."
        ),
        "gigabytes": Mistake(
            lambda *, num_heads, **n: 2 * _product(n) / 1e9, "Asked are bytes, a whole number: 1 GB is 10⁹ of them."
        ),
    },
    "2 · tokens · layers · KV heads · head size · bytes of a number.",
)


def _product(numbers: dict[str, int]) -> int:
    product = 1
    for number in numbers.values():
        product *= number
    return product


def decode_positions(num_cached: list[int], T: int) -> Tensor:
    """Positions of the T new tokens of each sequence of a batch: [B, T] int64.

    num_cached[b] tokens of sequence b are in the cache already. The first token of a text has position 0.
    """
    return torch.tensor(num_cached)[:, None] + torch.arange(T)


DECODE_POSITIONS = python_exercise(
    decode_positions,
    [call([0], 3), call([3], 1), call([2, 2], 2), call([4, 1], 1), call([5, 2, 0], 2)],
    {
        "from 0": Mistake(
            lambda num_cached, T: torch.arange(T).expand(len(num_cached), T),
            "New tokens do not begin a new text: num_cached[b] stand before them. With position 0 at every step, RoPE "
            "turns their queries and keys by the wrong angle.",
        ),
        "one too far": Mistake(
            lambda num_cached, T: torch.tensor(num_cached)[:, None] + torch.arange(1, T + 1),
            "Positions count from 0: with n tokens before it, a token has position n.",
        ),
        "one for all": Mistake(
            lambda num_cached, T: (max(num_cached) + torch.arange(T)).expand(len(num_cached), T),
            "All sequences got the position of the longest: each continues from its own length.",
        ),
        "transposed": Mistake(
            lambda num_cached, T: torch.tensor(num_cached) + torch.arange(T)[:, None],
            "Transposed: a row for each sequence, a column for each new token.",
        ),
        "of the text so far": Mistake(
            lambda num_cached, T: torch.arange(max(num_cached) + T).expand(len(num_cached), -1),
            "Positions of the new tokens only: the cached ones are not computed again.",
        ),
        "floats": Mistake(
            lambda num_cached, T: torch.tensor(num_cached)[:, None] + torch.arange(float(T)),
            "Positions are whole numbers: int64.",
        ),
    },
    "every sequence goes on where it was.",
    imports="import torch\nfrom torch import Tensor",
)

EXERCISES = [APPEND_AND_ATTEND, CACHE_BYTES, DECODE_POSITIONS]
