"""From logits to tokens: penalties, temperature, top-k, top-p, min-p, seeds (lesson 9).

The penalties have vLLM's order. The steps after them have that of transformers:

    logit /= repetition_penalty  (logit · penalty if negative)   of tokens that the sequence has, its prompt's included
    logit -= frequency_penalty · count + presence_penalty        of tokens that it generated `count` > 0 times
    logit /= temperature                                         below 1e-5: the likeliest token, nothing is drawn
    only the top_k largest stay
    only the largest stay that reach the probability top_p together, the one that crosses it included
    only tokens stay that have at least min_p times the probability of the likeliest one
    token = the first whose cumulative probability exceeds u

u is a hash of (seed, choice, position). A request's tokens therefore depend on nothing else in the batch, and they are
the same after a preemption. Keskar et al. 2019 (repetition penalty); OpenAI's API (presence and frequency penalty);
Holtzman et al. 2020 (top-p); Nguyen et al. 2024 (min-p).
"""

import hashlib
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from pagewise.tools.checks import check_count, check_flag, check_number

GREEDY_BELOW = 1e-5  # a smaller temperature is 0
RANGES = {  # the least, the most, and the value that changes nothing
    "temperature": (0.0, 1e6, 1),  # float32 logits divided by a larger temperature would all be equal
    "min_p": (0.0, 1.0, 0),
    "repetition_penalty": (1e-2, 1e2, 1),  # a logit times a penalty outside may leave float32
    "presence_penalty": (-2.0, 2.0, 0),  # OpenAI's range, as that of the next penalty
    "frequency_penalty": (-2.0, 2.0, 0),
}


