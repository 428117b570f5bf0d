"""From logits to tokens: bias, penalties, temperature, top-k, top-p, min-p, seeds (lesson 9).

Bias and penalties have vLLM's order. The steps after them have that of transformers:

    logit += logit_bias                                          then -inf for end tokens before min_tokens
    logit /= repetition_penalty  (logit · penalty if negative)   of tokens that the sequence has, its prompt's included
    logit -= frequency_penalty · count + presence_penalty        of tokens that it generated `count` > 0 times
    logit /= temperature                                         below 1e-5: the likeliest token, nothing is drawn
    only the top_k largest stay                                  of equal logits those of the smaller token ids
    only the largest stay that reach the probability top_p together, the one that crosses it included
    only tokens stay that have at least min_p times the probability of the likeliest one
    token = the first whose cumulative probability exceeds u

u is a hash of (seed, choice, position). A request's tokens therefore depend on nothing else in the batch, and they are
the same after a preemption. Logits in bfloat16 are often equal, so the order of equal ones must not depend on the batch
either. Keskar et al. 2019 (repetition penalty); OpenAI's API (presence and frequency penalty); Holtzman et al. 2020
(top-p); Nguyen et al. 2024 (min-p).
"""

import ctypes
import functools
import hashlib
import struct
from array import array
from collections.abc import Iterable
from math import inf, isfinite, nan
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from pagewise.engine.request import Request, Sequence
from pagewise.engine.sampling_params import Pick
from pagewise.tools.cpp import CTensor, functions

ROWS = 32  # of a prompt are scored at a time, because their copies in float32 and int64 are large
IN_CACHE = 2**17  # logits in float32 that a core's cache holds beside their weights
Limits = tuple[float, float, float, float, float]  # `SamplingParams.limits`, and the number u


class Row(NamedTuple):
    """A token to draw: the row of the logits, and everything that the draw depends on."""

    logits: int
    request: Request
    sequence: Sequence
    drafts: tuple[int, ...] = ()  # guesses that follow the tokens of the sequence


