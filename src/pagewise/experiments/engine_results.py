"""Report runs of engines: in the format of lesson 9's source, as ratios, and as records to keep."""

import statistics
from collections.abc import Callable, Mapping, Sequence

from torch import nn

from pagewise.engine.profile import Profile
from pagewise.experiments.engine_workload import Run, Workload
from pagewise.tools.records import Record, surroundings, table
from pagewise.tools.timing import Spread, copy_bandwidth, matmul_rate


def summary(name: str, runs: Sequence[Run], warmup_runs: int) -> str:
    """Return a report of one engine's runs, with the fields of lesson 9's source and some more."""
    run = runs[0]
    requests, completion = len(run.token_ids), run.completion_tokens
    lines = {
        "Requests": requests,
        "Warmup runs": warmup_runs,
        "Measured runs": len(runs),
        "Prefill time (add) p50/mean": _both(runs, lambda r: r.prefill, "s"),
        "Decode time (run) p50/mean": _both(runs, lambda r: r.decode, "s"),
        "Total time p50/mean": _both(runs, lambda r: r.seconds, "s"),
        "Prompt tokens": run.prompt_tokens,
        "Completion tokens": completion,
        "Total tokens": run.prompt_tokens + completion,
        "Throughput (completion,decode) p50/mean": _both(runs, decode_rate, "tokens/s"),
        "Throughput (completion,total) p50/mean": _both(runs, completion_rate, "tokens/s"),
        "Throughput (total,total) p50/mean": _both(runs, total_rate, "tokens/s"),
        "Prefill served by the prefix cache": f"{run.cached_tokens / run.prompt_tokens:.1%}",
        "Time to first token p50/mean": _both(runs, lambda r: r.first_token, "s"),
        "Time per decode step p50/mean": _both(runs, lambda r: r.steps, "s"),
        "Peak cache memory": f"{max(r.peak_cache for r in runs) / 2**20:.2f} MiB",
    }
    return "\n".join([f"=== {name} ===", *(f"{field}: {value}" for field, value in lines.items())])


def decode_rate(run: Run) -> float:
    """Return tokens per second of decoding. Without steps that only decode, return 0.

    The first token of each request comes from a step of its prompt, so it does not count. Tokens that other requests
    decode in such a step do count, so with a continuous batch the rate is an upper bound.
    """
    return (run.completion_tokens - len(run.token_ids)) / run.decode if run.steps else 0.0


def completion_rate(run: Run) -> float:
    """Return generated tokens per second of the whole run."""
    return run.completion_tokens / run.seconds


def total_rate(run: Run) -> float:
    """Return tokens of prompts and answers per second of the whole run."""
    return (run.prompt_tokens + run.completion_tokens) / run.seconds


def speedups(compared: Mapping[str, Sequence[Run]]) -> dict[str, float]:
    """Return how many times as fast as the first engine each engine is: the median of the ratios in each round."""
    first = next(iter(compared.values()))
    return {
        name: statistics.median(base.seconds / run.seconds for base, run in zip(first, runs, strict=True))
        for name, runs in compared.items()
    }


def agreement(compared: Mapping[str, Sequence[Run]]) -> dict[str, float]:
    """Return the share of requests whose tokens are those of the first engine. Only rounding makes it less than 1."""
    first = next(iter(compared.values()))
    found = {}
    for name, runs in compared.items():
        pairs = [zip(base.token_ids, run.token_ids, strict=True) for base, run in zip(first, runs, strict=True)]
        same = [theirs == ours for pair in pairs for theirs, ours in pair]
        found[name] = sum(same) / len(same)
    return found