@dataclass(frozen=True)
class SamplingParams:
    """The parameters of a request's continuation.

    Args:
        max_tokens: the largest number of new tokens.
        temperature: the divisor of the logits, at most 1e6. Below 1e-5 the likeliest token is chosen.
        top_k: draw from this many of the likeliest tokens. The default 0 means all tokens.
        top_p: draw from the fewest likeliest tokens whose probabilities reach this.
        min_p: draw from the tokens that have at least min_p times the probability of the likeliest one. From 0 to 1.
        n: the number of samples of the prompt.
        beam_width: above 1, a beam search keeps this many of the likeliest sequences. It ignores the temperature, and
            needs n = 1. Scores are divided by the number of tokens (length penalty 1).
        stop: strings and token ids that end a sequence, besides the model's end tokens. A single one needs no list.
        seed: 64 bits that decide every draw. By default torch's generator gives a seed when the request is prepared.
        ignore_eos: treat the model's end tokens like other tokens. The text then ends at max_tokens or a stop.
        repetition_penalty: a value above 1 makes tokens that the sequence already has less likely. From 0.01 to 100.
        presence_penalty: subtracted from the logit of each token that the sequence has generated. From -2 to 2.
        frequency_penalty: subtracted once for each time that the sequence has generated the token. From -2 to 2.
        logprobs: report log p (before penalties and temperature) of each chosen token and of this many likeliest ones.

    Raises:
        ValueError, TypeError: a field does not fit, or two contradict each other; the message names them.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    n: int = 1
    beam_width: int = 1
    stop: str | int | Iterable[str | int] = ()
    seed: int | None = None
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, minimum in (("max_tokens", 1), ("n", 1), ("beam_width", 1), ("top_k", 0)):
            check_count(name, getattr(self, name), minimum=minimum)
            object.__setattr__(self, name, int(getattr(self, name)))
        for name, (least, most, neutral) in RANGES.items():
            check_number(name, value := getattr(self, name))
            if not least <= value <= most:
                raise ValueError(f"{name} must be from {least:g} to {most:g}, got {value}: {neutral} changes nothing")
        check_number("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        for name in ("top_p", *RANGES):
            object.__setattr__(self, name, float(getattr(self, name)))
        check_flag("ignore_eos", self.ignore_eos)
        if self.seed is not None:
            check_count("seed", self.seed, minimum=-(2**63))
        if self.logprobs is not None:
            check_count("logprobs", self.logprobs, minimum=0)
        stop = (self.stop,) if isinstance(self.stop, str | int) else self.stop
        if not isinstance(stop, Iterable) or isinstance(stop, Tensor):
            raise TypeError(f"stop must be strings and token ids, got {type(stop).__name__}")
        stop = tuple(stop)
        for item in stop:
            if not isinstance(item, str):
                check_count("stop", item, minimum=0)
            elif not item:
                raise ValueError("stop must not hold an empty string, which would end every text at once")
        object.__setattr__(self, "stop", stop)
        if self.beam_width > 1:
            self._check_beams()
        if self.greedy and self.n > 1:
            raise ValueError(
                f"n = {self.n} samples at temperature {self.temperature:g} are all the same: raise the temperature, "
                f"or n = 1"
            )

    def _check_beams(self) -> None:
        if self.n > 1:
            raise ValueError(
                f"beam_width = {self.beam_width} and n = {self.n} exclude each other: a beam search returns its beams"
            )
        if self.logprobs is not None:
            raise ValueError(f"logprobs = {self.logprobs} with beam_width = {self.beam_width}: beams have scores only")
        for name, neutral in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
            if (value := getattr(self, name)) != neutral:
                raise ValueError(f"{name} = {value} with beam_width = {self.beam_width}: a beam search draws nothing")

    @property
    def width(self) -> int:
        """How many sequences a request may have at once."""
        return max(self.n, self.beam_width)

    def described(self, prompt_tokens: int) -> str:
        """Return the size of a request with a prompt of `prompt_tokens` tokens, for messages."""
        sequences = f"{self.width} sequences of " if self.width > 1 else ""
        return f"{sequences}a prompt of {prompt_tokens} tokens and max_tokens = {self.max_tokens}"

    @property
    def greedy(self) -> bool:
        """Whether each token is the likeliest, and nothing is drawn."""
        return self.temperature < GREEDY_BELOW or self.beam_width > 1

    @property
    def ordered(self) -> bool:
        """Whether a draw needs the likeliest tokens in falling order."""
        return self.top_k > 0 or self.top_p < 1

    @property
    def penalises(self) -> bool:
        """Whether a penalty changes logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(item for item in self.stop if isinstance(item, str))

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return tuple(item for item in self.stop if not isinstance(item, str))

    def chosen_seed(self) -> int:
        """The seed, or one that torch's generator draws; 0 where nothing is drawn with it."""
        if self.greedy and self.seed is None:
            return 0
        return int(torch.randint(2**63 - 1, ())) if self.seed is None else self.seed


class Pick(NamedTuple):
    """A token, and log p under the model's logits as they are."""

    token: int
    logprob: float
    likeliest: dict[int, float] | None = None  # if requested: {token: log p}, the chosen token first


class Row(NamedTuple):
    """A token to draw: the row of the logits, and everything that the draw depends on."""

    logits: int
    sampling: SamplingParams
    tokens: list[int]  # all tokens so far, with the prompt
    seed: int
    choice: int
    num_new: int = 0  # tokens after the prompt


def sample(logits: Float[Tensor, "n vocab"], rows: Sequence[Row]) -> list[Pick | None]:
    """Return a token for each row, or None where the row's logits hold NaN or +inf, or nothing above -inf."""
    if not rows:
        return []
    if (wanted := [row.logits for row in rows]) != list(range(len(logits))):
        logits = logits[wanted]
    logits = logits.float()
    sums = logits.logsumexp(dim=-1, keepdim=True)
    scores = penalised(logits, [(row.tokens, row.num_new, row.sampling) for row in rows])
    best, tokens = scores.max(dim=-1, keepdim=True)
    for ordered in (False, True):  # without top_k and top_p, the time of sorting is saved
        drawn = [i for i, row in enumerate(rows) if not row.sampling.greedy and row.sampling.ordered == ordered]
        if len(drawn) == len(rows):
            tokens = _draw(scores - best, rows, ordered)
        elif drawn:
            tokens[drawn] = _draw(scores[drawn] - best[drawn], [rows[i] for i in drawn], ordered)
    logprobs = logits.gather(1, tokens) - sums
    numbers = torch.cat([tokens.double(), logprobs, best], dim=1).tolist()  # one wait for a GPU
    picks = [Pick(int(token), logprob) if isfinite(most) else None for token, logprob, most in numbers]
    for i, row in enumerate(rows):
        if row.sampling.logprobs is not None and picks[i] is not None:
            top = logits[i].topk(min(row.sampling.logprobs, logits.shape[1]))
            likeliest = zip(top.indices.tolist(), (top.values - sums[i]).tolist(), strict=True)
            picks[i] = picks[i]._replace(likeliest={picks[i].token: picks[i].logprob} | dict(likeliest))
    return picks