def sample(logits: Float[Tensor, "n vocab"], rows: list[Row]) -> list[Pick | None]:
    """Return a token for each row, or None where the row's logits hold NaN or +inf, or nothing above -inf."""
    how = []
    for row in rows:
        request, sequence = row.request, row.sequence
        position = len(sequence.tokens) + len(row.drafts)
        u = 0.0 if request.sampling.greedy else uniform(request.seed, sequence.index, position)
        how.append((*request.sampling.limits, u))
    found = _in_cpp(logits, rows, how)
    if found is None:  # a CPU gets few rows at a time, so that their logits stay in its cache between operations
        found, size = [], max(1, IN_CACHE // logits.shape[1] if logits.device.type == "cpu" else len(rows))
        for i in range(0, len(rows), size):
            found += _in_torch(logits, rows[i : i + size], how[i : i + size])
    picks = []
    for row, (token, logprob) in zip(rows, found, strict=True):
        pick, number = Pick(token, logprob) if isfinite(logprob) else None, row.request.sampling.logprobs
        if pick is not None and number is not None:
            pick = pick._replace(likeliest=scored(logits[row.logits, None], [token], number)[0])
        picks.append(pick)
    return picks


@functools.cache
def library() -> dict:
    """Return the compiled kernels of sampling.cpp by name and dtype, or {} where they cannot run."""
    address, sizes = ctypes.c_void_p, [ctypes.c_int64] * 2
    return functions("sampling.cpp", draw=[CTensor, CTensor, *[address] * 2, *sizes, *[address] * 2, ctypes.c_int])


def _in_cpp(logits: Float[Tensor, "n vocab"], rows: list[Row], how: list[Limits]) -> list[tuple[int, float]] | None:
    """Return (token, log p) of each row. None: not on a CPU, or no kernel runs here."""
    kernel = library().get(("draw", logits.dtype)) if logits.device.type == "cpu" else None
    if kernel is None or logits.stride(1) != 1:
        return None
    changing, places = [], []
    for row in rows:
        places.append((row.logits, len(changing) if row.request.sampling.changes else -1))
        if row.request.sampling.changes:
            changing.append(row)
    changed = adjusted(logits[[row.logits for row in changing]].float(), changing) if changing else logits
    numbers, places = torch.tensor(how, dtype=torch.float64, device="cpu"), torch.tensor(places, device="cpu")
    tokens = torch.empty(len(rows), dtype=torch.int64, device="cpu")
    logprobs = torch.empty(len(rows), dtype=torch.float32, device="cpu")
    tensors = CTensor(logits.data_ptr(), logits.stride()), CTensor(changed.data_ptr(), changed.stride())
    given = *tensors, places.data_ptr(), numbers.data_ptr(), len(rows), logits.shape[1]
    kernel(*given, tokens.data_ptr(), logprobs.data_ptr(), torch.get_num_threads())
    return list(zip(tokens.tolist(), logprobs.tolist(), strict=True))


def _in_torch(logits: Float[Tensor, "n vocab"], rows: list[Row], how: list[Limits]) -> list[tuple[int, float]]:
    if (wanted := [row.logits for row in rows]) != list(range(len(logits))):
        logits = logits[wanted]
    logits = logits.float()
    sums = logits.logsumexp(dim=-1, keepdim=True)
    scores = adjusted(logits.clone(), rows) if any(row.request.sampling.changes for row in rows) else logits
    best, tokens = scores.max(dim=-1, keepdim=True)
    by_order: dict[tuple[bool, bool], list[int]] = {}  # so that no row sorts more of the vocabulary than it needs
    for i, (temperature, top_k, top_p, *_) in enumerate(how):
        if temperature:
            by_order.setdefault((top_k < inf, top_p < 1), []).append(i)
    for order, drawn in by_order.items():
        if len(drawn) == len(rows):
            tokens = _draw(scores - best, how, any(order))
        else:
            tokens[drawn] = _draw(scores[drawn] - best[drawn], [how[i] for i in drawn], any(order))
    numbers = torch.cat([tokens.double(), logits.gather(1, tokens) - sums, best], dim=1).tolist()  # one wait for a GPU
    return [(int(token), logprob if isfinite(most) else nan) for token, logprob, most in numbers]


def scored(logits: Float[Tensor, "n vocab"], tokens: list[int], number: int) -> list[dict[int, float]]:
    """Return {token: log p} for each row: of its token, and then of the `number` likeliest tokens."""
    found = []
    for start in range(0, len(tokens), ROWS):
        logprobs = logits[start : start + ROWS].float()
        logprobs = logprobs - logprobs.logsumexp(dim=-1, keepdim=True)
        chosen = torch.tensor(tokens[start : start + ROWS], device=logits.device)[:, None]
        top, ids = likeliest(logprobs, min(number, logits.shape[1]))
        ids = torch.cat([chosen, ids], dim=1).tolist()
        top = torch.cat([logprobs.gather(1, chosen), top], dim=1).tolist()
        found += [dict(zip(*row, strict=True)) for row in zip(ids, top, strict=True)]
    return found


def adjusted(logits: Float[Tensor, "n vocab"], rows: list[Row]) -> Float[Tensor, "n vocab"]:
    """Change logits, or log p, by bias, min_tokens and penalties in place, and return them."""
    biases, too_early, penalised = [], [], []
    for i, row in enumerate(rows):
        params, num_new = row.request.sampling, len(row.sequence.tokens) - len(row.request.prompt)
        if params.logit_bias:
            biases += [(i, *pair) for pair in params.logit_bias]
        if num_new + len(row.drafts) < params.min_tokens:
            too_early += [(i, token) for token in row.request.ends]
        if params.penalises:
            penalised.append((i, row))
    if biases:
        i, tokens, amounts = torch.tensor(biases, dtype=torch.float64, device=logits.device).unbind(dim=1)
        i, tokens = i.long(), tokens.long()
        logits.index_put_((i, tokens), logits[i, tokens] + amounts.to(logits.dtype))
    if too_early:
        i, tokens = torch.tensor(too_early, device=logits.device).unbind(dim=1)
        logits.index_put_((i, tokens), torch.tensor(-inf, dtype=logits.dtype, device=logits.device))
    return _penalised(logits, penalised) if penalised else logits


def _penalised(logits: Tensor, rows: list[tuple[int, Row]]) -> Tensor:
    places, changes = [], []
    for i, row in rows:
        params, sequence = row.request.sampling, row.sequence
        if sequence.counts is None:
            with_prompt = params.repetition_penalty != 1
            sequence.counts = TokenCounts(sequence.tokens, len(row.request.prompt), with_prompt=with_prompt)
        ids, times = sequence.counts.after(row.drafts)
        amounts = params.frequency_penalty * times + params.presence_penalty * (times > 0)
        places.append(np.stack([np.full_like(ids, i), ids]))
        changes.append(np.stack([np.full_like(amounts, params.repetition_penalty), amounts]).astype(np.float32))
    i, tokens = torch.from_numpy(np.concatenate(places, axis=1)).to(logits.device)
    factors, amounts = torch.from_numpy(np.concatenate(changes, axis=1)).to(logits.device)
    scores = logits[i, tokens]
    scores = torch.where(scores > 0, scores / factors, scores * factors) - amounts
    return logits.index_put_((i, tokens), scores)


def likeliest(scores: Float[Tensor, "n vocab"], k: int) -> tuple[Float[Tensor, "n k"], Int64[Tensor, "n k"]]:
    """Return the k largest of scores that are not positive, in falling order, and their ids. Smaller ids come first.

    `topk` alone orders equal scores in another way for each k. So each score becomes an integer that no other score is:
    the bits of 0 - score as float32, which grow with it, and then its id. A stable sort gives the same order.
    """
    if k == scores.shape[1]:
        return scores.sort(dim=-1, descending=True, stable=True)
    ids = torch.arange(scores.shape[1], device=scores.device)
    keys = (0.0 - scores).view(torch.int32).long() << 32 | ids
    ids = keys.topk(k, largest=False).values & 0xFFFFFFFF
    return scores.gather(1, ids), ids


def _draw(scores: Float[Tensor, "n vocab"], how: list[Limits], ordered: bool) -> Int64[Tensor, "n 1"]:
    """Draw a token for each row within top_k, top_p and min_p. The largest score of each row is 0."""
    device, (_, top_ks, top_ps, min_ps, _) = scores.device, zip(*how, strict=True)
    most = int(min(max(top_ks), scores.shape[1]))
    numbers = torch.tensor(how, dtype=torch.float64, device=device)
    temperature, top_k, top_p, min_p, u = numbers.split(1, dim=1)
    scores = scores / temperature.float()
    if ordered:
        scores, ids = likeliest(scores, most)
    weights = scores.double().exp()  # the likeliest token's is 1
    if min(top_ks) < scores.shape[1]:
        weights = weights.masked_fill(torch.arange(scores.shape[1], device=device) >= top_k, 0.0)
    if min(top_ps) < 1:  # sums from left to right, so that zeros behind them change nothing
        cumulative = weights.cumsum(dim=-1)
        weights = weights.masked_fill(cumulative - weights >= top_p * cumulative[:, -1:], 0.0)
    if any(min_ps):
        weights = weights.masked_fill(weights < min_p, 0.0)
    cumulative = weights.cumsum(dim=-1)
    drawn = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True)
    drawn = drawn.clamp(max=scores.shape[1] - 1)  # only where the logits are not finite
    return ids.gather(1, drawn) if ordered else drawn


