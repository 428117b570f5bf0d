"""How fast is a decode step when its keys are split? Dense and paged, lengths equal and mixed (lessons 7 and 8).

    python -m pagewise.experiments.flash_decoding_speed --record lessons/measurements/flash_decoding.json

A decode step must read K and V once. The measure is therefore bytes of K and V over time, as a fraction of the rate of
a plain copy on the same machine, from a cold L2 cache.

The first target is a time that does not grow with the context until the memory is saturated. The second target is 0.85
of a copy's bandwidth beyond 256 MB of K and V. The third is FlashInfer's speed. The last target compares a batch of
mixed lengths with equal lengths and the same number of tokens: 0.9 of their rate.

For lesson 8, the same splits run with a unified maximum and with a maximum that is rarely raised.
`pagewise.experiments.speed` says which shapes are timed where.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from pagewise.experiments import speed
from pagewise.experiments.decode_inputs import DenseInputs, Inputs, Shape, batches
from pagewise.experiments.peers import PrepareDecode, PreparePagedDecode, peers_of_decode, peers_of_paged_decode
from pagewise.experiments.speed import AGAIN
from pagewise.flash_decoding import flash_decoding
from pagewise.flash_decoding_plus_plus import UnifiedMax, calibrate, lazy_rescale_attention, unified_max_attention
from pagewise.naive_attention import grouped_matmul
from pagewise.paged_attention.inputs import PagedInputs, checked_splits
from pagewise.paged_attention_varlen import Step, plan
from pagewise.tools.architecture import architecture
from pagewise.tools.benchmark import Candidate
from pagewise.tools.records import Record
from pagewise.tools.sizes import cdiv
from pagewise.tools.tuning import decode_tiles, splits_that_fill

MIXED = [Shape(16, 512, 65536), Shape(32, 1024, 131072, one_long=1), Shape(64, 512, 32768)]
_LEVEL = [Shape(B, S, S) for S in (131072, 512, 2048, 8192, 32768, 524288) for B in (1, 8)]
# The shapes with targets come first: 512 MB of one sequence, and mixed batches beside equal ones.
_FIRST = [_LEVEL[0], *(shape for mixed in MIXED for shape in (mixed, mixed.equal))]
SHAPES = [shape._replace(paged=paged) for some in (_FIRST, _LEVEL[1:]) for paged in (1, 0) for shape in some]
SMALLEST = [Shape(2, 100, 100, 0, paged, 8, 2, 64) for paged in (1, 0)] + [Shape(3, 20, 200, 0, 1, 8, 2, 64)]


class Trials(speed.Trials):
    """The benchmark of this module."""

    title, shapes, smallest = "split decode", SHAPES, SMALLEST
    first = f"{len(_FIRST)}: those with targets, paged"

    @classmethod
    def methods(cls, device: torch.device, shape: Shape) -> dict[str, PrepareDecode | PreparePagedDecode]:
        found = {
            "Flash-Decoding": _ours,  # its own choice: the heuristic's splits, or equal ranges for mixed lengths
            "not split": partial(_ours, num_splits=1),
            "the heuristic's splits": _by_heuristic,
            "splits of 512 keys": partial(_ours, split_size=512),
        }
        if shape.paged:
            peers = peers_of_paged_decode(device)
            found |= {name: prepare for name, prepare in peers.items() if "not paged" not in name}
        else:
            found |= {"unified max": _unified, "lazy rescale": _lazy, **peers_of_decode(device)}
        return {**found, f"Flash-Decoding{AGAIN}": _ours}

    def build(self, shape: Shape) -> tuple[list[Inputs], list[Tensor]]:
        return batches(shape, self.dtype, self.device)


def _ours(batches: Sequence[Inputs], **splits: int) -> list[Candidate]:
    """Prepare lesson 7's kernel over dense keys or blocks. The package chooses the splits if none are given."""
    options = {**splits, "backend": "triton", "check": False}
    return [
        partial(flash_decoding, *b[:3], seq_lens=b.seq_lens, **options)
        if isinstance(b, DenseInputs)
        else _decode_step(b, **splits)
        for b in batches
    ]


def _decode_step(batch: PagedInputs, num_splits: int | None = None, split_size: int | None = None) -> Candidate:
    """Prepare one layer of an engine's decode step. The first call makes the work plan, which all layers share."""
    ends = torch.arange(len(batch.q) + 1, dtype=torch.int32, device=batch.q.device)
    sizes = {"block_size": batch.cache_sizes[1], "splits": checked_splits(num_splits, split_size)}
    step = plan(Step(batch.block_tables, batch.seq_lens, ends, **sizes, decodes=True), "triton")
    return partial(step.attend, *batch[:3])


