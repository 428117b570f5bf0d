"""Exercises of lesson 2: tokens computed, a batched decode step, and the memory and positions of a cache."""

from collections.abc import Callable

import torch
from torch import Tensor

from pagewise.exercises.exercise import Case
from pagewise.exercises.python import call, python_exercise
from pagewise.naive_attention import attention


def tokens_computed(prompt_len: int, num_new: int, cached: bool) -> int:
    """Return how many tokens the model computes, over all calls, to write `num_new` ≥ 1 tokens after a prompt.

    Each call gives one new token. Without a cache, a call computes every token known so far. With a cache, a call
    computes only the tokens that no earlier call has computed.
    """
    if cached:
        return prompt_len + num_new - 1
    return num_new * prompt_len + num_new * (num_new - 1) // 2


TOKENS_COMPUTED = python_exercise(
    tokens_computed,
    [call(*sizes, cached) for sizes in ((1, 1), (3, 1), (3, 2), (6, 9)) for cached in (True, False)],
    [
        "nothing yet: The function returns nothing yet. Write down the tokens of the first three calls after a prompt "
        "of 6 tokens: 6, 7, 8 without a cache and 6, 1, 1 with a cache.",
        ("    if cached:", "    return None\n    if cached:"),
        "last token computed: The count with a cache is one too high. Look at the end: no call reads the last new "
        "token.",
        ("return prompt_len + num_new - 1", "return prompt_len + num_new"),
        "one call too many: Your sum has num_new + 1 calls. The last call computes prompt_len + num_new − 1 tokens, "
        "because no call computes the last new token.",
        (
            "num_new * prompt_len + num_new * (num_new - 1) // 2",
            "(num_new + 1) * prompt_len + (num_new + 1) * num_new // 2",
        ),
        "no prompt: The prompt is missing from the count with a cache. Look at the first call: it computes the whole "
        "prompt.",
        ("return prompt_len + num_new - 1", "return num_new"),
        "calls of one length: Without a cache, the calls do not all have the same length. Look at the second call: it "
        "computes the prompt and one new token.",
        (" + num_new * (num_new - 1) // 2", ""),
        "own output: Without a cache, each of your calls is one token too long. Look at the first call: it computes "
        "the prompt alone, and its output comes later.",
        ("(num_new - 1) // 2", "(num_new + 1) // 2"),
        "last call only: Your count without a cache covers the last call alone. Add up all the calls before it.",
        ("return num_new * prompt_len + num_new * (num_new - 1) // 2", "return prompt_len + num_new - 1"),
    ],
    "without a cache the count grows with the square of the text, with a cache it grows with its length.",
)


def decode_batch(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: list[int]) -> Tensor:
    """Do one decode step, of one head, for B sequences of different lengths. Return the output [B, D].

    Each sequence brings one token: q, k and v are [B, D]. The caches [B, max_len, D] hold lengths[b] old tokens of
    sequence b. Write its new k and v after its old tokens. Its query sees these tokens, the new token included.
    Later rows may hold any value, even NaN. `attention` expects and returns [B, H, T, D].
    """
    out = torch.empty_like(q)
    for b, length in enumerate(lengths):
        k_cache[b, length], v_cache[b, length] = k[b], v[b]
        keys, values = (cache[None, None, b, : length + 1] for cache in (k_cache, v_cache))
        out[b] = attention(q[None, None, b : b + 1], keys, values)[0, 0, 0]
    return out


def _step(lengths: list[int], max_len: int) -> Case:
    """Return a call on caches of `max_len` rows. The rows that nothing was written to are NaN."""
    B = len(lengths)
    generator = torch.Generator().manual_seed(10 * sum(lengths) + B)
    new = torch.randint(-2, 3, (3, B, 2), generator=generator).float()
    old = torch.randint(-2, 3, (2, B, max_len, 2), generator=generator).float()
    empty = torch.arange(max_len) >= torch.tensor(lengths)[:, None]
    old = old.masked_fill(empty[..., None], torch.nan)

    def run(theirs: Callable) -> object:
        caches = old.clone()
        out = theirs(*new.clone(), *caches, list(lengths))
        return {"out": out, "k_cache": caches[0], "v_cache": caches[1]}

    return Case(f"lengths {lengths}, caches of {max_len} rows", run)


