"""The benchmark: its requests, counts, sums, tables and command line."""

import contextlib
import io
import json
import re
from functools import partial

import pytest
import torch
from in_process import run_on_a_cpu

from pagewise.engine import LLM
from pagewise.experiments import engine_benchmark
from pagewise.experiments.engine_benchmark import main, variants
from pagewise.experiments.engine_results import agreement, overview, records, speedups, summary
from pagewise.experiments.engine_workload import Run, Workload, compare, serve
from pagewise.models import tiny_model
from pagewise.models.load import TINY
from pagewise.tools.records import keep, recorded

FOUR = ("--num-requests", "4", "--prompt-tokens", "40", "--max-new-tokens", "3", "--block-size", "8")
ONCE = ("--model", "tiny", "--device", "cpu", "--warmup-runs", "0", "--repeat-runs", "1", *FOUR)


def fields(out):
    """Return {engine: {field: text}} of all printed blocks."""
    found = {}
    for block in re.split(r"^=== ", out, flags=re.MULTILINE)[1:]:
        name, *lines = block.split("\n\n")[0].splitlines()
        found[name.removesuffix(" ===")] = dict(line.split(": ", 1) for line in lines)
    return found


# ------------------------------------------------------------------------------------------------ requests


@pytest.mark.parametrize(("kind", "common"), [("identical", 80), ("shared", 70), ("distinct", 0)])
def test_prompts_are_one_or_part_after_seven_eighths_or_share_nothing(kind, common):
    prompts, params = Workload(kind, 5, 80, 3).draw(257, seed=0)
    assert {len(prompt) for prompt in prompts} == {80}
    assert {one.max_tokens for one in params} == {3}
    assert len({tuple(prompt[:common]) for prompt in prompts}) == 1
    assert len({tuple(prompt[common : common + 8]) for prompt in prompts}) == (1 if kind == "identical" else 5)
    assert len(set(prompts[0])) > 10


def test_mixed_lengths_spread_from_an_eighth_to_all_independently():
    prompts, params = Workload("mixed", 50, 160, 32).draw(257, seed=0)
    lengths, budgets = [len(prompt) for prompt in prompts], [one.max_tokens for one in params]
    assert (min(lengths), max(lengths), sum(lengths) / 50) == (20, 160, pytest.approx(90, abs=1))
    assert (min(budgets), max(budgets), sum(budgets) / 50) == (4, 32, pytest.approx(18, abs=1))
    together = torch.corrcoef(torch.tensor([lengths, budgets], dtype=torch.float32))[0, 1]
    assert abs(together) < 0.5  # shuffled the same way, they would be 1


def test_a_round_draws_the_same_again_and_another_round_others():
    workload = Workload("identical", 2, 16, 3)
    assert workload.draw(257, seed=1) == workload.draw(257, seed=1)
    assert workload.draw(257, seed=1)[0] != workload.draw(257, seed=2)[0]


def test_requests_are_greedy_unless_asked_and_go_on_after_an_end_token():
    _, greedy = Workload(num_requests=2).draw(257, seed=0)
    _, sampled = Workload(num_requests=2).draw(257, seed=0, top_k=5, temperature=1.0)
    assert all(one.temperature == 0 and one.ignore_eos for one in greedy)
    assert [(one.top_k, one.temperature, one.seed) for one in sampled] == [(5, 1.0, 0), (5, 1.0, 1)]


def test_there_are_blocks_for_all_requests_at_once():
    assert Workload("distinct", 3, 31, 2).num_blocks(16) == 3 * 3


def test_every_combination_is_there_once():
    assert list(variants()) == [
        "naive, dense", "offline, dense", "online, dense",
        "naive, paged", "naive, paged, no prefix cache", "offline, paged", "offline, paged, no prefix cache",
        "online, paged", "online, paged, no prefix cache",
    ]  # fmt: skip
    assert variants()["offline, dense"] == {"scheduler": "static", "attention": "dense", "prefix_cache": False}
    assert variants(("online",), ("paged",), (False,)) == {
        "online, paged, no prefix cache": {"scheduler": "continuous", "attention": "paged", "prefix_cache": False}
    }


# ------------------------------------------------------------------------------------------------ runs


