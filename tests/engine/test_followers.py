"""An engine of several processes gives the tokens of an engine of one process, and no process outlives the others.

To start a process takes seconds. Therefore most tests share two processes of `Processes`, or one engine with a follower
of its own, or they run followers as threads of this process.
"""

import argparse
import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import threading
from multiprocessing.process import BaseProcess

import pytest
import torch
import torch.distributed as dist
from checkpoints import ARCHITECTURES, VOCAB, save_random
from engine_cases import serve, serve_differently, tokens_of
from eventually import has_ended, soon
from forked_server import forked_server, torchrun
from test_model_runner import captured_graphs  # noqa: F401  the fixture `captured`

from pagewise.distributed import Processes
from pagewise.engine import LLM, SamplingParams, config, leader
from pagewise.engine.__main__ import main
from pagewise.engine.batch import Batch
from pagewise.engine.command_line import add_engine_options
from pagewise.engine.leader import GroupLost
from pagewise.engine.model_runner import DecodeGraphs
from pagewise.flash_decoding_plus_plus import Dataflow
from pagewise.flash_decoding_plus_plus.dataflow import device_label
from pagewise.models import Llama, LlamaConfig, load_model
from pagewise.models.load import TINY

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [4], [1, 2, 3, 4, 5, 6, 7, 8, 90, 3], [30, 31, 32, 33, 34]]
SAMPLING = [
    SamplingParams(max_tokens=24, temperature=0),
    SamplingParams(max_tokens=20, n=3, seed=5, top_p=0.95),
    SamplingParams(max_tokens=24, seed=3, repetition_penalty=1.2),
    SamplingParams(max_tokens=9, beam_width=3),
]
CRAMPED = {"num_blocks": 24, "block_size": 4, "max_num_batched_tokens": 8, "device": "cpu"}
TWO_KV_HEADS = {"qwen2": {"num_attention_heads": 4, "num_key_value_heads": 2}, "qwen3": {"num_key_value_heads": 2}}


