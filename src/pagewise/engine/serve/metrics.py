"""The server's metrics, for Prometheus (lesson 9).

Their names are vLLM's after another prefix, so that a dashboard for vLLM needs little change:

    pagewise_num_requests_running                         requests that hold memory
    pagewise_num_requests_waiting                         requests that do not
    pagewise_kv_cache_usage_perc                          the share of the cache in use, from 0 to 1
    pagewise_num_preemptions_total                        preempted requests
    pagewise_prompt_tokens_total                          tokens of prompts, counted with the first generated token
    pagewise_prefix_cache_queries_total, …_hits_total     the same tokens, and those that the prefix cache had
    pagewise_generation_tokens_total                      generated tokens, those of aborted requests included
    pagewise_request_success_total{finished_reason=…}     "stop", "length" or "error" (of choice 0), "abort"
    pagewise_request_refused_total{status=…}              answers with a status from 400 to 499
    pagewise_time_to_first_token_seconds                  since the request arrived
    pagewise_inter_token_latency_seconds                  between two tokens of a choice
    pagewise_e2e_request_latency_seconds                  of requests that were answered

A request is one prompt with all its choices. The tokens of a beam search count when the search has ended.
The engine thread updates the metrics after each step, before anyone hears of the step. A reader waits for no step.
"""

from time import perf_counter
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pagewise.engine import LLM
from pagewise.engine.request import Piece, Request

REASONS = ("stop", "length", "error", "abort")
SECONDS = [0.001 * 2**k for k in range(18)]  # bounds of the histograms: a millisecond to two minutes


class _Course(NamedTuple):
    """A request in the engine: when it arrived, and when each of its choices got the newest token."""

    request: Request
    arrived: float
    newest: dict[int, float]


class Metrics:
    """The metrics of one server, in a registry of their own. The engine thread calls all methods but `refuse`."""

    def __init__(self, llm: LLM) -> None:
        self.registry = CollectorRegistry()
        self._llm = llm
        self._courses: dict[int, _Course] = {}  # by request id
        self._num_preemptions = llm.scheduler.num_preemptions  # so many are counted, or happened before

        def metric(kind: type, name: str, text: str, **options: object) -> Counter | Gauge | Histogram:
            return kind(name, text, namespace="pagewise", registry=self.registry, **options)

        self._running = metric(Gauge, "num_requests_running", "Requests that hold memory.")
        self._waiting = metric(Gauge, "num_requests_waiting", "Requests that wait for memory.")
        self._usage = metric(Gauge, "kv_cache_usage_perc", "Share of the KV cache in use, from 0 to 1.")
        self._preemptions = metric(Counter, "num_preemptions", "Preempted requests.")
        self._prompt_tokens = metric(Counter, "prompt_tokens", "Tokens of computed prompts.")
        self._queries = metric(Counter, "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = metric(Counter, "prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._generated = metric(Counter, "generation_tokens", "Generated tokens.")
        ended = metric(Counter, "request_success", "Requests that have ended.", labelnames=["finished_reason"])
        self._ended = {reason: ended.labels(reason) for reason in REASONS}
        self._refused = metric(Counter, "request_refused", "Requests answered with 4xx.", labelnames=["status"])
        seconds = {"buckets": SECONDS}
        self._first = metric(Histogram, "time_to_first_token_seconds", "From arrival to the first token.", **seconds)
        self._between = metric(Histogram, "inter_token_latency_seconds", "Between tokens of a choice.", **seconds)
        self._whole = metric(Histogram, "e2e_request_latency_seconds", "From arrival to the last token.", **seconds)

    def refuse(self, status: int) -> None:
        """Count an answer that refuses a request."""
        self._refused.labels(status).inc()

    def begin(self, request: Request, arrived: float) -> None:
        """Follow a request that the engine has now. It arrived at `arrived`, as `perf_counter` tells the time."""
        self._courses[request.id] = _Course(request, arrived, {})

    def hear(self, piece: Piece) -> None:
        """Count the tokens that a step has given to a choice."""
        self._generated.inc(len(piece.token_ids))
        course = self._courses.get(piece.request_id)
        if course is None or not piece.token_ids:
            return
        now = perf_counter()
        if not course.newest:
            self._first.observe(now - course.arrived)
            self._prompt_tokens.inc(len(course.request.prompt))
            if getattr(self._llm.memory, "prefix_cache", False):
                self._queries.inc(len(course.request.prompt))
                self._hits.inc(course.request.num_cached_tokens)
        elif piece.choice in course.newest:
            self._between.observe(now - course.newest[piece.choice])
        course.newest[piece.choice] = now

    def end(self, request_id: int, reason: str, *, answered: bool) -> None:
        """Count a request that has ended. Only its first end counts."""
        if (course := self._courses.pop(request_id, None)) is None:
            return
        self._ended[reason].inc()
        if answered:
            self._whole.observe(perf_counter() - course.arrived)

    def update(self) -> None:
        """Take over what the engine counts itself."""
        self._running.set(self._llm.num_running)
        self._waiting.set(self._llm.num_waiting)
        self._usage.set(self._llm.memory.usage)
        self._preemptions.inc(self._llm.scheduler.num_preemptions - self._num_preemptions)
        self._num_preemptions = self._llm.scheduler.num_preemptions
