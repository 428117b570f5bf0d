"""Requests that arrive over time: latency and goodput of the schedulers at several rates (lesson 9).

    python -m pagewise.experiments.engine_arrivals --plot arrivals.png
    python -m pagewise.experiments.engine_arrivals --rates 4 8 16 --url http://127.0.0.1:8000

Requests arrive at random, at a given mean rate (a Poisson process). Two latencies matter to a client: the time to the
first token, and the time between two tokens. A request meets its objectives if both are short enough. Goodput is the
number of such requests per second (Zhong et al. 2024, DistServe). Four engines serve the same requests in turns:

- naive: one request at a time.
- static: all waiting requests form a batch, which runs until its last request has ended.
- continuous: requests join at every step, and a prompt is computed whole.
- continuous, chunked: a step computes at most `CHUNK` tokens, so a long prompt delays other requests only a little.

With `--url`, the requests go to a running server of `pagewise.engine.serve` instead.
"""

import argparse
import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from pagewise.engine import LLM, SamplingParams
from pagewise.experiments.engine_workload import Workload
from pagewise.tools.progress import progress
from pagewise.tools.records import table
from pagewise.tools.timing import rounds_at_most

CHUNK = 128  # tokens of a step, in the engine that computes prompts in chunks
LOADS = (0.25, 0.5, 0.75, 0.9, 1.1)  # default rates, as shares of the rate that continuous batching can serve
SLACK = 10.0  # default objectives, as multiples of the latencies of a request that is served alone


class Arrival(NamedTuple):
    """A request, and its time of arrival in seconds after the beginning."""

    seconds: float
    prompt: list[int]
    sampling: SamplingParams


class Served(NamedTuple):
    """The times of a request in seconds after the beginning: its arrival and each of its tokens."""

    arrival: float
    tokens: list[float]

    @property
    def first_token(self) -> float:
        """The time from the arrival to the first token."""
        return self.tokens[0] - self.arrival

    @property
    def gaps(self) -> list[float]:
        """The times between neighbouring tokens."""
        return list(np.diff(self.tokens))

    @property
    def mean_gap(self) -> float:
        """The mean time between neighbouring tokens, or 0 for a single token."""
        return (self.tokens[-1] - self.tokens[0]) / max(1, len(self.tokens) - 1)


class Objectives(NamedTuple):
    """The longest time to the first token, and the longest mean time between tokens, in seconds."""

    first_token: float
    gap: float


Server = Callable[[Sequence[Arrival]], list[Served]]


def poisson_arrivals(
    rate: float, prompts: Sequence[list[int]], sampling: Sequence[SamplingParams], seed: int
) -> list[Arrival]:
    """Return the prompts as requests that arrive at `rate` requests per second on average, independently.

    Raises:
        ValueError: rate is not above 0.
    """
    if not rate > 0:
        raise ValueError(f"rate = {rate} must be above 0 requests per second")
    chance, now, arrivals = random.Random(seed), 0.0, []
    for prompt, params in zip(prompts, sampling, strict=True):
        now += chance.expovariate(rate)
        arrivals.append(Arrival(now, prompt, params))
    return arrivals


def serve_arrivals(llm: LLM, arrivals: Sequence[Arrival]) -> list[Served]:
    """Step through the engine and give it each request when it arrives. Return the times of all requests."""
    served = [Served(arrival.seconds, []) for arrival in arrivals]
    coming = deque(zip(arrivals, served, strict=True))
    begin = time.perf_counter()
    while coming or llm.has_unfinished:
        while coming and coming[0][0].seconds <= time.perf_counter() - begin:
            (_, prompt, sampling), times = coming.popleft()

            def note(piece, tokens=times.tokens) -> None:
                tokens.extend([time.perf_counter() - begin] * len(piece.token_ids))

            llm.add_request(prompt, sampling, listener=note)
        if llm.has_unfinished:
            llm.step()
        else:
            time.sleep(max(0.0, coming[0][0].seconds - (time.perf_counter() - begin)))
    return served