def served(**options):
    """Return a run of three requests of 12 tokens, with 4 new tokens each."""
    model, _ = tiny_model(device="cpu")
    return serve(LLM(model, num_blocks=3, **options), *Workload("distinct", 3, 12, 4).draw(257, seed=0))


def test_a_run_counts_tokens_and_steps_with_tokens_of_a_prompt_are_prefill_and_the_others_decode():
    run = served()
    assert (run.prompt_tokens, run.completion_tokens, run.cached_tokens) == (36, 12, 0)
    assert [len(answer) for answer in run.token_ids] == [4, 4, 4]
    assert len(run.steps) == 3  # the first of 4 tokens comes with the prompts
    assert 0 < run.prefill < run.seconds
    assert run.prefill + run.decode <= run.seconds


def test_requests_have_their_first_tokens_together_in_a_batch_and_one_after_the_other_without():
    together, alone = served(), served(scheduler="naive")
    assert together.token_ids == alone.token_ids
    assert min(together.first_token) > 0
    assert max(together.first_token) <= together.seconds - together.decode
    first, second, third = alone.first_token
    assert 0 < first < second < third < alone.seconds
    assert second - first > alone.steps[0] + alone.steps[1] + alone.steps[2]  # which the first request took


def test_each_round_has_its_own_prompts_and_warm_up_rounds_are_dropped():
    met = []

    def server(prompts, params):
        met.append((tuple(map(tuple, prompts)), len(met)))
        return Run(float(len(met)), 1, [])

    compared = compare({"a": server, "b": server}, Workload("distinct", 2, 8, 1), vocab_size=257, warmup_runs=1)
    assert {name: [run.seconds for run in runs] for name, runs in compared.items()} == {
        "a": [3.0, 5.0, 7.0], "b": [4.0, 6.0, 8.0],
    }  # fmt: skip
    prompts = [prompts for prompts, _ in met]
    assert prompts[::2] == prompts[1::2]  # the same for both
    assert len(set(prompts)) == 4


# ------------------------------------------------------------------------------------------------ results

RUN = Run(
    seconds=4.0,
    prompt_tokens=100,
    token_ids=[[1, 2, 3], [4, 5, 6]],
    prefill=1.0,
    steps=[1.0, 2.0],
    first_token=[0.5, 1.5],
    cached_tokens=25,
    peak_cache=3 * 2**20,
)


def test_a_summary_has_the_sources_fields():
    slower = RUN._replace(seconds=8.0, prefill=2.0, steps=[2.0, 4.0])
    (found,) = fields(summary("online, paged", [RUN, slower, slower], warmup_runs=1)).values()
    assert found == {
        "Requests": "2",
        "Warmup runs": "1",
        "Measured runs": "3",
        "Prefill time (add) p50/mean": "2.000000/1.666667 s",
        "Decode time (run) p50/mean": "6.000000/5.000000 s",
        "Total time p50/mean": "8.000000/6.666667 s",
        "Prompt tokens": "100",
        "Completion tokens": "6",
        "Total tokens": "106",
        "Throughput (completion,decode) p50/mean": "0.666667/0.888889 tokens/s",
        "Throughput (completion,total) p50/mean": "0.750000/1.000000 tokens/s",
        "Throughput (total,total) p50/mean": "13.250000/17.666667 tokens/s",
        "Prefill served by the prefix cache": "25.0%",
        "Time to first token p50/mean": "1.000000/1.000000 s",
        "Time per decode step p50/mean": "2.000000/2.500000 s",
        "Peak cache memory": "3.00 MiB",
    }


def test_speedups_compare_runs_of_one_round():
    # the machine makes the second round twice as slow for both
    base = [RUN, RUN._replace(seconds=8.0)]
    ours = [RUN._replace(seconds=2.0), RUN._replace(seconds=4.0)]
    assert speedups({"base": base, "ours": ours}) == {"base": 1.0, "ours": 2.0}


def test_agreement_counts_requests_with_the_same_tokens():
    other = RUN._replace(token_ids=[[1, 2, 3], [4, 5, 7]])
    assert agreement({"base": [RUN, RUN], "ours": [RUN, other]}) == {"base": 1.0, "ours": 0.75}


def test_an_overview_has_a_line_for_a_server_that_tells_little():
    peer = Run(seconds=1.0, prompt_tokens=100, token_ids=RUN.token_ids)
    *_, ours, theirs = overview("title", {"ours": [RUN], "theirs": [peer]}).splitlines()
    assert ours.split()[-1] == "1.00"
    assert theirs.split()[-1] == "4.00"


