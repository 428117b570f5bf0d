"""A decoder in exact arithmetic: what every token of the engine is held against, however its step was put together."""

from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pagewise.engine.request import Request, Sequence
from pagewise.engine.sampling import Row, sample
from pagewise.engine.sampling_params import SamplingParams

END = 7  # the model's end token
VOCAB = 50
_D = 8
_COLUMNS = torch.arange(VOCAB)
_WEIGHTS = torch.tensor([8191 ** (d % 4) + d for d in range(_D)])


class ExactModel(nn.Module):
    """Two layers whose logits are a function of all tokens before, and of where they stand, in whole numbers.

    Keys are 0, so that attention is the mean of the values it sees, and mean · length, rounded, is their sum. Values
    are small whole numbers: of layer 0 drawn from token and position, of layer 1 from the sums of layer 0. A slot that
    is written or read wrongly, or a token too many or too few, changes them, and with them the next token; what else
    is in the batch does not, not in the last bit.
    """

    eos_token_ids = (END,)
    num_kv_heads = 1

    def __init__(self, context: int = 128) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1), requires_grad=False)  # has the dtype and device
        self.config = SimpleNamespace(
            vocab_size=VOCAB, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=_D,
            hidden_size=2 * _D, max_position_embeddings=context,
        )  # fmt: skip

    def forward(self, token_ids: Tensor, positions: Tensor, attend, *, logits_for: Tensor | None = None) -> Tensor:
        seen = positions[:, :, None] + 1  # [B, T, 1]
        state = token_ids * 1009 + positions * 9176
        q = torch.zeros(len(token_ids), 2, token_ids.shape[1], _D)
        for layer in range(2):
            values = _drawn(state[:, :, None] * 31 + _COLUMNS[:_D] + layer, bits=7).float()
            out = attend(layer, q, q[:, :1], values[:, None])[:, 1]  # [B, T, D]
            sums = (out * seen).round().long()
            state = (sums * _WEIGHTS).sum(dim=-1)
        state = state if logits_for is None else state[:, logits_for]
        return _drawn(state[:, :, None] * 31 + _COLUMNS, bits=20).float() / 2**18


def _drawn(x: Tensor, bits: int) -> Tensor:
    """A whole number of so many bits for each, as if drawn at random."""
    for odd in (-7046029254386353131, -4417276706812531889):  # products modulo 2⁶⁴, as int64 wraps
        x = x * odd
        x = x ^ (x >> 31 & (1 << 33) - 1)
    return x >> 17 & (1 << bits) - 1


class Job(NamedTuple):
    """One choice of a request."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    choice: int = 0


def row(
    logits: int, sampling: SamplingParams, tokens: list[int], num_new: int, seed: int = 0, choice: int = 0, **more
) -> Row:
    """The draw after these tokens, of which num_new are new. `more`: drafts, and the request's ends."""
    request = Request(tokens[: len(tokens) - num_new], sampling, None, more.get("ends", frozenset()), seed)
    sequence = Sequence(tokens, index=choice)
    return Row(logits, request, sequence, more.get("drafts", ()))


def continued(model: ExactModel, jobs: list[Job]) -> list[tuple[list[int], str]]:
    """(token_ids, finish_reason) of each job, by nothing of the engine but `sample`: all it keeps is two sums."""
    tokens, results = [list(job.prompt) for job in jobs], [None] * len(jobs)
    firsts = [_summed(model, torch.tensor([job.prompt]), torch.zeros(2, 1, _D), 0) for job in jobs]
    live, logits = list(range(len(jobs))), torch.cat([logits for logits, _ in firsts])
    sums = torch.cat([sums for _, sums in firsts], dim=1)
    while live:
        rows = []
        for i, j in enumerate(live):
            num_new, sampling = len(tokens[j]) - len(jobs[j].prompt), jobs[j].sampling
            ends = frozenset(sampling.stop_ids) | frozenset(() if sampling.ignore_eos else model.eos_token_ids)
            rows.append(row(i, sampling, tokens[j], num_new, sampling.seed or 0, jobs[j].choice, ends=ends))
        for j, pick in zip(live, sample(logits, rows), strict=True):
            tokens[j].append(pick.token)
            new, sampling = tokens[j][len(jobs[j].prompt) :], jobs[j].sampling
            if pick.token in sampling.stop_ids or (pick.token in model.eos_token_ids and not sampling.ignore_eos):
                results[j] = (new, "stop")
            elif len(new) == sampling.max_tokens:
                results[j] = (new, "length")
        going = [i for i, j in enumerate(live) if results[j] is None]
        live = [live[i] for i in going]
        if live:
            at = torch.tensor([len(tokens[j]) - 1 for j in live])
            logits, sums = _summed(model, torch.tensor([tokens[j][-1:] for j in live]), sums[:, going], at[:, None])
    return results


def _summed(model: ExactModel, token_ids: Tensor, sums: Tensor, start: Tensor | int) -> tuple[Tensor, Tensor]:
    """Logits after the last token, and sums [2, B, D] of the values of all so far, before given those before."""
    positions = start + torch.arange(token_ids.shape[1]).expand(token_ids.shape)
    ends = []

    def attend(layer, q, k, v):
        total = sums[layer][:, None, None] + v.cumsum(dim=2)
        ends.append(total[:, 0, -1])
        return (total / (positions[:, None, :, None] + 1)).expand_as(q)

    logits = model(token_ids, positions, attend, logits_for=torch.tensor([token_ids.shape[1] - 1]))[:, 0]
    return logits, torch.stack(ends)