def serve_over_http(url: str, arrivals: Sequence[Arrival]) -> list[Served]:
    """Send each request to the server at `url` when it arrives. Return the times at which the client has the tokens.

    A client sees text and not tokens. A token that ends in half a character has no text, and counts with the next one.
    """
    import httpx

    async def request(client: httpx.AsyncClient, model: str, arrival: Arrival, begin: float) -> Served:
        await asyncio.sleep(arrival.seconds - (time.perf_counter() - begin))
        sampling = {"max_tokens": arrival.sampling.max_tokens, "temperature": arrival.sampling.temperature}
        body = {"model": model, "prompt": arrival.prompt, "stream": True, "ignore_eos": True, "seed": 0} | sampling
        served = Served(arrival.seconds, [])
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise RuntimeError(f"the server answered {response.status_code}: {(await response.aread()).decode()}")
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    served.tokens.append(time.perf_counter() - begin)
        return served

    async def everyone() -> list[Served]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits, verify=False) as client:
            model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
            begin = time.perf_counter()
            return await asyncio.gather(*(request(client, model, arrival, begin) for arrival in arrivals))

    return asyncio.run(everyone())


class Point(NamedTuple):
    """One engine at one rate: latencies in seconds of all requests of all runs, goodput and tokens per second."""

    engine: str
    rate: float
    first_token: list[float]
    gaps: list[float]
    goodput: float
    tokens_per_second: float

    @classmethod
    def of(cls, engine: str, rate: float, runs: Sequence[Sequence[Served]], objectives: Objectives) -> "Point":
        """Summarise the runs of one engine at one rate."""
        everyone = [served for run in runs for served in run]
        seconds = sum(max(served.tokens[-1] for served in run) for run in runs)
        in_time = [s for s in everyone if s.first_token <= objectives.first_token and s.mean_gap <= objectives.gap]
        first_token, gaps = [s.first_token for s in everyone], [gap for s in everyone for gap in s.gaps]
        tokens = sum(len(s.tokens) for s in everyone)
        return cls(engine, rate, first_token, gaps, len(in_time) / seconds, tokens / seconds)

    def percentiles(self, which: str) -> tuple[float, float, float]:
        """Return p50, p90 and p99 of "first_token" or "gaps"."""
        return tuple(np.percentile(getattr(self, which) or [0.0], (50, 90, 99)))


def sweep(
    servers: Mapping[str, Server],
    rates: Sequence[float],
    draw: Callable[[int], tuple[list[list[int]], list[SamplingParams]]],
    objectives: Objectives,
    *,
    repeats: int = 1,
) -> list[Point]:
    """Have every server serve the same arrivals at every rate, in turns.

    Args:
        draw: prompts and sampling parameters of a run, by its number.
        repeats: runs at each rate; fewer if `PAGEWISE_ROUNDS` in the environment says so.
    """
    repeats = rounds_at_most(repeats) or repeats
    turns = [(rate, name, run) for rate in rates for run in range(repeats) for name in servers]
    runs: dict[tuple[str, float], list[list[Served]]] = {}
    for rate, name, run in progress(turns, "arrivals"):
        arrivals = poisson_arrivals(rate, *draw(run), seed=run)
        runs.setdefault((name, rate), []).append(servers[name](arrivals))
    return [Point.of(name, rate, served, objectives) for (name, rate), served in runs.items()]


def overview(points: Sequence[Point]) -> str:
    """Return a table with a line per engine and rate."""
    header = ("engine", "arrive/s", "first token p50/p90/p99", "between tokens p50/p90/p99", "tokens/s", "goodput/s")
    rows = []
    for p in sorted(points, key=lambda p: p.rate):
        times = (" ".join(f"{1e3 * t:7.1f}" for t in p.percentiles(kind)) + " ms" for kind in ("first_token", "gaps"))
        rows.append((p.engine, f"{p.rate:.2f}", *times, f"{p.tokens_per_second:,.0f}", f"{p.goodput:.2f}"))
    return table(header, rows)