def test_records_can_be_kept_and_read_again(tmp_path):
    model, _ = tiny_model()
    workload = Workload("distinct", 2, 50, 3)
    found = records("tiny", model, workload, {"online, paged": [RUN, RUN._replace(seconds=6.0)]})
    for record in found:
        keep(tmp_path / "engine.json", record)
    again = recorded(tmp_path / "engine.json")
    assert again == found
    assert [record.what for record in again] == [
        f"tiny, distinct prompts, online, paged: {what}" for what in ("total", "decode step", "first token")
    ]
    total, step, _ = again
    assert (total.seconds, total.shape) == (5.0, {"num_requests": 2, "prompt_tokens": 50, "max_new_tokens": 3})
    # K and V of a token: 4 layers, 2 KV heads of 32, float32; the cache served 25 of 100, without the last tokens
    kv_bytes = 2 * 4 * 2 * 32 * 4
    assert total.bytes == (100 - 25 + 6 - 2) * kv_bytes
    # 4 of 6 tokens in 2 steps: 2 in a step, 50 + 1.5 tokens before each; the weights once
    weights = sum(p.numel() for p in model.parameters())
    assert step.bytes == weights * 4 + int(2 * 51.5 * kv_bytes)
    assert step.flops == int(2 * (2 * weights + 4 * 4 * 8 * 32 * 51.5))


# ------------------------------------------------------------------------------------------------ command line