DECODE_BATCH = python_exercise(
    decode_batch,
    [_step([0], 2), _step([1], 3), _step([1, 1], 3), _step([2, 0], 3), _step([0, 3, 1], 5)],
    [
        "nothing yet: The function does nothing yet. Begin with a loop over the sequences: sequence b writes its new k "
        "and v into row lengths[b] of its caches.",
        ("    out = torch", "    return None\n    out = torch"),
        "no scale: Your scores are q · k. Divide them by √D, as `attention` does.",
        ("b : b + 1], keys, values)", "b : b + 1], keys, values, scale=1.0)"),
        "cache not written: The output is right, but the caches are as before, so the next step will not find these "
        "tokens. Assign to a row of `k_cache` and `v_cache` instead of making new tensors.",
        ("    out = torch", "    k_cache, v_cache = k_cache.clone(), v_cache.clone()\n    out = torch"),
        "old tokens only: The new token is missing among the keys. Look at the end of the slice: it must include row "
        "lengths[b], where the new token is now.",
        ("b, : length + 1]", "b, :length]"),
        "whole buffer: Rows without a token took part in attention. Look at the slice of the keys: it must end after "
        "lengths[b] + 1 rows.",
        ("b, : length + 1]", "b]"),
        "longest length for all: All sequences got the longest length. Look at the row that you write to and at the "
        "number of keys: both depend on the sequence.",
        ("enumerate(lengths)", "enumerate([max(lengths)] * len(lengths))"),
        "written over the last token: The new token overwrote an old token. Look at the row that you write to: the old "
        "tokens fill rows 0 to lengths[b] − 1, so row lengths[b] is free.",
        ("k_cache[b, length], v_cache[b, length]", "k_cache[b, length - 1], v_cache[b, length - 1]"),
        ("b, : length + 1]", "b, : max(length, 1)]"),
        "values not kept: Only the keys are kept. Look at `v_cache`: the new value needs its row, too.",
        ("k_cache[b, length], v_cache[b, length] = k[b], v[b]", "k_cache[b, length] = k[b]"),
    ],
    "every sequence continues at its own length, and no query reads a row without a token.",
    imports="import torch\nfrom torch import Tensor\n\nfrom pagewise.naive_attention import attention",
)


