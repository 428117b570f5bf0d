"""How fast is a decode step when its keys are split? Dense and paged, lengths equal and mixed (lessons 7 and 8).

    python -m pagewise.experiments.flash_decoding_speed --record lessons/measurements/flash_decoding.json

A decode step must read K and V once. So the measure is bytes of K and V over time, against what a plain copy reaches on
the same machine, from a cold L2 cache. Targets: over the context, the time stays level until the memory is saturated;
beyond 256 MB of K and V at least 0.85 of a copy's bandwidth; at least FlashInfer's speed; and a batch of mixed lengths
at least 0.9 of the rate of one that has as many tokens in equal lengths. Beside it what lesson 8 asks: the same splits
with a unified maximum, and with one that is rarely raised. `pagewise.experiments.speed` says what is timed where.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from pagewise.experiments import flash_decoding_peers, paged_attention_peers, speed
from pagewise.experiments.decode_inputs import DenseInputs, Inputs, Shape, exact, random_inputs
from pagewise.experiments.speed import AGAIN, ROTATED_BYTES
from pagewise.flash_decoding import flash_decoding
from pagewise.flash_decoding.work_plan import checked_splits
from pagewise.flash_decoding_plus_plus import UnifiedMax, calibrate, lazy_rescale_attention, unified_max_attention
from pagewise.naive_attention import grouped_matmul
from pagewise.paged_attention.inputs import PagedInputs
from pagewise.paged_attention_varlen import plan
from pagewise.tools import benchmark
from pagewise.tools.architecture import architecture
from pagewise.tools.benchmark import Candidate, Record
from pagewise.tools.sizes import cdiv
from pagewise.tools.tuning import decode_tiles, splits_that_fill

MIXED = [Shape(16, 512, 65536), Shape(32, 1024, 131072, one_long=1), Shape(64, 512, 32768)]
_LEVEL = [Shape(B, S, S) for S in (131072, 512, 2048, 8192, 32768, 524288) for B in (1, 8)]
# Those that the targets need come first: 512 MB of one sequence, and mixed batches beside equal ones.
_FIRST = [_LEVEL[0], *(shape for mixed in MIXED for shape in (mixed, mixed.equal))]
SHAPES = [shape._replace(paged=paged) for some in (_FIRST, _LEVEL[1:]) for paged in (1, 0) for shape in some]
SMALLEST = [Shape(2, 100, 100, 0, paged, 8, 2, 64) for paged in (1, 0)] + [Shape(3, 20, 200, 0, 1, 8, 2, 64)]

# ------------------------------------------------------------------------------------------------ methods


def methods(device: torch.device, paged: bool) -> dict[str, Callable[[Sequence[Inputs]], list[Candidate]]]:
    """Every method that this machine has, by name: given inputs, a call for each.

    The first one comes again at the end: how far its two times are apart is the noise.
    """
    found = {
        "Flash-Decoding": _ours,  # whatever it chooses: the heuristic's splits, for mixed lengths equal ranges
        "not split": partial(_ours, num_splits=1),
        "the heuristic's splits": _by_heuristic,
        "splits of 512 keys": partial(_ours, split_size=512),
    }
    if paged:
        found |= {name: run for name, run in paged_attention_peers.peers(device).items() if "not paged" not in name}
    else:
        found |= {"unified max": _unified, "lazy rescale": _lazy, **flash_decoding_peers.peers(device)}
    return {**found, f"Flash-Decoding{AGAIN}": _ours}


def _ours(batches: Sequence[Inputs], **splits: int) -> list[Candidate]:
    """Lesson 7's kernel, over dense keys or over blocks. The splits are chosen by the package if none are given."""
    options = {**splits, "backend": "triton", "check": False}
    return [
        partial(flash_decoding, *b[:3], seq_lens=b.seq_lens, **options)
        if isinstance(b, DenseInputs)
        else _decode_step(b, **splits)
        for b in batches
    ]


def _decode_step(batch: PagedInputs, num_splits: int | None = None, split_size: int | None = None) -> Candidate:
    """One layer of a decode step of the engine, which makes one work plan for all layers: the first call makes it."""
    ends = torch.arange(len(batch.q) + 1, dtype=torch.int32, device=batch.q.device)
    sizes = {"block_size": batch.cache_sizes[1], "splits": checked_splits(num_splits, split_size)}
    step = plan(batch.block_tables, batch.seq_lens, ends, **sizes, backend="triton", decodes=True)
    return partial(step.attend, *batch[:3])


def _by_heuristic(batches: Sequence[Inputs]) -> list[Candidate]:
    """The number of splits that fills the GPU if all sequences are as long as the longest."""
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


# ------------------------------------------------------------------------------------------------ records


class Trials(speed.Trials):
    """Tries one method on one shape after the other."""

    def build(self, shape: Shape) -> tuple[list[Inputs], list[Tensor]]:
        seeds = range(3 if shape.kv_bytes(self.dtype.itemsize) < ROTATED_BYTES else 1)
        batches = [random_inputs(shape, self.dtype, self.device, seed) for seed in seeds]
        return batches, [exact(batch) for batch in batches]

    def runs(self, method: str) -> list[Candidate]:
        return methods(self.device, bool(self.shape.paged))[method](self.inputs)


