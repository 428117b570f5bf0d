"""Our engine beside other engines: the same checkpoint, the same prompts, and the same tokens."""

import sys
from types import SimpleNamespace

import pytest
import torch
from in_process import CPU, run_on_a_cpu

from pagewise.engine import SamplingParams
from pagewise.experiments import engine_peers, engine_speed
from pagewise.experiments.engine_benchmark import variants
from pagewise.experiments.engine_peers import peers, vllm_server
from pagewise.experiments.engine_results import agreement, step_parts
from pagewise.experiments.engine_speed import GENERATE, NAIVE, OURS, SMALLER, STATIC, main, measure, measure_source
from pagewise.experiments.engine_workload import Workload
from pagewise.models import GPT2, GPT2Config

GREEDY = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (3, 2)]


@pytest.mark.slow
def test_everybody_continues_prompts_of_mixed_lengths_alike():
    workload = Workload("mixed", 3, 24, 16)
    options = {"only": (OURS, STATIC, GENERATE), "warmup_runs": 0, "repeat_runs": 1}
    ((model, measured, compared),) = measure(SMALLER, [workload], CPU, torch.float32, **options)
    assert (model.config.vocab_size, measured) == (512, workload)
    assert list(compared) == [STATIC, OURS, f"{OURS}, no prefix cache", GENERATE]
    assert set(agreement(compared).values()) == {1.0}
    answers = compared[GENERATE][0].token_ids
    assert sorted(map(len, answers)) == [2, 9, 16]  # from 1/8 to all
    assert len({token for answer in answers for token in answer}) > 15
    assert compared[GENERATE][0].prompt_tokens == compared[OURS][0].prompt_tokens == 3 + 13 + 24


@pytest.mark.slow
def test_a_peer_that_cannot_be_built_is_left_out_and_why_is_said(monkeypatch, capsys):
    def broken(*_):
        raise RuntimeError("no room")

    monkeypatch.setattr(engine_speed, "peers", lambda device: {"broken": broken})
    options = {"only": (NAIVE, "broken"), "warmup_runs": 0, "repeat_runs": 1}
    ((_, _, compared),) = measure(SMALLER, [Workload("identical", 1, 2, 1)], CPU, torch.float32, **options)
    assert list(compared) == [NAIVE]
    assert "broken is not compared with: RuntimeError: no room" in capsys.readouterr().out


@pytest.mark.parametrize("installed", [(), ("transformers",), ("vllm",), ("transformers", "vllm")], ids=str)
def test_those_are_asked_that_are_installed(installed, monkeypatch):
    names = {"transformers": GENERATE, "vllm": "vLLM"}
    monkeypatch.setattr(engine_peers.importlib.util, "find_spec", lambda name: name in installed or None)
    for device in (CPU, torch.device("cuda")):
        assert list(peers(device)) == [names[name] for name in installed]


def test_vllm_gets_token_ids_and_goes_on_after_end_tokens(monkeypatch, tmp_path):
    asked = {}

    class FakeLLM:
        def __init__(self, folder, **options):
            asked["folder"], asked["options"] = folder, options

        def generate(self, prompts, params, use_tqdm):
            asked["prompts"], asked["params"] = prompts, params
            answers = [SimpleNamespace(token_ids=(7,) * one["max_tokens"]) for one in params]
            return [SimpleNamespace(outputs=[answer], num_cached_tokens=1) for answer in answers]

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=FakeLLM, SamplingParams=dict))
    found = vllm_server(tmp_path, torch.device("cuda"), torch.float16)([[1, 2], [3, 4, 5]], GREEDY)
    assert (found.token_ids, found.prompt_tokens, found.cached_tokens) == ([[7, 7, 7], [7, 7]], 5, 2)
    assert asked["folder"] == str(tmp_path)
    assert asked["options"]["dtype"] == "float16"
    assert asked["prompts"] == [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [3, 4, 5]}]
    assert all(one["ignore_eos"] and one["temperature"] == 0 for one in asked["params"])


def test_the_command_prints_a_table_for_each_kind_of_prompts(monkeypatch, capsys):
    few = ["rivals", "--prompts", "shared", "distinct", "--only", "dense", "--requests", "2", "--prompt-tokens", "8"]
    monkeypatch.setattr(engine_speed, "peers", lambda device: {})
    run_on_a_cpu(main, *few, "--new-tokens", "2", "--repeats", "1")
    shared, distinct = capsys.readouterr().out.strip().split("\n\n")
    assert shared.startswith("a smaller GPT-2, shared prompts")
    assert distinct.startswith("a smaller GPT-2, distinct prompts")
    assert [line.split("  ")[0] for line in distinct.splitlines()[1:]] == [n for n in variants() if "dense" in n]


@pytest.mark.slow
def test_the_source_table_compares_both_memories_in_each_mode(capsys):
    few = ["source", "--requests", "3", "--prompt-tokens", "40", "--new-tokens", "4", "--repeats", "2"]
    run_on_a_cpu(main, *few)
    rates, parts = (table.splitlines() for table in capsys.readouterr().out.strip().split("\n\n"))
    engines = [f"{mode}, {memory}" for memory in ("block tensors", "paged") for mode in ("naive", "offline", "online")]
    assert [line.split("  ")[0] for line in rates[1:]] == engines
    assert [line.split("  ")[0] for line in parts[1:]] == engines
    assert [line.count("…") for line in rates[1:]] == [0, 0, 0, 3, 3, 3]  # ratios, each with its range


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["block tensors", "paged"])
def test_the_parts_of_a_step_add_up_to_the_step(memory):
    torch.manual_seed(0)
    model = GPT2(GPT2Config(64, 32, 2, 4)).requires_grad_(False)
    compared = measure_source(model, Workload("identical", 3, 40, 5), warmup_runs=0, repeat_runs=1)
    (run,) = compared[f"online, {memory}"]
    parts = step_parts(run)
    assert sum(parts.values()) == pytest.approx(sum(run.steps) / len(run.steps), rel=1e-6)
    assert (parts["gathering"] > 0) == (memory == "block tensors")
    assert all(seconds > 0 for part, seconds in parts.items() if part != "gathering")
