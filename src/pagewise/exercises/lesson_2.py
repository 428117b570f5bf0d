"""Exercises of lesson 2: the loop that generates, its tokens, a batched decode step, and the memory of a cache."""

from collections.abc import Callable

import torch
from torch import Tensor

from pagewise.exercises.exercise import Case
from pagewise.exercises.python import call, python_exercise
from pagewise.naive_attention import attention


def generate_cached(model: Callable, attend: object, tokens: Tensor, num_new: int) -> Tensor:
    """Return the tokens [1, T] of a prompt, followed by `num_new` more, each the likeliest after those before it.

    logits = model(new, positions, attend) computes n new tokens. `new` and `positions` are int64 [1, n], and the first
    token of a text has position 0. logits[0, i] belong to the token after new[0, i]. `attend` keeps the keys and
    values of the new tokens, so that no token needs to be computed twice.
    """
    start = 0
    for _ in range(num_new):
        positions = torch.arange(start, tokens.shape[1], device=tokens.device)[None]
        logits = model(tokens[:, start:], positions, attend)
        start = tokens.shape[1]
        tokens = torch.cat([tokens, logits[:, -1:].argmax(dim=-1)], dim=1)
    return tokens


def _loop(prompt: list[int], num_new: int) -> Case:
    """Return a call with a model of seven tokens, whose choice depends on token, position and length of the cache."""

    def run(theirs: Callable) -> object:
        calls, cache = [], []

        def model(new: Tensor, positions: Tensor, attend: list) -> Tensor:
            calls.append([new[0].tolist(), positions[0].tolist()])
            logits = torch.zeros(1, new.shape[1], 7)
            for i, (token, position) in enumerate(zip(*calls[-1], strict=True)):
                attend.append(token)
                logits[0, i, (3 * token + 2 * position + len(attend)) % 7] = 1.0
            return logits

        tokens = theirs(model, cache, torch.tensor([prompt]), num_new)
        return {"calls (tokens, positions)": calls, "result": tokens}

    return Case(f"prompt {prompt}, num_new {num_new}", run)


GENERATE_CACHED = python_exercise(
    generate_cached,
    [_loop([5], 1), _loop([5, 2], 1), _loop([5, 2], 2), _loop([3, 1, 4], 4)],
    [
        "nothing yet: The function does nothing yet. Begin with one call that computes the whole prompt, at positions "
        "0 to T − 1. The last row of its logits chooses the first new token.",
        ("    start = 0", "    return None\n    start = 0"),
        "everything again: Every call computes the whole text. After the first call, the cache holds the prompt, so "
        "the next call needs the newest token alone.",
        ("        start = tokens.shape[1]\n", ""),
        "no prefill: Your first call computes one token. The cache is empty at that time, so the first call must "
        "compute the whole prompt.",
        ("    start = 0", "    start = tokens.shape[1] - 1"),
        "positions from 0: The positions of each call begin at 0. The cache holds earlier tokens, so a new token "
        "continues after them.",
        ("torch.arange(start, tokens.shape[1], device", "torch.arange(tokens.shape[1] - start, device"),
        "logits of the first token: Your new token follows the first token of the call. The newest token is the last "
        "of the call, so take the last row of the logits.",
        ("logits[:, -1:]", "logits[:, :1]"),
        "nothing new: Your second call computes no token. The newest token is chosen after the call that you counted: "
        "it is not in the cache yet.",
        ("        start = tokens.shape[1]\n", ""),
        ("    return tokens", "        start = tokens.shape[1]\n    return tokens"),
        "without the prompt: The calls are right, and the result lacks the prompt. Return all tokens.",
        ("    return tokens", "    return tokens[:, -num_new:]"),
    ],
    "the prompt is computed once, and then every call computes one token.",
    imports="from collections.abc import Callable\n\nimport torch\nfrom torch import Tensor",
)


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
_LLAMA_3_8B = (16_060_522_496, 32, 32, 8, 128, 2)