def overview(title: str, compared: Mapping[str, Sequence[Run]]) -> str:
    """Return a table with a line per engine: medians, and the speed as a multiple of the first engine's."""
    times, agrees = speedups(compared), agreement(compared)
    header = (title, "prefill", "decode", "total", "tokens/s", "cached", "first token", "step", "cache", "agrees", "")
    rows = []
    for name, runs in compared.items():

        def median(unit: str, measured: Callable[[Run], float | Sequence[float]], runs: Sequence[Run] = runs) -> str:
            return unit.format(_median(_all(runs, measured)))

        run = runs[0]
        row = {
            "prefill": median("{:.3f} s", lambda r: r.prefill),
            "decode": median("{:.3f} s", lambda r: r.decode),
            "total": median("{:.3f} s", lambda r: r.seconds),
            "tokens/s": median("{:,.1f}", completion_rate),
            "cached": f"{run.cached_tokens / run.prompt_tokens:.1%}",
            "first token": median("{:.3f} s", lambda r: r.first_token),
            "step": median("{:.4f} s", lambda r: r.steps),
            "cache": f"{max(r.peak_cache for r in runs) / 2**20:,.1f} MiB",
        }
        if not run.first_token:  # a server that does not report its steps
            row |= dict.fromkeys(("prefill", "decode", "first token", "step", "cache"), "–")
        rows.append((name, *row.values(), f"{agrees[name]:.0%}", f"× {times[name]:.2f}"))
    return table(header, rows)


PARTS = {
    "gathering": ("gather blocks",),
    "padding": ("build batch",),
    "tables": ("block tables", "schedule"),
    "writing": ("cache write",),
    "attention": ("attention",),
    "the rest": ("model", "sampling", "decode", "step"),
}
"""The parts of a decode step, and the spans whose own time is in each. Gathering and padding are the copies."""


def step_parts(run: Run) -> dict[str, float]:
    """Return the mean seconds of each part of a decode step. The parts add up to the step.

    The beginning of a batch, with its token ids and positions, counts as padding.
    """
    prefills = {span.step for span in run.profile.spans if span.name == "prefill"}
    decodes = Profile()
    decodes.spans = [span for span in run.profile.spans if span.step not in prefills]
    own = {name: total.own for name, total in decodes.by_name().items()}
    steps = max(1, len(run.steps))
    return {part: sum(own.get(name, 0.0) for name in names) / steps for part, names in PARTS.items()}


def source_table(title: str, compared: Mapping[str, Sequence[Run]]) -> str:
    """Return the throughput table of lesson 9's source: each mode with block tensors and with paged attention.

    Below it: the milliseconds of each part of a decode step, and the ratio that would remain without any copies. All
    values are medians over runs, and a ratio is the median of the ratios of one round, with the smallest and largest.
    """
    rates, parts = [], []
    for name, runs in compared.items():
        mode, _, memory = name.partition(", ")
        slow = compared[f"{mode}, block tensors"]
        of_runs = [step_parts(run) for run in runs]
        median = {part: statistics.median(one[part] for one in of_runs) for part in PARTS}
        step, rounds = sum(median.values()), list(zip(slow, runs, strict=True))
        rate, decode = (statistics.median(map(measured, runs)) for measured in (completion_rate, decode_rate))
        row = [name, f"{rate:,.1f}", f"{decode:,.1f}", f"{1e3 * step:,.1f} ms"]
        row += [f"{1e3 * (median['gathering'] + median['padding']):,.1f} ms"]
        if memory == "paged":
            row += [_ratios([base.seconds / run.seconds for base, run in rounds])]
            row += [_ratios([base.decode / run.decode for base, run in rounds])]
            row += [_ratios([_without_copies(base) / _without_copies(run) for base, run in rounds])]
        rates.append((*row, *[""] * (8 - len(row))))
        parts.append((name, *(f"{1e3 * seconds:,.1f} ms" for seconds in median.values())))
    total = ("tokens/s", "decoding", "step", "copying", "× in all", "× decoding", "× without copies")
    return table((title, *total), rates) + "\n\n" + table(("a decode step", *PARTS), parts)


def _without_copies(run: Run) -> float:
    """Return the seconds of a decode step, less what it copies."""
    parts = step_parts(run)
    return sum(parts.values()) - parts["gathering"] - parts["padding"]


def _ratios(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f})"