def records(
    shapes: Sequence[Shape],
    *,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    rate: float | None = None,
    limit: float = 120.0,
    **options: int,
) -> Iterator[Record]:
    """A record per shape and method, as they come.

    `rate`: bytes per second of a copy; `limit`: seconds per trial; `options`: `benchmark.trial`'s.
    """
    tasks = [(shape, method) for shape in shapes for method in methods(device, bool(shape.paged))]
    return speed.records(
        Trials,
        tasks,
        "decode",
        device=device,
        dtype=dtype,
        options=options,
        nbytes=lambda shape: shape.kv_bytes(dtype.itemsize),
        bound=("copy", rate),
        limit=limit,
    )


def targets(found: Sequence[Record]) -> str:
    """A line per target: the worst and the best that records have of it, and on how many shapes."""
    timed = {(r.what, Shape(**r.shape)): r for r in found if r.seconds}
    ours = {shape: r for (what, shape), r in timed.items() if what == "Flash-Decoding"}
    theirs = {shape: r for (what, shape), r in timed.items() if what == "FlashInfer"}
    rate = {shape: r.bytes / r.seconds for shape, r in ours.items()}
    reached = {
        "0.85 of a copy's bandwidth, beyond 256 MB": [r.fraction for r in ours.values() if r.bytes > 2**28],
        "1.0 of FlashInfer's speed": [
            theirs[shape].seconds / r.seconds for shape, r in ours.items() if shape in theirs
        ],
        "0.9 of the rate of equal lengths, mixed": [
            rate[s] / rate[s.equal] for s in ours if s.shortest < s.longest and s.equal in ours
        ],
    }
    rows = []
    for target, values in reached.items():
        known = [value for value in values if value is not None]
        low, high = (f"{value:.2f}" for value in (min(known), max(known))) if known else ("–", "–")
        rows.append((target, low, high, str(len(known))))
    return benchmark.table(("target", "worst", "best", "shapes"), rows)


# ------------------------------------------------------------------------------------------------ figures

DRAWN = ("Flash-Decoding", "not split", "SDPA flash", "FlexAttention", "FlashInfer")
DRAWN_MIXED = ("Flash-Decoding", "the heuristic's splits", "splits of 512 keys", "not split", "FlashInfer")
SOFTMAXES = ("Flash-Decoding", "unified max", "lazy rescale")


def draw(found: Sequence[Record], *, num_seqs: int = 1, paged: bool = False, methods: Sequence[str] = DRAWN) -> None:
    """The time of a decode step over the context, in records of sequences of one length."""
    from pagewise import figures

    times = {
        (r.what, r.shape["longest"]): 1e6 * r.seconds
        for r in _timed(found, methods, num_seqs=num_seqs, paged=int(paged))
        if r.shape["shortest"] == r.shape["longest"]
    }
    lengths = sorted({S for _, S in times})
    figures.lines(
        lengths,
        {name: [times.get((name, S), float("nan")) for S in lengths] for name, _ in times},
        title=f"How long does a decode step take? ({num_seqs} × S tokens{', paged' * paged})",
        xlabel="S, tokens of context",
        ylabel="µs",
        logx=True,
        logy=True,
        caption=_caption(found),
    )


def draw_mixed(found: Sequence[Record], *, methods: Sequence[str] = DRAWN_MIXED) -> None:
    """The bandwidth that paged decode of mixed lengths reached, as a share of a copy's, beside that of equal ones."""
    from pagewise import figures

    shapes = [shape._replace(paged=1) for mixed in MIXED for shape in (mixed, mixed.equal)]
    reached = {
        (r.what, Shape(**r.shape)): 100 * r.fraction for r in _timed(found, methods, paged=1) if r.fraction is not None
    }
    figures.bars(
        [_label(shape) for shape in shapes],
        {name: [reached.get((name, shape), 0.0) for shape in shapes] for name in dict.fromkeys(n for n, _ in reached)},
        title="How fast are K and V read, of mixed lengths and of equal ones? (paged)",
        ylabel="% of a copy's bandwidth",
        caption=_caption(found),
        width=11,
        legend_outside=True,
    )


def _timed(found: Sequence[Record], methods: Sequence[str], **of_shape: int) -> list[Record]:
    return [r for r in found if r.seconds and r.what in methods and of_shape.items() <= r.shape.items()]


def _label(shape: Shape) -> str:
    if shape.shortest == shape.longest:
        return f"{shape.num_seqs} of {shape.longest / 1024:.1f} k"
    low, high = (f"{length / 1024:g}" for length in (shape.shortest, shape.longest))
    return (
        f"1 of {high} k, {shape.num_seqs - 1} of {low} k" if shape.one_long else f"{shape.num_seqs} of {low}–{high} k"
    )


def _caption(found: Sequence[Record]) -> str:
    return f"{found[0].device}, {found[0].date[:10]}, torch {found[0].versions['torch']}"


def main() -> None:
    """The command line."""
    description = "Time every way of Flash-Decoding on this machine."
    found = speed.command(
        description, SHAPES, SMALLEST, records, against="copy", first=f"{len(_FIRST)}: those with targets, paged"
    )
    print(targets(found))


if __name__ == "__main__":
    main()