def _by_heuristic(batches: Sequence[Inputs]) -> list[Candidate]:
    """Prepare the number of splits that fills the GPU if all sequences are as long as the longest."""
    q, k, *_ = first = batches[0]
    Hkv, longest = k.shape[1], k.shape[2]
    if isinstance(first, PagedInputs):
        Hkv, longest = k.shape[2], first.block_tables.shape[1] * k.shape[1]
    group, gpu = q.shape[1] // Hkv, architecture(q.device)
    tiles = decode_tiles(group, q.shape[-1], q.dtype, k.dtype)
    items = len(q) * Hkv * cdiv(group, tiles.rows)
    return _ours(batches, num_splits=splits_that_fill(items, longest, tiles.keys, gpu.num_sms) if gpu.sm else 1)


def _unified(batches: Sequence[DenseInputs]) -> list[Candidate]:
    q, k = batches[0].q[:1], batches[0].k[:1]
    unified_max = calibrate(grouped_matmul(q.float(), k.float().mT) * q.shape[-1] ** -0.5)
    return [partial(_unified_out, *_of_one_length(b), unified_max) for b in batches]


def _unified_out(q: Tensor, k: Tensor, v: Tensor, unified_max: UnifiedMax | None) -> Tensor:
    return unified_max_attention(q, k, v, unified_max, backend="triton")[0]


def _lazy(batches: Sequence[DenseInputs]) -> list[Candidate]:
    return [partial(lazy_rescale_attention, *_of_one_length(b), backend="triton") for b in batches]


def _of_one_length(inputs: DenseInputs) -> tuple[Tensor, Tensor, Tensor]:
    if inputs.seq_lens is not None:
        raise ValueError("it takes sequences of one length")
    return inputs[:3]


DRAWN = ("Flash-Decoding", "not split", "SDPA flash", "FlexAttention", "FlashInfer")
DRAWN_MIXED = ("Flash-Decoding", "the heuristic's splits", "splits of 512 keys", "not split", "FlashInfer")
SOFTMAXES = ("Flash-Decoding", "unified max", "lazy rescale")


def draw(found: Sequence[Record], *, num_seqs: int = 1, paged: bool = False, methods: Sequence[str] = DRAWN) -> None:
    """Draw the time of a decode step over the context, for sequences of one length.

    Raises:
        ValueError: none of the methods has a time for that many sequences of one length.
    """
    from pagewise import figures

    level = [r for r in found if r.shape["shortest"] == r.shape["longest"]]
    timed = speed.drawn(level, methods=methods, num_seqs=num_seqs, paged=int(paged))
    times = {(r.what, r.shape["longest"]): 1e6 * r.seconds for r in timed}
    lengths = sorted({S for _, S in times})
    figures.lines(
        lengths,
        {name: [times.get((name, S), float("nan")) for S in lengths] for name, _ in times},
        title=f"How long does a decode step take? ({num_seqs} × S tokens{', paged' * paged})",
        xlabel="S, tokens of context",
        ylabel="µs",
        logx=True,
        logy=True,
        caption=speed.caption(timed),
    )


def draw_mixed(found: Sequence[Record], *, methods: Sequence[str] = DRAWN_MIXED) -> None:
    """Draw the bandwidth that paged decode reached, as a share of a copy's, for mixed lengths beside equal ones.

    Raises:
        ValueError: none of the methods has a time for paged keys.
    """
    from pagewise import figures

    shapes = [shape._replace(paged=1) for mixed in MIXED for shape in (mixed, mixed.equal)]
    timed = speed.drawn([r for r in found if r.fraction is not None], methods=methods, paged=1)
    reached = {(r.what, Shape(**r.shape)): 100 * r.fraction for r in timed}
    figures.bars(
        [_label(shape) for shape in shapes],
        {name: [reached.get((name, shape), 0.0) for shape in shapes] for name in dict.fromkeys(n for n, _ in reached)},
        title="How fast are K and V read, of mixed lengths and of equal ones? (paged)",
        ylabel="% of a copy's bandwidth",
        caption=speed.caption(timed),
        width=11,
        legend_outside=True,
    )


def _label(shape: Shape) -> str:
    if shape.shortest == shape.longest:
        return f"{shape.num_seqs} of {shape.longest / 1024:.1f} k"
    low, high = (f"{length / 1024:g}" for length in (shape.shortest, shape.longest))
    return (
        f"1 of {high} k, {shape.num_seqs - 1} of {low} k" if shape.one_long else f"{shape.num_seqs} of {low}–{high} k"
    )


if __name__ == "__main__":
    speed.command(Trials)