def llama(**options):
    """A random model whose heads two or three processes can share."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 8}
    model = Llama(LlamaConfig(VOCAB, 48, 36, 2, **heads | options, max_position_embeddings=256))
    for weight in model.parameters():
        weight.data = torch.randn_like(weight) * 0.3 + (weight.dim() == 1)
    return model


# ------------------------------------------------------------------------------------------------ the same tokens


@pytest.fixture(scope="module")
def two():
    with Processes(2) as processes:
        yield processes


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = {name: tmp_path_factory.mktemp(name) for name in ARCHITECTURES}
    for name, folder in found.items():
        save_random(name, folder, **TWO_KV_HEADS.get(name, {}))
    return found


WAYS = {  # blocks of two processes have 4 tokens, as those of one process
    "tensor_parallel": {"tensor_parallel": 2},
    "context_parallel": {"context_parallel": 2, "block_size": 2},
}


@pytest.fixture(scope="module")
def both(two, folders):
    """Return what each of two processes has of each architecture, by the kind of parallelism."""
    keys = [(name, way) for name in folders for way in WAYS]
    jobs = [(folders[name], CRAMPED | WAYS[way]) for name, way in keys]
    return dict(zip(keys, zip(*two.run(serve, jobs, PROMPTS, SAMPLING), strict=True), strict=True))


@pytest.fixture(scope="module")
def right(folders):
    """The tokens of one process, for each architecture."""
    return {name: tokens_of(LLM(folder, **CRAMPED), PROMPTS, SAMPLING) for name, folder in folders.items()}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_two_processes_give_the_tokens_of_one(both, right, architecture, way):
    """Greedy tokens, samples that share blocks, and beams: with chunked prompts, preemption and the prefix cache."""
    first, _ = both[architecture, way]
    assert first["tokens"] == right[architecture]
    assert first["cached"] >= 4
    assert first["preemptions"] > 0


THREE = {"context_parallel": 3, "block_size": 2, "num_blocks": 16}
FOUR = {"context_parallel": 2, "tensor_parallel": 2, "block_size": 2}
MESHES = [  # with four processes, two have a copy of the same KV head of qwen2
    (3, [("llama-3", THREE), ("gpt2", THREE)]),
    (4, [("llama-3", FOUR), ("gpt2", FOUR), ("qwen2", {"tensor_parallel": 4})]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("count", "jobs"), MESHES, ids=["3", "4"])
def test_larger_meshes_give_the_tokens_of_one_process_with_preemption_and_prefix_cache(count, jobs, folders, right):
    with Processes(count) as processes:
        first, *_ = processes.run(serve, [(folders[name], CRAMPED | how) for name, how in jobs], PROMPTS, SAMPLING)
    for (name, how), found in zip(jobs, first, strict=True):
        assert found["tokens"] == right[name], (name, how)
        assert found["cached"] >= 4, (name, how)
        assert found["preemptions"] > 0, (name, how)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_process_holds_its_share_of_weights_and_cache_and_no_more(both, folders, architecture):
    whole = LLM(folders[architecture], **CRAMPED)
    weights = dict(whole.model.named_parameters())
    split = re.compile(r"([qkv]|gate|up)_proj|c_attn|c_fc|(o|down|c)_proj.weight")
    vocabulary = re.compile("embed_tokens|wte|lm_head")
    for rows, process in zip((49, 48), both[architecture, "tensor_parallel"], strict=True):
        parts = {name: weight.tensor_split(2)[0] if split.search(name) else weight for name, weight in weights.items()}
        parts |= {name: weight[:rows] for name, weight in weights.items() if vocabulary.search(name)}
        assert 2 * process["cache"] == whole.memory.nbytes
        assert process["weights"] == sum(part.nbytes for part in parts.values())
    for process in both[architecture, "context_parallel"]:
        assert 2 * process["cache"] == whole.memory.nbytes
        assert process["weights"] == sum(weight.nbytes for weight in weights.values())


@pytest.mark.slow
def test_a_prompt_longer_than_the_memory_of_a_process_is_served(in_threads):
    model, prompt = llama(), [1 + i % (VOCAB - 1) for i in range(60)]
    options = {"num_blocks": 9, "block_size": 4, "max_num_batched_tokens": 16}
    with pytest.raises(ValueError, match="and the memory has 9"):
        LLM(model, **options).generate([prompt], SAMPLING[0])
    with LLM(model, **options, context_parallel=3) as llm:
        assert llm.memory.cache.num_blocks * llm.memory.cache.block_size == 36
        assert tokens_of(llm, [prompt], SAMPLING[0]) == tokens_of(
            LLM(model, **options | {"num_blocks": 27}), [prompt], SAMPLING[0]
        )


@pytest.mark.slow
def test_options_that_process_0_decides_alone_change_no_token(two, folders):
    """Drafts, and a float8 cache. A table of products runs the model once before the first step, in every process."""
    model, _ = load_model(folders["llama-3"])
    table = Dataflow(device_label(torch.device("cpu")), torch.float32, {(VOCAB, 64): (1, 1), (32, 64): (1, 1)})
    prompts, options = [[1, 2, 1, 2, 1, 2], *PROMPTS], {"num_blocks": 64, "device": "cpu"}
    ways = [{"speculate": 3}, {"kv_cache_dtype": "float8_e4m3fn", "k_scale": 0.1}, {"dataflow": table}]
    greedy = SamplingParams(max_tokens=24, temperature=0)
    jobs = [
        (folders["llama-3"], options | way | {kind: 2})
        for kind in ("tensor_parallel", "context_parallel")
        for way in ways
    ]
    first, _ = two.run(serve, jobs, prompts, greedy)
    for found, way in zip(first, ways * 2, strict=True):
        assert found["tokens"] == tokens_of(LLM(model, **options | way | {"device": None}), prompts, greedy)
    assert first[0]["accepted"] > 0
    assert first[1]["cache"] * 4 == first[0]["cache"]


@pytest.mark.slow
def test_the_options_of_process_0_count(two, folders, right):
    """Process 1 asks for a part of the sequences, for other blocks and for another kind of parallelism."""
    options = [CRAMPED | WAYS["tensor_parallel"], CRAMPED | WAYS["context_parallel"] | {"num_blocks": 2}]
    first, _ = two.run(serve_differently, folders["llama-3"], options, PROMPTS, SAMPLING)
    assert first[0]["tokens"] == right["llama-3"]


# ------------------------------------------------------------------------------------------------ in threads


@pytest.fixture
def in_threads(monkeypatch):
    """Let followers be threads of this process, which take turns often."""
    running, interval = [], sys.getswitchinterval()
    sys.setswitchinterval(1e-4)

    class Follower(threading.Thread):
        exitcode, kill = None, lambda self: None

        def __init__(self, *, target, args, daemon):
            super().__init__(target=target, args=args)
            running.append(self)

    monkeypatch.setattr(leader, "SPAWN", type("Spawn", (), {"Process": Follower}))
    monkeypatch.setattr(leader, "start", Follower.start)
    monkeypatch.setattr(os, "_exit", lambda status: None)
    yield running
    sys.setswitchinterval(interval)
    for thread in running:
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.slow
def test_all_processes_replay_graphs_of_the_same_decode_steps(in_threads, captured, monkeypatch):
    """The graphs are replayed on the CPU, and each replay computes the all-reduces of its process again."""
    ModelRunner = leader.ModelRunner

    def with_graphs(*args):
        runner = ModelRunner(*args)
        runner._graphs = DecodeGraphs(runner, args[1])
        return runner

    monkeypatch.setattr(leader, "ModelRunner", with_graphs)
    prompts, params = PROMPTS[1:], SamplingParams(max_tokens=8, temperature=0)
    with LLM(llama(), **CRAMPED, tensor_parallel=2) as llm:
        found = tokens_of(llm, prompts, params)
    assert found == tokens_of(LLM(llama(), **CRAMPED), prompts, params)
    assert len(captured) == 2 * len(set(captured)) > 0
    assert len(captured.replayed) > 0
    assert captured.replayed.count(4) % 2 == captured.replayed.count(1) % 2 == 0


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_a_model_of_the_caller_is_shared_by_any_number_that_divides_its_heads(count, in_threads):
    model = llama(qkv_bias=True)
    with LLM(model, **CRAMPED | {"device": None}, tensor_parallel=count) as llm:
        assert tokens_of(llm, PROMPTS, SAMPLING) == tokens_of(LLM(model, **CRAMPED), PROMPTS, SAMPLING)
        assert (llm.model.num_kv_heads, model.num_kv_heads) == (6 // count, 6)
        assert llm.memory.num_free_blocks == CRAMPED["num_blocks"]
        sizes = [llm.memory.nbytes, LLM(model, **CRAMPED).memory.nbytes]
        assert sizes[0] * count == sizes[1]


def test_a_closed_engine_says_so(in_threads):
    with LLM(llama(), num_blocks=8, tensor_parallel=2) as llm:
        pass
    llm.close()
    with pytest.raises(GroupLost, match="the engine is closed: make a new LLM"):
        llm.generate(PROMPTS, SAMPLING)
    assert not llm.has_unfinished


@pytest.mark.parametrize("error", [SystemExit(3), ValueError("no")], ids=repr)
def test_an_exit_or_an_error_in_the_middle_of_a_step_gives_the_group_up(error):
    group, sent = leader.Leader.__new__(leader.Leader), []
    group.what, group.lost, group._pid, group._processes, group._folder = "context = 2", "", os.getpid(), {}, ""
    group._team = type("Team", (), {"send": sent.append, "leave": lambda: None})
    batch = Batch([], *[torch.zeros(1)] * 7, copies=[(1, 2)])
    with pytest.raises(SystemExit if isinstance(error, SystemExit) else GroupLost), group.step(batch):
        raise error
    assert group.lost == f"process 0 of context = 2 raised {type(error).__name__}: {error}: make a new LLM"
    assert [copies for copies, _ in sent] == [[(1, 2)]]  # no message ends followers that are in the middle of a step


def test_an_engine_that_nobody_holds_ends_its_followers(in_threads):
    llm = LLM(llama(), num_blocks=8, tensor_parallel=2)
    (thread,) = in_threads
    assert thread.is_alive()
    del llm
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("error", [{"backend": "cuda", "block_size": 3}, {"unified_max": 1}])
def test_an_option_that_is_refused_after_the_start_ends_the_followers(error, in_threads):
    with pytest.raises((ValueError, TypeError)):
        LLM(llama(), num_blocks=8, tensor_parallel=2, **error)


def test_a_follower_that_fails_while_it_loads_is_named_with_its_error(in_threads, monkeypatch):
    split = leader.split

    def failing(model, group):
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("no such file")
        return split(model, group)

    monkeypatch.setattr(leader, "split", failing)
    with pytest.raises(GroupLost, match="process 1 of tensor_parallel = 2 raised ValueError: no such file: make a"):
        LLM(llama(), num_blocks=8, tensor_parallel=2)


def test_another_checkpoint_in_a_follower_is_refused(in_threads, monkeypatch):
    split = leader.split

    def of_another_checkpoint(model, group):
        share, cuts = split(model, group)
        if threading.current_thread() is not threading.main_thread():
            share.model["norm"].weight = torch.nn.Parameter(share.model["norm"].weight + 1e-3, requires_grad=False)
        return share, cuts

    monkeypatch.setattr(leader, "split", of_another_checkpoint)
    with pytest.raises(ValueError, match=r"a sum over the weights .*must be the same in every process, got \d+, \d+"):
        LLM(llama(), num_blocks=8, tensor_parallel=2)


def test_blocks_of_all_processes_together_take_a_quarter_of_a_cpus_memory(in_threads, monkeypatch):
    """Blocks of half the size, but the free memory is that of two processes. The least number counts for all."""
    block = 2 * 2 * 16 * 6 * 8 * 4  # K and V · layers · tokens · KV heads · D · bytes of float32
    main = threading.current_thread()
    for free, expected in ((5, 5), (3, 3)):
        monkeypatch.setattr(
            "os.sysconf",
            lambda name, free=free: (
                block if name == "SC_PAGE_SIZE" else 4 * (5 if threading.current_thread() is main else free)
            ),
        )
        with LLM(llama(), tensor_parallel=2) as llm:
            assert llm.memory.num_blocks == expected


@pytest.mark.slow
def test_a_process_that_belongs_to_a_group_of_one_can_start_followers(in_threads, tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        with LLM(llama(), **CRAMPED, tensor_parallel=2) as llm:
            assert tokens_of(llm, PROMPTS[:1], SAMPLING[0]) == tokens_of(
                LLM(llama(), **CRAMPED), PROMPTS[:1], SAMPLING[0]
            )
    finally:
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------ what is refused


def test_torchrun_must_have_started_as_many_processes(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    wrong = "tensor_parallel = 2 must be the number of processes, and there are 4: give .* see lessons/cluster.md"
    with pytest.raises(ValueError, match=wrong):
        LLM(llama(), num_blocks=8, tensor_parallel=2)


def test_replicas_are_servers_of_their_own():
    with pytest.raises(TypeError, match=r"LLM has no data_parallel: start a server for each replica, as lessons/clus"):
        LLM(llama(), num_blocks=8, data_parallel=2)


def test_the_commands_take_as_many_processes_as_torchrun_started(monkeypatch):
    for started, expected in ((None, 1), ("4", 4)):
        if started is not None:
            monkeypatch.setenv("WORLD_SIZE", started)
        parser = argparse.ArgumentParser()
        add_engine_options(parser)
        assert parser.parse_args([]).tensor_parallel == expected
        assert parser.parse_args(["--tensor-parallel", "2"]).tensor_parallel == 2


def test_after_the_first_engine_of_torchrun_there_is_no_second(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(leader, "has_left", [True])
    with pytest.raises(RuntimeError, match="the other processes of torchrun have exited, because the first LLM was"):
        LLM(llama(), num_blocks=8, tensor_parallel=2)


@pytest.mark.parametrize(("folder", "left"), [("", [True]), ("folder", [])], ids=["torchrun", "own followers"])
def test_only_an_engine_of_torchruns_processes_lets_them_exit(folder, left, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(leader, "has_left", [])
    engine = leader.Leader.__new__(leader.Leader)
    engine.lost, engine._pid, engine._in_step, engine._processes = "", os.getpid(), False, {}
    engine._folder = folder and str(tmp_path / folder)
    engine._team = type("Team", (), {"send": lambda message: None, "leave": lambda: None})
    for _ in range(2):
        engine.close()
        assert leader.has_left == left


@pytest.mark.slow
def test_a_follower_that_cannot_start_is_named(monkeypatch, capfd):
    monkeypatch.setattr(leader, "meet", os.abort)
    with pytest.raises(GroupLost, match="process 1 of tensor_parallel = 2 ended with exit status 1: make a new LLM"):
        LLM(llama(), num_blocks=8, tensor_parallel=2)
    assert "abort() takes no arguments" in capfd.readouterr().err


def test_an_error_of_the_start_itself_is_what_the_caller_sees(monkeypatch):
    """As in a daemon of multiprocessing, which may not start processes."""

    def refuse(process):
        raise AssertionError("daemonic processes are not allowed to have children")

    monkeypatch.setattr(leader, "start", refuse)
    with pytest.raises(AssertionError, match="daemonic processes are not allowed"):
        LLM(llama(), num_blocks=8, tensor_parallel=2)


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ValueError, match='tensor_parallel = 2 needs as many GPUs, and there are 1: give device="cpu"'):
        leader.Leader(TINY, config.EngineConfig(tensor_parallel=2, device="cuda"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "dense"}, 'context_parallel = 2 needs attention="paged", got attention="dense"'),
        ({"backend": "cuda"}, 'context_parallel needs backend="auto", "torch" or "triton", got backend="cuda"'),
        ({"memory": print}, "context_parallel has a memory of its own: leave memory out"),
        ({"tensor_parallel": 2, "device": "cuda:0"}, "with tensor_parallel = 2 · context_parallel = 2, got"),
        ({"group_timeout": -1.0}, "group_timeout must be a finite number"),
    ],
)
def test_options_that_context_parallelism_cannot_serve_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LLM(llama(), num_blocks=8, context_parallel=2, **options)


def test_a_model_with_a_window_is_refused_by_context_parallelism():
    model = Llama(LlamaConfig(30, 16, 16, 1, 2, sliding_window=8))
    with pytest.raises(ValueError, match=r"context_parallel = 2 attends to whole sequences, .* a window of 8 tokens"):
        LLM(model, num_blocks=8, context_parallel=2)


CLOSED, SILENT = RuntimeError("gloo: Connection closed by peer"), RuntimeError("gloo: Timed out waiting 3000ms")


@pytest.mark.parametrize(
    ("reports", "codes", "error", "message"),
    [  # what the processes said, the exit codes that are known here, and what process 0 met
        ({1: ""}, {}, CLOSED, "process 2 of tensor_parallel = 3 ended"),
        ({1: ""}, {}, SILENT, "process 2 of tensor_parallel = 3 gave no answer within 3 s"),
        ({1: ""}, {1: 1, 2: -9}, CLOSED, "process 2 of tensor_parallel = 3 ended with SIGKILL"),
        ({2: "raised X: so", 1: ""}, {1: 1, 2: 1}, CLOSED, "process 2 of tensor_parallel = 3 raised X: so"),
        ({}, {}, ZeroDivisionError("no"), "process 0 of tensor_parallel = 3 raised ZeroDivisionError: no"),
    ],
    ids=["ended", "silent", "killed", "raised", "own"],
)
def test_the_process_that_failed_first_is_named_and_not_those_that_lost_their_connection_to_it(
    reports, codes, error, message, monkeypatch
):
    monkeypatch.setattr(leader, "GRACE", 0.1)
    group = leader.Leader.__new__(leader.Leader)
    group.what, group._limit, group._in_step = "tensor_parallel = 3", 3.0, True
    ways = {"__init__": lambda self: None, "join": lambda self, seconds=None: None, "kill": lambda self: None}
    group._processes = {
        rank: type("Process", (BaseProcess,), {"exitcode": code, **ways})() for rank, code in codes.items()
    }
    group._folder = ""
    group._team = type("Team", (), {"count": 3, "reports": lambda: reports, "leave": lambda: None})
    assert str(group._given_up(error)) == f"{message}: make a new LLM"


# ------------------------------------------------------------------------------------------------ a process ends


@pytest.fixture(scope="module")
def served():
    """An engine with a follower of its own: {"llm": it}."""
    with LLM(TINY, num_blocks=256, block_size=4, tensor_parallel=2, device="cpu", group_timeout=LIMIT) as llm:
        yield llm


LIMIT = 8.0


TEXTS = ["A block table maps", "def ", "The keys and values of " * 2, "x"]


SHORT = SamplingParams(max_tokens=8, temperature=0)


@pytest.fixture(scope="module")
def alone():
    """Texts of an engine of one process."""
    outputs = LLM(TINY, num_blocks=256, block_size=4, device="cpu").generate(TEXTS, SHORT)
    return [output.text for output in outputs]


@pytest.mark.slow
def test_an_engine_starts_its_follower_and_gives_the_same_texts(served, alone):
    assert [output.text for output in served.generate(TEXTS, SHORT)] == alone
    assert "".join(served.stream(TEXTS[2], SHORT)) == alone[2]


def interrupted(llm):
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    llm.generate(TEXTS * 20, SamplingParams(max_tokens=400, ignore_eos=True))


def failing_outside_of_the_model(llm):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pagewise.engine.llm.draw", lambda *_: 1 / 0)
        llm.generate(TEXTS, SAMPLING)


def left_early(llm):
    stream = llm.stream(TEXTS[2], SAMPLING[0])
    next(stream)
    stream.close()
    raise EOFError


def refused(llm):
    llm.generate([*TEXTS, ""], SamplingParams())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "error"),
    [
        (interrupted, KeyboardInterrupt),
        (failing_outside_of_the_model, ZeroDivisionError),
        (left_early, EOFError),
        (refused, ValueError),
    ],
)
def test_followers_keep_in_step_after(trouble, error, served, alone):
    with pytest.raises(error):
        trouble(served)
    assert [output.text for output in served.generate(TEXTS, SHORT)] == alone


@pytest.mark.slow
def test_torchrun_runs_the_command_on_two_processes(capsys, tmp_path):
    flags = ["The block table", "--device", "cpu", "--num-blocks", "32", "--max-tokens", "12", "--temperature", "0"]
    assert main(flags) == 0
    status, printed, said = torchrun(tmp_path, "--nproc-per-node", "2", "-m", "pagewise.engine", *flags)
    assert (status, printed) == (0, capsys.readouterr().out), said


@pytest.mark.slow
def test_a_follower_that_stands_still_ends_the_engine_with_its_rank(served):
    """It is stopped in the middle of a step. Afterwards every call says the same at once."""
    (process,) = served._leader._processes.values()
    threading.Timer(0.3, os.kill, (process.pid, signal.SIGSTOP)).start()
    message = f"process 1 of tensor_parallel = 2 gave no answer within {LIMIT:g} s: make a new LLM"
    with pytest.raises(GroupLost, match=message):
        served.generate(TEXTS * 20, SamplingParams(max_tokens=400, ignore_eos=True))
    with pytest.raises(GroupLost, match=message):
        served.generate(TEXTS, SAMPLING)
    assert not served.has_unfinished
    assert served.memory.num_free_blocks == 256
    assert has_ended(process.pid)


FORKED_AND_KILLED = """
import os, signal, sys, threading
from pagewise.engine import LLM, SamplingParams
from pagewise.engine.leader import GroupLost
from pagewise.engine.model_runner import DecodeGraphs
from pagewise.models.load import TINY

