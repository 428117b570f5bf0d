"""Prompts and requests: from what a caller gives to what the engine can serve (lesson 9)."""

import logging
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from pagewise.engine.request import Request
from pagewise.engine.sampling import chosen_seed
from pagewise.engine.sampling_params import SamplingParams
from pagewise.engine.scheduler import Scheduler
from pagewise.paged_blocks.prefix_cache import as_token
from pagewise.tools.worker import described

logger = logging.getLogger(__name__)


def end_tokens(model: nn.Module, tokenizer: Any) -> frozenset[int]:
    """Return all tokens that end a text, for the model's checkpoint or for its tokenizer."""
    of_tokenizer = getattr(tokenizer, "eos_token_id", None)
    return frozenset((*getattr(model, "eos_token_ids", ()), *(() if of_tokenizer is None else (of_tokenizer,))))


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
            raise ValueError(
                f"stop = {string!r} holds the special token {first!r}, which text leaves out: give {first!r} alone"
            )
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
    if not isinstance(prompt, Iterable):
        raise TypeError(f"a prompt must be text or a list of token ids, got {type(prompt).__name__}")
    tokens = prompt.tolist() if isinstance(prompt, Tensor) else list(prompt)
    if not tokens:
        raise ValueError("the prompt must hold at least 1 token, got none")
    return tokens


def paired(prompts: Any, sampling: Any) -> list[tuple[Any, Any]]:
    """Return each prompt with its SamplingParams, of which there is one for all or one for each."""
    if isinstance(prompts, str) or not all(isinstance(prompt, str | list | tuple | Tensor) for prompt in prompts):
        raise TypeError("prompts must be a list of texts or of lists of token ids: put a single one into a list")
    params = list(sampling) if isinstance(sampling, list | tuple) else [sampling] * len(prompts)
    if len(params) != len(prompts):
        raise ValueError(f"sampling must be one for all or one for each of {len(prompts)} prompts, got {len(params)}")
    return list(zip(prompts, params, strict=True))


def checked_request(
    prompt: object,
    sampling: object,
    tokenizer: Any,
    config: Any,
    eos: frozenset[int],
    scheduler: Scheduler,
    max_model_len: int,
) -> Request:
    """Return a request that can be served. Sizes are compared before any work that grows with them.

    Args:
        config: of the model. eos: its end tokens. max_model_len: the most tokens of a sequence.

    Raises:
        ValueError, TypeError: `token_ids` raises; a token is not an id of the model; there are stop strings but no
            text, or a stop string that no text can hold; the tokenizer cannot decode the prompt; or the request alone
            exceeds the context, a step or the memory.
    """
    if not isinstance(sampling, SamplingParams):
        raise TypeError(f"sampling must be SamplingParams, got {type(sampling).__name__}")
    tokens = token_ids(prompt, tokenizer)
    if sampling.stop_strings and (tokenizer is None or sampling.beam_width > 1):
        why = "the model came without a tokenizer" if tokenizer is None else "a beam search knows tokens only"
        raise ValueError(f"stop has strings, but {why}: give token ids")
    if sampling.width > min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens):
        raise ValueError(
            f"n or beam_width = {sampling.width} exceeds max_num_seqs = {scheduler.max_num_seqs} or "
            f"max_num_batched_tokens = {scheduler.max_num_batched_tokens}"
        )
    if len(tokens) + sampling.max_tokens > max_model_len:
        raise ValueError(
            f"{sampling.described(len(tokens))} exceed the model's context of {max_model_len} tokens: "
            f"shorten one of them"
        )
    for token, _ in sampling.logit_bias or ():
        if token >= config.vocab_size:
            raise ValueError(f"logit_bias must name tokens in [0, vocab_size = {config.vocab_size}), got {token}")
    tokens = [token if type(token) is int else as_token(token) for token in tokens]
    if not 0 <= min(tokens) <= max(tokens) < config.vocab_size:
        wrong = next(token for token in tokens if not 0 <= token < config.vocab_size)
        raise ValueError(f"token ids must be in [0, vocab_size = {config.vocab_size}), got {wrong} in the prompt")
    ends = frozenset(sampling.stop_ids) | (frozenset() if sampling.ignore_eos else eos)
    if sampling.stop_strings:
        ends |= special_stops(tokenizer, sampling.stop_strings)
    try:
        request = Request(tokens, sampling, tokenizer, ends, chosen_seed(sampling))
    except Exception as error:
        raise ValueError(f"prompt must be tokens that the tokenizer decodes: it raised {described(error)}") from error
    scheduler.memory.check_fits(request)
    return request