def uniform(seed: int, choice: int, position: int) -> float:
    """Return a number in [0, 1): the first 53 bits of a hash of the three numbers."""
    digest = hashlib.blake2b(struct.pack("<qqq", seed, choice, position), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


class TokenCounts:
    """The different tokens of a list that grows at its end, and how often each occurs behind the prompt.

    A call counts only the tokens that are new since the last call. Then it copies two arrays of C numbers. The first
    `num_prompt` tokens count 0. Those that only the prompt has are listed if `with_prompt`.
    """

    def __init__(self, tokens: list[int], num_prompt: int, *, with_prompt: bool) -> None:
        self._tokens, self._num_prompt, self._seen = tokens, num_prompt, 0 if with_prompt else num_prompt
        self._place: dict[int, int] = {}  # token → its place in the arrays
        self._ids, self._counts = array("q"), array("q")

    def after(self, drafts: Iterable[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids, counts), both int64, of the list as if `drafts` followed. The list is as it was."""
        for i in range(self._seen, len(self._tokens)):
            token = self._tokens[i]
            place = self._place.setdefault(token, len(self._ids))
            if place == len(self._ids):
                self._ids.append(token)
                self._counts.append(0)
            self._counts[place] += i >= self._num_prompt
        self._seen = len(self._tokens)
        ids, counts = np.array(self._ids), np.array(self._counts)
        for token in drafts:
            found = np.flatnonzero(ids == token)
            if len(found):
                counts[found] += 1
            else:
                ids, counts = np.append(ids, token), np.append(counts, 1)
        return ids, counts
