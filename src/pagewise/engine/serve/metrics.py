"""The server's metrics, for Prometheus (lesson 9).

Their names are vLLM's after another prefix, "pagewise_", so that a dashboard for vLLM needs little change. A request is
one prompt with all its choices. The tokens of a beam search count when the search has ended. The engine thread updates
the metrics after each step, before anyone hears of the step. A reader waits for no step.
"""

from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pagewise.engine import LLM
from pagewise.engine.request import Piece
from pagewise.engine.serve.answer import Answer


class Metrics:
    """The metrics of one server, in a registry of their own. The engine thread calls all methods."""

    def __init__(self, llm: LLM) -> None:
        self.registry = CollectorRegistry()
        self._llm = llm
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
        self._generated = metric(Counter, "generation_tokens", "Generated tokens, those of aborted requests included.")
        ended = metric(Counter, "request_success", "Ended requests, by choice 0.", labelnames=["finished_reason"])
        self._ended = {reason: ended.labels(reason) for reason in ("stop", "length", "error", "abort")}
        self.refused = metric(Counter, "request_refused", "Requests answered with 4xx.", labelnames=["status"])
        seconds = {"buckets": [0.001 * 2**k for k in range(18)]}  # bounds: a millisecond to two minutes
        self._first = metric(Histogram, "time_to_first_token_seconds", "From arrival to the first token.", **seconds)
        self._between = metric(Histogram, "inter_token_latency_seconds", "Between tokens of a choice.", **seconds)
        self._whole = metric(Histogram, "e2e_request_latency_seconds", "From arrival to the answer.", **seconds)

    def hear(self, piece: Piece, answer: Answer | None, index: int) -> None:
        """Count the tokens that a step has given to a choice of a request, if an answer waits for them."""
        self._generated.inc(len(piece.token_ids))
        if answer is None:
            return
        now, request, newest = perf_counter(), answer.requests[index], answer.newest[index]
        answer.num_tokens += len(piece.token_ids)
        if not newest:
            self._prompt_tokens.inc(len(request.prompt))
            if self._llm.memory.prefix_cache:
                self._queries.inc(len(request.prompt))
                self._hits.inc(request.num_cached_tokens)
            if piece.token_ids:
                answer.first = answer.first or now
                self._first.observe(now - answer.arrived)
        elif piece.token_ids and piece.choice in newest:
            self._between.observe(now - newest[piece.choice])
        newest[piece.choice] = now

    def end(self, answer: Answer, reason: str, *, answered: bool) -> None:
        """Count a request of an answer that has ended."""
        self._ended[reason].inc()
        if answered:
            self._whole.observe(perf_counter() - answer.arrived)

    def update(self) -> None:
        """Take over what the engine counts itself."""
        self._running.set(len(self._llm.scheduler.running))
        self._waiting.set(len(self._llm.scheduler.waiting))
        self._usage.set(self._llm.memory.usage)
        self._preemptions.inc(self._llm.scheduler.num_preemptions - self._num_preemptions)
        self._num_preemptions = self._llm.scheduler.num_preemptions