def text():
    return llm.generate(["x"], SamplingParams(max_tokens=8, temperature=0))[0].text

llm = LLM(TINY, num_blocks=64, tensor_parallel=2, device="cpu")
(process,) = llm._leader._processes.values()
print(process.pid, flush=True)
before = text()
if (child := os.fork()) == 0:
    try:
        text()
    except GroupLost as error:
        print(error, flush=True)
    sys.exit(5)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text() == before, flush=True)
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
llm.generate(["x"] * 64, SamplingParams(max_tokens=400, ignore_eos=True), progress=False)
"""


@pytest.mark.slow
def test_a_fork_cannot_compute_and_when_process_0_is_killed_its_follower_ends_with_one_message(tmp_path):
    """The fork ends normally, and process 0 goes on. Then process 0 is killed in the middle of a step."""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", FORKED_AND_KILLED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as leads:
        pid, *said = (leads.stdout.readline().strip() for _ in range(3))
        fork = "this process is a fork of the engine's process 0, which alone can compute: make a new LLM"
        assert said == [fork, "5 True"]
        assert leads.wait(60) == -signal.SIGKILL
        assert soon(lambda: has_ended(int(pid)), 5)
        assert leads.stderr.read() == "process 1 of 2 ends, because process 0 has ended\n"
    assert list(tmp_path.glob("pagewise-*")) == []


TWO = ("--num-blocks", "600", "--tensor-parallel", "2")
BODY = {"prompt": "x", "max_tokens": 500, "ignore_eos": True}


@pytest.mark.slow
def test_the_server_answers_with_an_error_and_ends_when_a_follower_is_killed(tmp_path):
    """One client reads a stream, another one waits for a whole answer."""
    pytest.importorskip("uvicorn", reason="the server needs the extra `serve`")
    with forked_server(tmp_path, *TWO) as (server, http), contextlib.ExitStack() as clients:
        answers = []
        whole = threading.Thread(target=lambda: answers.append(http.post("/v1/completions", json=BODY | {"n": 8})))
        stream = clients.enter_context(http.stream("POST", "/v1/completions", json=BODY | {"stream": True}))
        lines = stream.iter_lines()
        next(lines)
        whole.start()
        assert soon(lambda: http.get("/health").json()["running"] == 2, every=0.05)
        os.kill(server.follower_pid, signal.SIGKILL)
        reason = "process 1 of tensor_parallel = 2 ended with SIGKILL"
        assert reason in [line for line in lines if line][-1]
        whole.join(60)
        assert (answers[0].status_code, reason in answers[0].text) == (500, True)
        assert server.ended_with(60) == 1
        assert server.said.count(reason) == 1
        assert "Traceback" not in server.said


@pytest.mark.slow
def test_sigterm_ends_a_server_whose_follower_stands_still(tmp_path):
    httpx = pytest.importorskip("httpx", reason="the server needs the extra `serve`")
    pytest.importorskip("uvicorn", reason="the server needs the extra `serve`")
    with forked_server(tmp_path, *TWO, "--grace", "1") as (server, http):
        os.kill(server.follower_pid, signal.SIGSTOP)

        def post():
            with contextlib.suppress(httpx.HTTPError):
                http.post("/v1/completions", json=BODY)

        client = threading.Thread(target=post)
        client.start()
        assert soon(lambda: http.get("/health", timeout=2).json().get("step_seconds", 0) > 0.5, 30, every=0.05)
        server.process.terminate()
        assert server.ended_with(30) == 1
        client.join(60)
        assert soon(lambda: has_ended(server.follower_pid), 5)
