"""What a caller gives and what a checkpoint recommends, as the engine needs it (lesson 9)."""

import logging
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from pagewise.engine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


def sampling_defaults(model: nn.Module, generation_config: str) -> dict[str, float]:
    """Return the sampling parameters that the checkpoint recommends, and name them in a log line.

    Raises:
        ValueError: the checkpoint recommends an impossible value.
    """
    found = dict(getattr(model, "sampling_defaults", {}))
    if generation_config == "none" or not found:
        return {}
    remedy = 'generation_config="none" leaves them out'
    try:
        SamplingParams(**found)
    except (TypeError, ValueError) as error:
        raise ValueError(f"generation_config.json of the checkpoint: {error}; {remedy}") from error
    said = ", ".join(f"{name} = {value}" for name, value in found.items())
    logger.warning("defaults of requests, from generation_config.json of the checkpoint: %s; %s", said, remedy)
    return found


def special_stops(tokenizer: Any, strings: Iterable[str]) -> frozenset[int]:
    """Return the ids of the stop strings that are special tokens. Text leaves special tokens out.

    Raises:
        ValueError: a string holds a special token and other text, so that no text can hold the string.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {str(token): id_ for id_, token in added.items() if token.special}
    for string in strings:
        if string not in special and (inside := [token for token in special if token in string]):
            first = min(inside, key=string.index)
            said = f"stop = {string!r} holds the special token {first!r}, which text leaves out"
            raise ValueError(f"{said}: give {first!r} alone")
    return frozenset(special[string] for string in strings if string in special)


def token_ids(prompt: object, tokenizer: Any) -> list[int]:
    """Return a prompt as a list of tokens, which may not be ids of the model.

    Raises:
        ValueError, TypeError: the prompt is text and the model has no tokenizer, or it is empty or not iterable.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("the prompt is text, but the model came without a tokenizer: give token ids")
        prompt = tokenizer.encode(prompt)
    tokens = prompt.tolist() if isinstance(prompt, Tensor) else prompt
    if isinstance(tokens, bytes | bytearray) or not isinstance(tokens, Iterable):
        said = f"a prompt must be text or a list of token ids, got {type(prompt).__name__}"
        raise TypeError(f"{said}: put a single one into a list")
    if not (tokens := list(tokens)):
        raise ValueError("the prompt must hold at least 1 token, got none")
    return tokens
