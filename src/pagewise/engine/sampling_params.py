"""`SamplingParams`: how a request shall be continued; `Pick`: a token that `sampling` has drawn (lesson 9)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from pagewise.tools.checks import check_count, check_flag, check_number

GREEDY_BELOW = 1e-5  # a smaller temperature is 0
RANGES = {  # the least, the most, and the value that changes nothing
    "temperature": (0.0, 1e6, 1),  # float32 logits divided by a larger temperature would all be equal
    "min_p": (0.0, 1.0, 0),
    "repetition_penalty": (1e-2, 1e2, 1),  # a logit times a penalty outside may leave float32
    "presence_penalty": (-2.0, 2.0, 0),  # OpenAI's range, as that of the next penalty
    "frequency_penalty": (-2.0, 2.0, 0),
}
LARGEST_BIAS = 100.0  # OpenAI's


@dataclass(frozen=True)
class SamplingParams:
    """The parameters of a request's continuation.

    Args:
        max_tokens: the largest number of new tokens. With prompt_logprobs it may be 0.
        min_tokens: no end token is drawn and no stop string ends the text before there are so many new tokens.
        temperature: the divisor of the logits, at most 1e6. Below 1e-5 the likeliest token is chosen.
        top_k: draw from this many of the likeliest tokens. 0 and -1 mean all tokens.
        top_p: draw from the fewest likeliest tokens whose probabilities reach this.
        min_p: draw from the tokens that have at least min_p times the probability of the likeliest one. From 0 to 1.
        n: the number of samples of the prompt.
        beam_width: above 1, a beam search keeps this many of the likeliest sequences. It ignores the temperature, and
            needs n = 1. Scores are divided by the number of tokens (length penalty 1).
        stop: strings and token ids that end a sequence, besides the model's end tokens. A single one needs no list.
        stop_token_ids: more token ids that end a sequence.
        seed: 64 bits that decide every draw. By default torch's generator gives a seed when the request is prepared.
        ignore_eos: treat the model's end tokens like other tokens. The text then ends at max_tokens or a stop.
        logit_bias: {token id: number from -100 to 100 that is added to the token's logit}, before the penalties.
        repetition_penalty: a value above 1 makes tokens that the sequence already has less likely. From 0.01 to 100.
        presence_penalty: subtracted from the logit of each token that the sequence has generated. From -2 to 2.
        frequency_penalty: subtracted once for each time that the sequence has generated the token. From -2 to 2.
        logprobs: report log p (before bias, penalties and temperature) of each chosen token and of this many likeliest.
        prompt_logprobs: report the same of each token of the prompt but the first. The prefix cache then saves nothing.

    Further attributes follow from these: `width`, the most sequences at once; `greedy`, whether each token is the
    likeliest; `limits`: temperature (0 if greedy), top_k, top_p (both inf if they leave out no token) and min_p;
    `penalises`, whether a penalty changes logits; `changes`, whether anything does; `stop_strings`, and `stop_ids`, the
    token ids among `stop` and `stop_token_ids`.

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
    min_tokens: int = 0
    stop_token_ids: Iterable[int] = ()
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        least = {"max_tokens": int(self.prompt_logprobs is None), "n": 1, "beam_width": 1, "top_k": -1, "min_tokens": 0}
        for name, minimum in least.items():
            check_count(name, getattr(self, name), minimum=minimum)
            self._set(name, max(0, int(getattr(self, name))))
        for name, minimum in {"seed": -(2**63), "logprobs": 0, "prompt_logprobs": 0}.items():
            if (number := getattr(self, name)) is not None:
                check_count(name, number, minimum=minimum)
        for name, (least, most, neutral) in RANGES.items():
            check_number(name, value := getattr(self, name))
            if not least <= value <= most:
                raise ValueError(f"{name} must be from {least:g} to {most:g}, got {value}: {neutral} changes nothing")
        check_number("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        for name in ("top_p", *RANGES):
            self._set(name, float(getattr(self, name)))
        check_flag("ignore_eos", self.ignore_eos)
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens = {self.max_tokens}, got {self.min_tokens}")
        if isinstance(self.stop, str | int):
            self._set("stop", (self.stop,))
        for name, kinds in (("stop", "strings and token ids"), ("stop_token_ids", "token ids")):
            items = getattr(self, name)
            if not isinstance(items, Iterable) or isinstance(items, str | bytes | bytearray):
                raise TypeError(f"{name} must be {kinds}, got {type(items).__name__}")
            self._set(name, items := tuple(items))
            for item in items:
                if name == "stop_token_ids" or not isinstance(item, str):
                    check_count(name, item, minimum=0)
                elif not item:
                    raise ValueError("stop must not hold an empty string, which would end every text at once")
        if self.logit_bias is not None:
            self._set("logit_bias", _biases(self.logit_bias))
        beams = f"beam_width = {self.beam_width}"
        if self.beam_width > 1 and self.n > 1:
            raise ValueError(f"{beams} and n = {self.n} exclude each other: a beam search returns its beams")
        neutral = {"logprobs": None, "prompt_logprobs": None, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        for name, expected in neutral.items() if self.beam_width > 1 else ():
            if (value := getattr(self, name)) != expected:
                raise ValueError(f"{name} = {value} with {beams}: a beam search draws nothing and gives scores only")
        self._set("greedy", self.temperature < GREEDY_BELOW or self.beam_width > 1)
        if self.greedy and self.n > 1:
            same = f"n = {self.n} samples at temperature {self.temperature:g} are all the same"
            raise ValueError(f"{same}: raise the temperature, or n = 1")

        self._set("width", max(self.n, self.beam_width))
        top_p = self.top_p if self.top_p < 1 else inf  # 1 leaves out no token, however sums round
        self._set("limits", (0.0 if self.greedy else self.temperature, self.top_k or inf, top_p, self.min_p))
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        self._set("penalises", penalties != (1.0, 0.0, 0.0))
        self._set("changes", bool(self.logit_bias or self.min_tokens or self.penalises))
        self._set("stop_strings", tuple(item for item in self.stop if isinstance(item, str)))
        self._set("stop_ids", (*(item for item in self.stop if not isinstance(item, str)), *self.stop_token_ids))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def described(self, prompt_tokens: int) -> str:
        """Return the size of a request with a prompt of `prompt_tokens` tokens, for messages."""
        sequences = f"{self.width} sequences of " if self.width > 1 else ""
        return f"{sequences}a prompt of {prompt_tokens} tokens and max_tokens = {self.max_tokens}"


class Pick(NamedTuple):
    """A drawn token, and log p under the model's logits as they are."""

    token: int
    logprob: float
    likeliest: dict[int, float] | None = None  # if requested: {token: log p}, the chosen token first


def _biases(biases: object) -> tuple[tuple[int, float], ...] | None:
    """Return logit_bias as sorted pairs, or None if it changes nothing."""
    if not isinstance(biases, Mapping | tuple):
        raise TypeError(f"logit_bias must be {{token id: number}}, got {type(biases).__name__}")
    pairs = list(biases.items() if isinstance(biases, Mapping) else biases)
    for token, bias in pairs:
        check_count("logit_bias", token, minimum=0)
        check_number("logit_bias", bias)
        if abs(bias) > LARGEST_BIAS:
            raise ValueError(f"logit_bias must be from -{LARGEST_BIAS:g} to {LARGEST_BIAS:g}, got {bias} for {token}")
    return tuple(sorted((int(token), float(bias)) for token, bias in pairs)) or None