def outgrown_at(
    weight_bytes: int, num_layers: int, num_heads: int, num_kv_heads: int, head_size: int, itemsize: int
) -> int:
    """Return the smallest number of tokens of one sequence whose KV cache takes at least `weight_bytes` bytes.

    Every layer has a cache. `num_heads` query heads share `num_kv_heads` KV heads. A number takes `itemsize` bytes.
    """
    bytes_per_token = 2 * num_layers * num_kv_heads * head_size * itemsize
    return -(-weight_bytes // bytes_per_token)


_SIZES = ("weight_bytes", "num_layers", "num_heads", "num_kv_heads", "head_size", "itemsize")
_LLAMA_2_7B = (13_476_831_232, 32, 32, 32, 128, 2)
_MISTRAL_7B = (14_483_464_192, 32, 32, 8, 128, 2)

OUTGROWN_AT = python_exercise(
    outgrown_at,
    [
        call(**dict(zip(_SIZES, sizes, strict=True)))
        for sizes in [(64, 1, 1, 1, 4, 4), (70, 1, 1, 1, 4, 4), (1000, 2, 4, 2, 8, 2), _LLAMA_2_7B, _MISTRAL_7B]
    ],
    [
        "nothing yet: The function returns nothing yet. Begin with the bytes of one token: count the layers, the KV "
        "heads, the head size, and keys and values.",
        ("    bytes_per_token =", "    return None\n    bytes_per_token ="),
        "keys only: Your tokens have half of their bytes. Look at the number of tensors in each layer: the cache keeps "
        "keys *and* values.",
        ("2 * ", ""),
        "numbers for bytes: You count numbers, but `weight_bytes` counts bytes. Look at `itemsize`, the bytes of a "
        "number.",
        (" * itemsize", ""),
        "one layer: Your cache covers one layer. Look at `num_layers`: every layer keeps keys and values of its own.",
        (" * num_layers", ""),
        "query heads: Your cache has too many heads. Look at `num_kv_heads`: query heads that share a KV head read the "
        "same keys and values.",
        ("* num_kv_heads", "* num_heads"),
        "rounded down: The cache is still smaller than the weights at your number of tokens. Look at the division: it "
        "must round up.",
        ("-(-weight_bytes // bytes_per_token)", "weight_bytes // bytes_per_token"),
        "a fraction: A number of tokens is a whole number. Look at the division: it must round up.",
        ("-(-weight_bytes // bytes_per_token)", "weight_bytes / bytes_per_token"),
    ],
    f"the cache of Llama-2-7B outgrows the weights at {outgrown_at(*_LLAMA_2_7B):,} tokens, the cache of Mistral-7B at "
    f"{outgrown_at(*_MISTRAL_7B):,}, because four query heads share a KV head.",
)


def decode_positions(num_cached: list[int], T: int) -> Tensor:
    """Return the positions of the T new tokens of each sequence of a batch: [B, T] int64.

    The cache holds num_cached[b] tokens of sequence b already. The first token of a text has position 0.
    """
    return torch.tensor(num_cached)[:, None] + torch.arange(T)


DECODE_POSITIONS = python_exercise(
    decode_positions,
    [call([0], 3), call([3], 1), call([2, 2], 2), call([4, 1], 1), call([5, 2, 0], 2)],
    [
        "nothing yet: The function returns nothing yet. Begin with one sequence: after 3 cached tokens, 2 new tokens "
        "have positions 3 and 4.",
        ("    return torch", "    return None\n    return torch"),
        "from 0: Your new tokens begin a new text, so RoPE turns their queries and keys by the wrong angles. Look at "
        "the first new token of sequence b: num_cached[b] tokens come before it.",
        ("torch.tensor(num_cached)", "0 * torch.tensor(num_cached)"),
        "one too far: Your positions are one too high. Look at the first token of a text: it has position 0.",
        ("arange(T)", "arange(1, T + 1)"),
        "one for all: All sequences got the positions of the longest sequence. Look at the rows: row b starts at "
        "num_cached[b].",
        ("torch.tensor(num_cached)", "torch.tensor([max(num_cached)] * len(num_cached))"),
        "transposed: Your result is transposed. Look at the shape: it has a row for each sequence and a column for "
        "each new token.",
        ("[:, None] + torch.arange(T)", " + torch.arange(T)[:, None]"),
        "of the text so far: Your result has positions of cached tokens. Look at the number of columns: it is T, "
        "because the step computes the new tokens alone.",
        (
            "torch.tensor(num_cached)[:, None] + torch.arange(T)",
            "torch.arange(max(num_cached) + T).expand(len(num_cached), -1)",
        ),
        "floats: Your positions are fractions. Look at the dtype: positions are whole numbers, int64.",
        ("arange(T)", "arange(float(T))"),
    ],
    "every sequence continues where its cached tokens end.",
    imports="import torch\nfrom torch import Tensor",
)


def sequences_that_fit(memory: int, weight_bytes: int, bytes_per_token: int, length: int) -> int:
    """Return how many sequences of `length` tokens fit into the `memory` bytes of a GPU.

    The weights take `weight_bytes` bytes of the memory. Each token of a sequence keeps `bytes_per_token` bytes. If the
    weights do not fit, no sequence fits.
    """
    left = max(0, memory - weight_bytes)
    return left // (length * bytes_per_token)


_CARD = ("memory", "weight_bytes", "bytes_per_token", "length")
_LLAMA_13B = (80_000_000_000, 26_031_728_640, 819_200, 2048)

SEQUENCES_THAT_FIT = python_exercise(
    sequences_that_fit,
    [
        call(**dict(zip(_CARD, sizes, strict=True)))
        for sizes in [(100, 20, 2, 4), (39, 10, 2, 5), (50, 50, 2, 4), (40, 70, 2, 5), _LLAMA_13B]
    ],
    [
        "nothing yet: The function returns nothing yet. Begin with the bytes that the weights leave, and with the "
        "bytes of one sequence.",
        ("    left =", "    return None\n    left ="),
        "no weights: Your sequences fill the whole memory. Look at the bytes that are left: the weights need their "
        "part first.",
        ("memory - weight_bytes", "memory"),
        "weights for each: Each of your sequences has weights of its own. Look at the divisor: all sequences share the "
        "weights.",
        ("left // (length * bytes_per_token)", "memory // (weight_bytes + length * bytes_per_token)"),
        "tokens: You count tokens, not sequences. Look at the divisor: a sequence has `length` tokens.",
        ("(length * bytes_per_token)", "bytes_per_token"),
        "numbers for bytes: A token of yours takes one byte. Look at the divisor: a token keeps `bytes_per_token` "
        "bytes.",
        ("(length * bytes_per_token)", "length"),
        "rounded up: Your last sequence does not fit completely. Look at the division: it must round down.",
        ("left // (length * bytes_per_token)", "-(-left // (length * bytes_per_token))"),
        "a fraction: A number of sequences is a whole number. Look at the division: it must round down.",
        ("left // (", "left / ("),
        "below zero: Your number of sequences is negative. Look at the bytes that are left: there are none if the "
        "weights take more than the memory.",
        ("max(0, memory - weight_bytes)", "memory - weight_bytes"),
    ],
    f"{sequences_that_fit(*_LLAMA_13B)} sequences of LLaMA-13B fit beside the weights.",
)

EXERCISES = [TOKENS_COMPUTED, DECODE_BATCH, OUTGROWN_AT, DECODE_POSITIONS, SEQUENCES_THAT_FIT]