def engines(model: nn.Module, workload: Workload) -> dict[str, LLM]:
    """Return the four engines on one model, without a prefix cache and with memory for all requests at once."""
    sizes = {"num_blocks": workload.num_blocks(16), "max_num_seqs": workload.num_requests, "prefix_cache": False}
    whole = sizes | {"max_num_batched_tokens": workload.num_requests * (workload.prompt_tokens + 1)}
    return {
        "naive": LLM(model, scheduler="naive", **whole),
        "static": LLM(model, scheduler="static", **whole),
        "continuous": LLM(model, **whole),
        "continuous, chunked": LLM(model, **sizes, max_num_batched_tokens=CHUNK),
    }


def calibrated(serve: Server, prompts: list[list[int]], sampling: list[SamplingParams]) -> tuple[float, Objectives]:
    """Return the requests per second that a server reaches when all come at once, and objectives for this machine."""
    requests = [Arrival(0.0, *request) for request in zip(prompts, sampling, strict=True)]
    turns = [requests[:1], *([request] for request in requests[:4]), requests]  # the first turn loads and compiles
    _, *alone, together = [serve(turn) for turn in progress(turns, "the rate of this machine")]
    alone = [served for (served,) in alone]
    first_token = np.median([served.first_token for served in alone])
    gap = np.median([gap for served in alone for gap in served.gaps] or [first_token])
    seconds = max(served.tokens[-1] for served in together)
    return len(requests) / seconds, Objectives(SLACK * float(first_token), SLACK * float(gap))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    from pagewise.experiments.engine_benchmark import named_model
    from pagewise.tools.device import best_device

    parser = argparse.ArgumentParser(description="Serve requests that arrive at random, and compare latencies.")
    parser.add_argument("--model", default="tiny", help="tiny, gpt2-small (random weights), a folder or a hub id")
    parser.add_argument("--url", help="address of a running server that gets the requests")
    parser.add_argument(
        "--rates", type=float, nargs="+", metavar="R", help="requests per second; default: near the machine's limit"
    )
    parser.add_argument("--requests", type=int, default=40, help="requests at each rate (%(default)d)")
    parser.add_argument("--prompt-tokens", type=int, default=320, help="tokens of the longest prompt (%(default)d)")
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens of the longest answer (%(default)d)")
    parser.add_argument("--repeats", type=int, default=1, help="runs at each rate (%(default)d)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the latencies over the rates")
    asked = parser.parse_args(arguments)
    workload = Workload("mixed", asked.requests, asked.prompt_tokens, asked.new_tokens)
    device = best_device()
    model = named_model(asked.model, torch.float16 if device.type == "cuda" else torch.float32, device)
    servers = {name: partial(serve_arrivals, llm) for name, llm in engines(model, workload).items()}
    if asked.url:
        servers = {"server": partial(serve_over_http, asked.url)}
    requests = partial(workload.draw, model.config.vocab_size)
    rate, objectives = calibrated([*servers.values()][-1], *requests(0))
    rates = asked.rates or [round(load * rate, 2) for load in LOADS]
    points = sweep(servers, rates, requests, objectives, repeats=asked.repeats)
    limits = f"first token in {1e3 * objectives.first_token:.0f} ms, a token each {1e3 * objectives.gap:.0f} ms"
    print(f"{overview(points)}\n\nAll at once: {rate:.2f} requests per second. In time: {limits}.")
    if asked.plot:
        import matplotlib.pyplot as plt

        from pagewise.figures import latencies

        plt.switch_backend("agg")
        latencies(points, objectives)
        plt.savefig(asked.plot)


if __name__ == "__main__":
    main()