OUTGROWN_AT = python_exercise(
    outgrown_at,
    [
        call(**dict(zip(_SIZES, sizes, strict=True)))
        for sizes in [(64, 1, 1, 1, 4, 4), (70, 1, 1, 1, 4, 4), (1000, 2, 4, 2, 8, 2), _LLAMA_2_7B, _LLAMA_3_8B]
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
    f"the cache of Llama-2-7B outgrows the weights at {outgrown_at(*_LLAMA_2_7B):,} tokens, the cache of Llama-3-8B at "
    f"{outgrown_at(*_LLAMA_3_8B):,}, because four query heads share a KV head.",
)


def sequences_that_fit(memory: int, weight_bytes: int, bytes_per_token: int, length: int) -> int:
    """Return how many sequences of `length` tokens fit into the `memory` bytes of a GPU.

    The weights take `weight_bytes` bytes of the memory. Each token of a sequence keeps `bytes_per_token` bytes. If the
    weights do not fit, no sequence fits.
    """
    left = max(0, memory - weight_bytes)
    return left // (length * bytes_per_token)


_CARD = ("memory", "weight_bytes", "bytes_per_token", "length")
_LLAMA_13B = (81_920 * 2**20, 26_031_728_640, 819_200, 2048)  # an A100 of "80 GB" reports 81,920 MiB

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


def most_users(memory: int, bandwidth: float, weight_bytes: int, sequence_bytes: int, seconds: float) -> int:
    """Return how many users a GPU can serve at a time if none may wait longer than `seconds` for a token.

    A step gives one token to each user. It reads the weights once and the cache of every user, at `bandwidth` bytes
    per second, and takes as long as these reads. Weights and caches must also fit into `memory` bytes.
    """
    fit = (memory - weight_bytes) // sequence_bytes
    quick = (seconds * bandwidth - weight_bytes) // sequence_bytes
    return int(max(0, min(fit, quick)))


_GPU = ("memory", "bandwidth", "weight_bytes", "sequence_bytes", "seconds")
_A100, _WEIGHTS, _SEQUENCE = (81_920 * 2**20, 2039e9), 26_031_728_640, 2048 * 819_200

MOST_USERS = python_exercise(
    most_users,
    [
        call(**dict(zip(_GPU, sizes, strict=True)))
        for sizes in [
            (100, 10.0, 20, 10, 100.0),
            (100, 10.0, 20, 10, 5.0),
            (100, 10.0, 20, 10, 1.0),
            (100, 8.0, 30, 20, 9.0),
            (*_A100, _WEIGHTS, _SEQUENCE, 0.03),
            (*_A100, _WEIGHTS, _SEQUENCE, 0.1),
        ]
    ],
    [
        "nothing yet: The function returns nothing yet. Begin with the users that fit into the memory. Then compute "
        "how many bytes a step can read in `seconds`.",
        ("    fit =", "    return None\n    fit ="),
        "memory alone: Your users fit into the memory, but they wait too long. A step reads the weights and every "
        "cache: find out how many caches it can read in `seconds`.",
        ("min(fit, quick)", "fit"),
        "time alone: Your users get their tokens in time, but their caches do not fit into the memory beside the "
        "weights.",
        ("min(fit, quick)", "quick"),
        "the larger limit: A GPU must keep both limits. Take the smaller number of users.",
        ("min(fit, quick)", "max(fit, quick)"),
        "free weights: Your step reads the caches alone. It reads the weights, too.",
        ("(seconds * bandwidth - weight_bytes)", "(seconds * bandwidth)"),
        "weights for each: Your step reads the weights once for each user. One read serves all of them.",
        (
            "(seconds * bandwidth - weight_bytes) // sequence_bytes",
            "seconds * bandwidth // (weight_bytes + sequence_bytes)",
        ),
        "below zero: Your number of users is negative. If the weights alone take longer than `seconds`, no user can be "
        "served.",
        ("max(0, min(fit, quick))", "min(fit, quick)"),
        "rounded up: Your last user does not fit completely. Round down.",
        ("(memory - weight_bytes) // sequence_bytes", "-(-(memory - weight_bytes) // sequence_bytes)"),
        (
            "(seconds * bandwidth - weight_bytes) // sequence_bytes",
            "-(-(seconds * bandwidth - weight_bytes) // sequence_bytes)",
        ),
    ],
    f"an A100 serves {most_users(*_A100, _WEIGHTS, _SEQUENCE, 0.03)} users of LLaMA-13B if a token may take 30 ms, and "
    f"{most_users(*_A100, _WEIGHTS, _SEQUENCE, 0.1)} if it may take 100 ms: then the memory is the limit.",
)

EXERCISES = [GENERATE_CACHED, TOKENS_COMPUTED, OUTGROWN_AT, DECODE_BATCH, SEQUENCES_THAT_FIT, MOST_USERS]