def penalised(
    logits: Float[Tensor, "n vocab"], rows: Sequence[tuple[list[int], int, SamplingParams]]
) -> Float[Tensor, "n vocab"]:
    """Return the logits after the penalties. Each row has its tokens, the number of new ones, and its parameters."""
    places, changes = [], []
    for i, (tokens, num_new, params) in enumerate(rows):
        if params.penalises:
            new = tokens[len(tokens) - num_new :]
            counts = dict.fromkeys(new if params.repetition_penalty == 1 else tokens, 0) | Counter(new)
            for token, count in counts.items():
                amount = params.frequency_penalty * count + params.presence_penalty * (count > 0)
                places.append((i, token))
                changes.append((params.repetition_penalty, amount))
    if not places:
        return logits
    i, tokens = torch.tensor(places, device=logits.device).unbind(dim=1)
    factors, amounts = torch.tensor(changes, device=logits.device).unbind(dim=1)
    scores = logits[i, tokens]
    scores = torch.where(scores > 0, scores / factors, scores * factors) - amounts
    return logits.index_put((i, tokens), scores)


def _draw(scores: Float[Tensor, "n vocab"], rows: Sequence[Row], ordered: bool) -> Int64[Tensor, "n 1"]:
    """Draw a token for each row from those that top_k, top_p and min_p leave. Each row's largest score is 0."""
    device, vocab, params = scores.device, scores.shape[1], [row.sampling for row in rows]
    u = uniform([row.seed for row in rows], [row.choice for row in rows], [len(row.tokens) for row in rows])
    top_ks = [min(p.top_k or vocab, vocab) for p in params]
    top_ps = [p.top_p if p.top_p < 1 else inf for p in params]  # 1 leaves out no token, however sums round
    columns = ([p.temperature for p in params], top_ks, top_ps, [p.min_p for p in params], u.tolist())
    numbers = torch.tensor([*zip(*columns, strict=True)], dtype=torch.float64, device=device)
    temperature, top_k, top_p, min_p, u = numbers.split(1, dim=1)
    scores = scores / temperature.float()
    if ordered:
        scores, ids = scores.topk(max(top_ks))
    scores = scores.double()
    if min(top_ks) < scores.shape[1]:
        scores = scores.masked_fill(torch.arange(scores.shape[1], device=device) >= top_k, -inf)
    if min(top_ps) < 1:
        probabilities = scores.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities  # of the likelier ones
        scores = scores.masked_fill(before >= top_p, -inf)
    weights = scores.exp()  # the likeliest token's is 1
    if any(p.min_p for p in params):
        weights = weights.masked_fill(weights < min_p, 0.0)
    cumulative = weights.cumsum(dim=-1)
    drawn = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True)
    drawn = drawn.clamp(max=scores.shape[1] - 1)  # only where the logits are not finite
    return ids.gather(1, drawn) if ordered else drawn


def uniform(seeds: list[int], choices: list[int], positions: list[int]) -> Float[Tensor, " n"]:
    """A float64 in [0, 1) for each (seed, choice, position): the first 53 bits of a hash of these three numbers."""
    keys = (struct.pack("<qqq", *key) for key in zip(seeds, choices, positions, strict=True))
    hashes = [int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") for key in keys]
    return torch.tensor([(number >> 11) * 2.0**-53 for number in hashes], dtype=torch.float64)