def _both(runs: Sequence[Run], measured: Callable[[Run], float | Sequence[float]], unit: str) -> str:
    values = _all(runs, measured)
    return f"{_median(values):.6f}/{statistics.fmean(values or [0.0]):.6f} {unit}"


def _all(runs: Sequence[Run], measured: Callable[[Run], float | Sequence[float]]) -> list[float]:
    values = [measured(run) for run in runs]
    return [one for value in values for one in (value if isinstance(value, Sequence) else [value])]


def _median(values: Sequence[float]) -> float:
    return statistics.median(values or [0.0])


def records(
    model_name: str, model: nn.Module, workload: Workload, compared: Mapping[str, Sequence[Run]]
) -> list[Record]:
    """Return records of the total time, the decode step and the first token of each engine.

    The work of a total is every token that the prefix cache did not serve. The work of a decode step is its tokens.
    A decode step reads the weights, and K and V of its requests. The limiting rates are measured on a GPU only.
    """
    weight = next(model.parameters())
    about = surroundings(weight.device) | {"dtype": str(weight.dtype).removeprefix("torch.")}
    rates = {"matmul": None, "copy": None}
    if weight.device.type == "cuda":
        rates = {"matmul": matmul_rate(weight.device, weight.dtype), "copy": copy_bandwidth(weight.device)}
    prompts, shape = workload.prompts, dict(zip(Workload._fields[1:4], workload[1:4], strict=True))
    found = []
    for name, runs in compared.items():
        measured = {
            "total": ([r.seconds for r in runs], "matmul", _work(model, runs[0])),
            "decode step": (_all(runs, lambda r: r.steps), "copy", _work_of_a_step(model, runs[0])),
            "first token": (_all(runs, lambda r: r.first_token), "matmul", (0, 0)),
        }
        for what, (seconds, limit, (nbytes, flops)) in measured.items():
            if not seconds:  # no decode step: every step had tokens of a prompt
                continue
            spread = Spread.of(seconds)
            record = Record(
                what=f"{model_name}, {prompts} prompts, {name}: {what}",
                shape=shape,
                how=f"host clock, {len(runs)} runs, engines in turns",
                bytes=nbytes,
                flops=flops,
                limit=limit,
                limit_rate=rates[limit] if flops else None,
                seconds=spread.median,
                spread=spread.high - spread.low,
                **about,
            )
            found.append(record)
    return found


def _work(model: nn.Module, run: Run) -> tuple[int, int]:
    """Return (bytes of K and V to write, FLOPs) of all tokens that were computed."""
    kv_bytes, weights, score = _costs(model)
    tokens = run.prompt_tokens - run.cached_tokens + run.completion_tokens - len(run.token_ids)
    return tokens * kv_bytes, int(tokens * (2 * weights + score * _context(run) / 2))


def _work_of_a_step(model: nn.Module, run: Run) -> tuple[int, int]:
    """Return (bytes of weights, K and V to read, FLOPs) of the mean step that only decodes."""
    kv_bytes, weights, score = _costs(model)
    batch = (run.completion_tokens - len(run.token_ids)) / max(1, len(run.steps))
    itemsize = next(model.parameters()).element_size()
    return (
        int(weights * itemsize + batch * _context(run) * kv_bytes),
        int(batch * (2 * weights + score * _context(run))),
    )


def _costs(model: nn.Module) -> tuple[int, int, int]:
    """Return the bytes of K and V of a token, the weights that multiply a token, and the FLOPs of a query and a key."""
    config = model.config
    channels = config.num_hidden_layers * config.head_dim
    itemsize = next(model.parameters()).element_size()
    weights = sum(p.numel() for p in model.parameters())  # with the embedding, which is also GPT-2's head
    return 2 * channels * config.num_key_value_heads * itemsize, weights, 4 * channels * config.num_attention_heads


def _context(run: Run) -> float:
    """Return the mean number of tokens before a generated token."""
    return (run.prompt_tokens + run.completion_tokens / 2) / len(run.token_ids)
