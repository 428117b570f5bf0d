"""From logits to tokens: temperature, top-k, top-p, repetition penalty, seeds (lesson 9).

In transformers' order:

    logit /= penalty  (logit · penalty if negative)      of tokens that the sequence has, its prompt's included
    logit /= temperature                                 below 1e-5: the likeliest token, nothing is drawn
    only the top_k largest stay
    only the largest stay that reach the probability top_p together, the one that crosses it included
    token = the first token whose cumulative probability exceeds u

u is a hash of (seed, choice, position), so a request's tokens depend on nothing else in the batch, and are the same
after a preemption. Holtzman et al. 2020 (top-p); Keskar et al. 2019 (repetition penalty).
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from pagewise.tools.checks import check_count, check_flag, check_number

GREEDY_BELOW = 1e-5  # a smaller temperature is 0
HOTTEST = 1e6  # a larger temperature is refused: float32 logits divided by it would all be equal
PENALTIES = (1e-2, 1e2)  # a repetition penalty outside is refused: a logit times it may leave float32


@dataclass(frozen=True)
class SamplingParams:
    """The parameters of a request's continuation.

    Args:
        max_tokens: the largest number of new tokens.
        temperature: the divisor of the logits, at most 1e6. Below 1e-5 the likeliest token is chosen.
        top_k: draw from this many of the likeliest tokens. The default 0 means all tokens.
        top_p: draw from the fewest likeliest tokens whose probabilities reach this. The default 1 means all tokens.
        n: the number of samples of the prompt.
        beam_width: above 1, a beam search keeps this many of the likeliest sequences. It ignores the temperature and
            needs n = 1. The score of a sequence is divided by its number of tokens (length penalty 1).
        stop: strings and token ids that end a sequence, besides the model's end tokens. A single one needs no list.
        seed: 64 bits that decide every draw. By default torch's generator gives a seed when the request is added.
        ignore_eos: treat the model's end tokens like other tokens. The text then ends at max_tokens or a stop.
        repetition_penalty: above 1 makes tokens that the sequence already has less likely. From 0.01 to 100.
        logprobs: report log p of each chosen token and of this many of the likeliest, before penalty and temperature.

    Raises:
        ValueError, TypeError: a field does not fit, or two contradict each other; the message names them.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    n: int = 1
    beam_width: int = 1
    stop: str | int | Iterable[str | int] = ()
    seed: int | None = None
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, minimum in (("max_tokens", 1), ("n", 1), ("beam_width", 1), ("top_k", 0)):
            check_count(name, getattr(self, name), minimum=minimum)
            object.__setattr__(self, name, int(getattr(self, name)))
        for name in ("temperature", "top_p", "repetition_penalty"):
            check_number(name, getattr(self, name), low=0.0)
        if self.temperature > HOTTEST:
            raise ValueError(f"temperature must be at most {HOTTEST:g}, got {self.temperature}")
        if not PENALTIES[0] <= self.repetition_penalty <= PENALTIES[1]:
            least, most = PENALTIES
            raise ValueError(
                f"repetition_penalty must be from {least:g} to {most:g}, got {self.repetition_penalty}: "
                "1 changes nothing"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        for name in ("temperature", "top_p", "repetition_penalty"):
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
        for name, neutral in (("top_k", 0), ("top_p", 1.0)):
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


def sample(logits: Float[Tensor, "n vocab"], rows: Sequence[Row]) -> list[Pick | None]:
    """Return a token for each row, or None where the row's logits hold NaN or +inf, or nothing above -inf."""
    if not rows:
        return []
    logits = logits[[row.logits for row in rows]].float()
    sums = logits.logsumexp(dim=-1)
    scores = penalised(logits, [(row.tokens, row.sampling.repetition_penalty) for row in rows])
    finite = (sums + scores.amax(dim=-1)).isfinite()
    scores = scores.masked_fill(~finite[:, None], 0.0)
    tokens = scores.argmax(dim=-1)
    if drawing := [i for i, row in enumerate(rows) if not row.sampling.greedy]:
        tokens[drawing] = _draw(scores[drawing], [rows[i] for i in drawing])
    logprobs = (logits.gather(1, tokens[:, None])[:, 0] - sums).tolist()
    picks = [
        Pick(token, logprob) if valid else None
        for token, logprob, valid in zip(tokens.tolist(), logprobs, finite.tolist(), strict=True)
    ]
    for i, row in enumerate(rows):
        if row.sampling.logprobs is not None and picks[i] is not None:
            top = logits[i].topk(min(row.sampling.logprobs, logits.shape[1]))
            likeliest = zip(top.indices.tolist(), (top.values - sums[i]).tolist(), strict=True)
            picks[i] = picks[i]._replace(likeliest={picks[i].token: picks[i].logprob} | dict(likeliest))
    return picks


def penalised(logits: Float[Tensor, "n vocab"], rows: Sequence[tuple[list[int], float]]) -> Float[Tensor, "n vocab"]:
    """Return the logits, lowered by the repetition penalty for tokens that a row already has."""
    if all(penalty == 1.0 for _, penalty in rows):
        return logits
    seen = [(i, token, penalty) for i, (tokens, penalty) in enumerate(rows) for token in set(tokens)]
    i, tokens, penalties = (torch.tensor(numbers, device=logits.device) for numbers in zip(*seen, strict=True))
    scores = logits[i, tokens]
    penalised_scores = torch.where(scores > 0, scores / penalties, scores * penalties)
    return logits.index_put((i, tokens), penalised_scores)


def _draw(logits: Float[Tensor, "n vocab"], rows: list[Row]) -> Tensor:
    """Draw a token for each row, with its temperature, top_k and top_p."""
    device, vocab = logits.device, logits.shape[1]
    temperature = torch.tensor([row.sampling.temperature for row in rows], device=device)[:, None]
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature  # however low the temperature
    u = uniform([row.seed for row in rows], [row.choice for row in rows], [len(row.tokens) for row in rows]).to(device)
    tokens = torch.empty(len(rows), dtype=torch.int64, device=device)
    # top_k and top_p need the likeliest tokens in falling order; a row with neither of them is not sorted
    needs = [row.sampling.top_k or (vocab if row.sampling.top_p < 1 else 0) for row in rows]
    for ordered in (False, True):
        if not (chosen := [i for i, need in enumerate(needs) if (need > 0) == ordered]):
            continue
        scores, ids = logits[chosen], None
        if ordered:
            scores, ids = scores.topk(min(vocab, max(needs[i] for i in chosen)))
            scores = _cut(scores, [rows[i].sampling for i in chosen])
        cumulative = scores.double().exp().cumsum(dim=-1)
        total = cumulative[:, -1:]
        below = torch.minimum(u[chosen, None] * total, torch.nextafter(total, torch.zeros_like(total)))
        drawn = torch.searchsorted(cumulative, below, right=True)
        tokens[chosen] = (drawn if ids is None else ids.gather(1, drawn))[:, 0]
    return tokens


def _cut(scores: Float[Tensor, "n most"], params: list[SamplingParams]) -> Float[Tensor, "n most"]:
    """Replace the scores that top_k and top_p leave out by −inf. The scores fall."""
    most = scores.shape[1]
    top_k = torch.tensor([p.top_k or most for p in params], device=scores.device)[:, None]
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=scores.device)[:, None]
    scores = scores.masked_fill(torch.arange(most, device=scores.device) >= top_k, -torch.inf)
    probabilities = scores.double().softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities  # of the likelier ones
    return scores.masked_fill((before >= top_p) & (top_p < 1), -torch.inf)


def uniform(seeds: list[int], choices: list[int], positions: list[int]) -> Float[Tensor, " n"]:
    """A float64 in [0, 1) for each (seed, choice, position): the first 53 bits of a hash of these three numbers."""
    keys = (struct.pack("<qqq", *key) for key in zip(seeds, choices, positions, strict=True))
    hashes = [int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") for key in keys]
    return torch.tensor([(number >> 11) * 2.0**-53 for number in hashes], dtype=torch.float64)
