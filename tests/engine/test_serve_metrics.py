"""GET /metrics: every number is compared with one that is counted in another way."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("uvicorn", reason="the server needs the extra `serve`")

import httpx
from prometheus_client.parser import text_string_to_metric_families
from serving import COMPLETION, serving, soon, tiny_llm

from pagewise.engine import llm as llm_module
from pagewise.engine.serve import answer as answer_module
from pagewise.engine.serve import engine_thread
from pagewise.engine.serve import metrics as metrics_module
from pagewise.engine.serve.answer import Answer

pytestmark = pytest.mark.usefixtures("shapes_unchecked")
REASONS = ("stop", "length", "error", "abort")


@pytest.fixture
def server():
    """A server of its own for each test, because its counters only rise."""
    with serving(tiny_llm(), max_queue=8) as server:
        yield server
        assert server.becomes_idle()


def read(server):
    """{name: value}, and {name{label}: value} of metrics with a label; without the buckets of histograms."""
    answer = server.http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = [sample for family in text_string_to_metric_families(answer.text) for sample in family.samples]
    labels = {id(sample): "".join(f"{{{value}}}" for value in sample.labels.values()) for sample in samples}
    return {
        sample.name.removeprefix("pagewise_") + labels[id(sample)]: sample.value
        for sample in samples
        if not sample.name.endswith(("_bucket", "_created"))
    }


def ended(metrics):
    """Return how many requests have ended, by reason."""
    return [metrics[f"request_success_total{{{reason}}}"] for reason in REASONS]


def test_a_new_server_has_every_metric_at_zero(server):
    metrics = read(server)
    assert set(metrics.values()) == {0.0}
    assert len(metrics) == 8 + len(REASONS) + 2 * 3


@pytest.mark.parametrize("stream", [False, True])
def test_counts_are_those_of_the_answers(server, stream):
    prompts = ["Each sequence has a block table", "Each sequence has a block table; tables may share blocks"]
    bodies = [
        {"prompt": prompts, "max_tokens": 9, "n": 2, "seed": 1, "ignore_eos": True},
        {"prompt": prompts[0], "max_tokens": 5, "temperature": 0},
        {"prompt": prompts[1], "max_tokens": 7, "temperature": 0, "stop": list("etaoinsr ")},
        {"prompt": prompts[1], "max_tokens": 4, "beam_width": 3, "ignore_eos": True},
        {"prompt": prompts[0], "max_tokens": 1},
    ]
    usages = [server.post(COMPLETION, body).json()["usage"] for body in bodies[:-1]]
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = server.post(COMPLETION, bodies[-1] | options)
    lines = answer.text.removesuffix("data: [DONE]\n\n").strip().split("\n\n")
    usages.append(httpx.Response(200, text=lines[-1].removeprefix("data: ")).json()["usage"])
    metrics = read(server)
    prompt_tokens, new = (sum(usage[kind] for usage in usages) for kind in ("prompt_tokens", "completion_tokens"))
    assert metrics["prompt_tokens_total"] == metrics["prefix_cache_queries_total"] == prompt_tokens
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert metrics["prefix_cache_hits_total"] == cached > 0
    assert metrics["generation_tokens_total"] == new
    assert ended(metrics) == [1, 5, 0, 0]
    assert metrics["time_to_first_token_seconds_count"] == metrics["e2e_request_latency_seconds_count"] == 6
    beams, other_choices = 3 * 4, 2 * 2 + 3
    assert metrics["inter_token_latency_seconds_count"] == new - beams - other_choices
    assert metrics["time_to_first_token_seconds_sum"] < metrics["e2e_request_latency_seconds_sum"]


def test_latencies_are_measured_from_arrival_and_between_tokens(server, monkeypatch):
    """Each step takes a second of this clock: 1 before the first token, and 4 between the 5 tokens."""
    seconds, step = [0.0], server.llm.step
    for module in (answer_module, engine_thread, metrics_module):
        monkeypatch.setattr(module, "perf_counter", lambda: sum(seconds))
    monkeypatch.setattr(server.llm, "step", lambda: seconds.append(1.0) or step())
    server.post(COMPLETION, {"prompt": "A", "max_tokens": 5, "ignore_eos": True})
    metrics = read(server)
    names = ("time_to_first_token_seconds_sum", "inter_token_latency_seconds_sum", "e2e_request_latency_seconds_sum")
    assert [metrics[name] for name in names] == [1.0, 4.0, 5.0]


@pytest.mark.slow
def test_an_answer_is_counted_before_its_client_has_it(server, monkeypatch):
    update = server.engine.metrics.update
    monkeypatch.setattr(server.engine.metrics, "update", lambda: time.sleep(0.2) or update())
    for number in (1, 2):
        server.post(COMPLETION, {"prompt": "A", "max_tokens": 2, "ignore_eos": True})
        metrics = read(server)
        assert ended(metrics) == [0, number, 0, 0]
        assert metrics["num_requests_running"] == metrics["kv_cache_usage_perc"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_requests_of_a_client_that_hangs_up_are_aborted_ones_and_their_tokens_count(server, monkeypatch, stream):
    counts, choose, step = [], llm_module.sample, server.llm.step
    monkeypatch.setattr(llm_module, "sample", lambda *a: counts.append(len(picks := choose(*a))) or picks)
    monkeypatch.setattr(server.llm, "step", lambda: time.sleep(0.05) or step())
    body = {"prompt": ["A longer prompt", "B"], "n": 2, "max_tokens": 400, "stream": stream, "ignore_eos": True}
    if stream:
        with server.http.stream("POST", COMPLETION, json=body) as answer:
            lines = answer.iter_lines()
            assert len([next(lines) for _ in range(10)]) == 10
    else:
        server.hang_up(body, when=lambda: sum(counts) > 8)
    assert server.becomes_idle()  # all blocks are free again
    metrics = read(server)
    assert ended(metrics) == [0, 0, 0, 2]
    assert metrics["generation_tokens_total"] == sum(counts) > 4
    assert metrics["prompt_tokens_total"] == len("A longer prompt") + len("B")
    assert metrics["inter_token_latency_seconds_count"] == sum(counts) - 4
    assert metrics["time_to_first_token_seconds_count"] == 2
    assert metrics["e2e_request_latency_seconds_count"] == 0
    assert metrics["num_requests_running"] == metrics["num_requests_waiting"] == metrics["kv_cache_usage_perc"] == 0


def test_refused_requests_count_by_status_and_nowhere_else(server):
    before = read(server)
    server.post(COMPLETION, {"prompt": ""})
    server.post(COMPLETION, {"prompt": "A", "temperature": -1})
    server.post(COMPLETION, b" " * (2**23 + 1))
    server.http.get("/v1/nothing")
    with server.engine.reserved(Answer("x", "tiny"), 8):
        assert server.post(COMPLETION, {"prompt": "A"}).status_code == 429
    refused = {"400": 2, "413": 1, "404": 1, "429": 1}
    assert read(server) == before | {f"request_refused_total{{{code}}}": n for code, n in refused.items()}


def test_gauges_say_what_runs_and_waits_and_is_in_use_after_each_step():
    with serving(tiny_llm(num_blocks=64, max_num_seqs=2)) as server, ThreadPoolExecutor() as threads:
        go, step, in_use = threading.Semaphore(0), server.llm.step, []
        server.llm.step = lambda: (go.acquire(), step(), in_use.append(server.llm.memory.stats().used))[1]
        body = {"prompt": ["A" * 40, "B", "C"], "max_tokens": 3, "ignore_eos": True}
        answer = threads.submit(server.post, COMPLETION, body)
        assert soon(lambda: read(server)["num_requests_waiting"] == 3)
        seen = []
        for number in range(1, 7):
            go.release()
            assert soon(lambda number=number: len(in_use) == number and server.engine._jobs._work_queue.empty())
            time.sleep(0.05)
            metrics = read(server)
            names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            seen.append([metrics[name] for name in names])
        assert answer.result().status_code == 200
        assert [one[:2] for one in seen] == [[2, 1], [2, 1], [0, 1], [1, 0], [1, 0], [0, 0]]
        assert [one[2] for one in seen] == [used / 64 for used in in_use]
        assert in_use[0] == 4
        server.llm.step = step


def test_preemptions_are_counted():
    with serving(tiny_llm(num_blocks=6, block_size=8)) as server:
        answer = server.post(COMPLETION, {"prompt": ["A", "B", "C"], "max_tokens": 20, "ignore_eos": True})
        assert answer.status_code == 200
        assert read(server)["num_preemptions_total"] == server.llm.scheduler.num_preemptions > 0
        assert read(server)["prompt_tokens_total"] == 3


def test_without_a_prefix_cache_nothing_is_looked_up_in_it():
    for options in ({"prefix_cache": False}, {"attention": "dense"}):
        with serving(tiny_llm(**options)) as server:
            server.post(COMPLETION, {"prompt": "A" * 50, "max_tokens": 1})
            metrics = read(server)
            assert (metrics["prompt_tokens_total"], metrics["prefix_cache_queries_total"]) == (50, 0)


def test_two_servers_of_one_process_count_for_themselves():
    with serving(tiny_llm()) as one, serving(tiny_llm()) as other:
        one.post(COMPLETION, {"prompt": "A", "max_tokens": 3, "ignore_eos": True})
        assert read(one)["generation_tokens_total"] == 3
        assert read(other)["generation_tokens_total"] == 0


def test_reading_does_not_wait_for_a_step(server, monkeypatch):
    go, step = threading.Event(), server.llm.step
    monkeypatch.setattr(server.llm, "step", lambda: (go.wait(20), step())[1])
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(server.post, COMPLETION, {"prompt": "A", "max_tokens": 2})
        assert soon(lambda: read(server)["num_requests_waiting"] == 1)
        assert read(server)["num_requests_waiting"] == 1
        assert not answer.done()
        go.set()
        assert answer.result().status_code == 200


def test_a_step_that_fails_ends_its_requests_with_an_error(server, monkeypatch):
    run, count = server.llm.runner.run, iter(range(100))
    monkeypatch.setattr(server.llm.runner, "run", lambda chunks: run(chunks) if next(count) != 3 else 1 / 0)
    assert server.post(COMPLETION, {"prompt": ["A", "B"], "max_tokens": 9, "ignore_eos": True}).status_code == 500
    assert soon(lambda: ended(read(server)) == [0, 0, 2, 0])
    assert read(server)["generation_tokens_total"] == 6
    assert read(server)["e2e_request_latency_seconds_count"] == 0


def test_a_request_that_ends_while_its_client_hangs_up_ends_once(server, monkeypatch):
    """Its last step fails after it ended, it is dropped, and the next step tells of its output."""
    step, dropped = server.llm._step, []

    def fail_once_done():
        step()
        if not dropped:
            ((answer, _),) = server.engine._answers.values()
            dropped.append(server.engine._jobs.submit(server.engine._drop, answer))
            raise RuntimeError("boom")

    monkeypatch.setattr(server.llm, "_step", fail_once_done)
    server.hang_up({"prompt": "A", "max_tokens": 1}, when=lambda: dropped and dropped[0].done())
    assert server.becomes_idle()
    assert ended(read(server)) == [0, 0, 0, 1]
    assert read(server)["generation_tokens_total"] == 1
    assert server.post(COMPLETION, {"prompt": "A", "max_tokens": 1}).status_code == 200