@pytest.fixture(scope="module")
def everything():
    """Return the printed fields of every engine, for identical and for distinct prompts."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([*ONCE]) == 0
    return out.getvalue()


@pytest.mark.slow
def test_tokens_and_the_share_of_the_prefix_cache_are_exact(everything):
    found = fields(everything)
    assert len(found) == 2 * 9
    for name, block in found.items():
        assert (block["Requests"], block["Prompt tokens"], block["Completion tokens"]) == ("4", "160", "12")
        assert block["Total tokens"] == "172"
        # 40 tokens share 4 whole blocks of 8, because one token must be computed; the first request finds no block
        served = 3 * 32 / 160 if name.endswith("paged, identical prompts") else 0
        assert block["Prefill served by the prefix cache"] == f"{served:.1%}", name


@pytest.mark.slow
def test_everybody_generates_the_same(everything):
    for kind in ("identical", "distinct"):
        rows = everything.split(f"tiny, {kind} prompts")[1].split("\n\n")[0].splitlines()[1:]
        found = {name: row for name, *row in (re.split(r"  +", row) for row in rows)}
        assert list(found) == list(variants())
        assert {row[8] for row in found.values()} == {"100%"}
        assert float(found["offline, dense"][-1][1:]) > 1  # a batch, over one by one


@pytest.mark.slow
def test_peak_memory_is_what_blocks_or_reservations_took_between_steps(everything):
    found = fields(everything)
    token = 2 * 4 * 2 * 32 * 4 / 2**20  # MiB of a token's K and V
    for name, tokens in {
        "naive, dense": 42,  # the last token is never written
        "offline, dense": 4 * 42,
        "naive, paged": 48,  # 6 blocks of 8 for 42 tokens
        "online, paged": 32 + 3 * 16,  # 4 blocks in common, 2 more each for three; the first has ended before them
        "online, paged, no prefix cache": 4 * 48,
    }.items():
        assert found[f"{name}, identical prompts"]["Peak cache memory"] == f"{token * tokens:.2f} MiB", name


def test_one_mode_is_dense_or_paged_as_asked(capsys):
    for flags, name in (
        ((), "offline, dense"),
        (("--paged-attn",), "offline, paged"),
        (("--paged-attn", "--no-prefix-cache"), "offline, paged, no prefix cache"),
    ):
        main([*ONCE, "--mode", "offline", *flags])
        assert list(fields(capsys.readouterr().out)) == [f"{name}, identical prompts"]


def test_runs_are_counted_and_sampling_flags_reach_the_requests(capsys, monkeypatch):
    calls = []
    monkeypatch.setattr(engine_benchmark, "serve", lambda llm, prompts, params: calls.append(params) or RUN)
    runs = ("--warmup-runs", "2", "--repeat-runs", "3")
    main(["--model", "tiny", "--mode", "naive", *runs, "--top-k", "40", "--top-p", "0.9", *FOUR])
    (block,) = fields(capsys.readouterr().out).values()
    assert (block["Warmup runs"], block["Measured runs"], len(calls)) == ("2", "3", 5)
    assert {(one.top_k, one.top_p, one.temperature) for params in calls for one in params} == {(40, 0.9, 1.0)}


def test_the_pair_of_the_source_is_block_tensors_and_paged_attention(capsys):
    main([*ONCE, "--mode", "offline", "--source"])
    pair = [f"offline, {memory}, identical prompts" for memory in ("block tensors", "paged")]
    assert list(fields(capsys.readouterr().out)) == pair


@pytest.mark.parametrize(
    "flags", [(), ("--no-stop-on-eos",), ("--do-sample",), ("--do-sample", "--top-k", "3")], ids=str
)
def test_all_requests_have_the_prompt_of_the_command_line_and_stop_at_end_tokens_unless_told(
    flags, monkeypatch, capsys
):
    calls = []
    monkeypatch.setattr(engine_benchmark, "serve", lambda llm, *requests: calls.append(requests) or RUN)
    main(["--checkpoint-path", str(TINY), "--prompt", "def é", "--mode", "online", "--repeat-runs", "1", *flags, *FOUR])
    for prompts, params in calls:
        assert prompts == [list("def é".encode())] * 4
        assert {one.ignore_eos for one in params} == {"--no-stop-on-eos" in flags}
        assert {one.temperature for one in params} == {float("--do-sample" in flags)}
        assert {one.top_k for one in params} == {3 if "--top-k" in flags else 0}


def test_other_libraries_serve_the_same_requests_where_they_are_installed(monkeypatch, capsys):
    built = []

    def build(folder, device, dtype):
        built.append((folder, device.type, dtype))
        return lambda prompts, params: RUN

    monkeypatch.setattr(engine_benchmark, "peers", lambda device: {"another": build})
    main([*ONCE, "--mode", "online", "--paged-attn", "--peers"])
    assert built == [(TINY, "cpu", torch.float32)]
    names = ["online, paged, identical prompts", "another, identical prompts"]
    assert list(fields(capsys.readouterr().out)) == names


def test_a_trace_of_each_engine_and_the_records_are_written(tmp_path, capsys):
    arguments = ("--mode", "online", "--paged-attn", "--profile", str(tmp_path / "traces"))
    main([*ONCE, *arguments, "--record", str(tmp_path / "engine.json")])
    assert f"[profile] wrote: {tmp_path}/traces/online_paged_identical.json" in capsys.readouterr().out
    events = json.loads((tmp_path / "traces" / "online_paged_identical.json").read_text())["traceEvents"]
    names = {event["name"] for event in events}
    assert {"step", "schedule", "prefill", "decode", "build batch", "block tables"} < names
    assert {"model", "cache write", "attention", "sampling", "aten::embedding"} < names
    assert len(recorded(tmp_path / "engine.json")) == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--prompt-tokens", "600"), "600 tokens and max_tokens = 3 exceed the model's context of 512"),
        (("--num-blocks", "2"), "num_blocks"),
        (("--device", "cuda"), "device is cuda, but torch finds no GPU here"),
        (("--top-p", "1.5"), "top_p must be above 0 and at most 1, got 1.5"),
        (("--model", "no/such/../folder"), "no/such/../folder"),
        (("--model", "gpt2-small", "--peers"), "--peers needs the folder of a checkpoint, got --model gpt2-small"),
        (("--peers", "--top-k", "3"), "--peers compares greedy answers"),
        (("--peers", "--prompt", "x"), "give --no-stop-on-eos"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_status_2(arguments, said, capsys):
    assert run_on_a_cpu(partial(main, [*ONCE, "--mode", "online", "--paged-attn", *arguments])) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert said in err


@pytest.mark.parametrize(
    "arguments", [("--mode", "fast"), ("--num-requests", "0"), ("--repeat-runs", "x"), ("--backend", "abacus")]
)
def test_flags_that_do_not_exist_or_fit_are_refused(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(list(arguments))
    assert arguments[0] in capsys.readouterr().err
