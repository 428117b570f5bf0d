"""An engine of several processes gives the tokens of an engine of one process, and no process outlives the others.

To start a process takes seconds. Therefore most tests share two processes of `Processes`, or one engine with a follower
of its own, or they run followers as threads of this process.
"""

import argparse
import ast
import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading

import pytest
import torch
from checkpoints import ARCHITECTURES, VOCAB, save_random
from engine_cases import serve, tokens_of
from eventually import has_ended, soon

from pagewise.distributed import Processes
from pagewise.engine import LLM, SamplingParams, follower, leader
from pagewise.engine.__main__ import main
from pagewise.engine.command_line import add_engine_options
from pagewise.engine.config import EngineConfig
from pagewise.engine.leader import GroupLost
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


@pytest.fixture(scope="module")
def both(two, folders):
    """Return what each of two processes has of each architecture."""
    jobs = [(folder, CRAMPED) for folder in folders.values()]
    return dict(zip(folders, zip(*two.run(serve, jobs, PROMPTS, SAMPLING), strict=True), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_two_processes_give_the_tokens_of_one(both, folders, architecture):
    """Greedy tokens, samples that share blocks, and beams: with chunked prompts, preemption and the prefix cache."""
    first, _ = both[architecture]
    assert first["tokens"] == tokens_of(LLM(folders[architecture], **CRAMPED), PROMPTS, SAMPLING)
    assert first["cached"] >= 4
    assert first["preemptions"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_process_holds_its_share_of_weights_and_cache_and_no_more(both, folders, architecture):
    whole = LLM(folders[architecture], **CRAMPED)
    weights = dict(whole.model.named_parameters())
    split = re.compile(r"([qkv]|gate|up)_proj|c_attn|c_fc|(o|down|c)_proj.weight")
    expected = sum(weight.nbytes // (2 if split.search(name) else 1) for name, weight in weights.items())
    for process in both[architecture]:
        assert 2 * process["cache"] == whole.memory.nbytes
        assert process["weights"] == expected


@pytest.mark.slow
def test_options_that_process_0_decides_alone_change_no_token(two, folders):
    """Drafts, and a float8 cache. A table of products runs the model once before the first step, in every process."""
    model, _ = load_model(folders["llama-3"])
    table = Dataflow(device_label(torch.device("cpu")), torch.float32, {(VOCAB, 64): (1, 1), (32, 64): (1, 1)})
    prompts, options = [[1, 2, 1, 2, 1, 2], *PROMPTS], {"num_blocks": 64, "device": "cpu"}
    ways = [{"speculate": 3}, {"kv_cache_dtype": "float8_e4m3fn", "k_scale": 0.1}, {"dataflow": table}]
    greedy = SamplingParams(max_tokens=24, temperature=0)
    first, _ = two.run(serve, [(folders["llama-3"], options | way) for way in ways], prompts, greedy)
    for found, way in zip(first, ways, strict=True):
        assert found["tokens"] == tokens_of(LLM(model, **options | way | {"device": None}), prompts, greedy)
    assert first[0]["accepted"] > 0
    assert first[1]["cache"] * 4 == first[0]["cache"]


# ------------------------------------------------------------------------------------------------ in threads


@pytest.fixture
def in_threads(monkeypatch):
    """Let followers be threads of this process, which take turns often."""
    running, interval = [], sys.getswitchinterval()
    sys.setswitchinterval(1e-4)

    class Follower:
        def __init__(self, command, **options):
            fd, *arguments = ast.literal_eval(command[-1].partition("; started")[2])
            running.append(threading.Thread(target=follower.started, args=(os.dup(fd), *arguments), daemon=True))
            running[-1].start()

        def kill(self):
            pass

        def wait(self, timeout=None):
            return 0

    monkeypatch.setattr(subprocess, "Popen", Follower)
    yield running
    sys.setswitchinterval(interval)
    for thread in running:
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_a_model_of_the_caller_is_shared_by_any_number_that_divides_its_heads(count, in_threads):
    model = llama(qkv_bias=True)
    with LLM(model, **CRAMPED | {"device": None}, tensor_parallel=count) as llm:
        assert tokens_of(llm, PROMPTS, SAMPLING) == tokens_of(LLM(model, **CRAMPED), PROMPTS, SAMPLING)
        assert (llm.model.num_kv_heads, model.num_kv_heads) == (6 // count, 6)
        assert llm.memory.manager.num_free_blocks == CRAMPED["num_blocks"]
        sizes = [llm.memory.nbytes, LLM(model, **CRAMPED).memory.nbytes]
        assert sizes[0] * count == sizes[1]


def test_a_closed_engine_says_so(in_threads):
    with LLM(llama(), num_blocks=8, tensor_parallel=2) as llm:
        pass
    llm.close()
    with pytest.raises(GroupLost, match="the engine is closed: make a new LLM"):
        llm.generate(PROMPTS, SAMPLING)
    assert not llm.has_unfinished


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


def test_blocks_of_all_processes_together_take_a_quarter_of_a_cpus_memory(in_threads, monkeypatch):
    """Blocks of half the size, but the free memory is that of two processes."""
    block = 2 * 2 * 16 * 6 * 8 * 4  # K and V · layers · tokens · KV heads · D · bytes of float32
    monkeypatch.setattr("os.sysconf", {"SC_AVPHYS_PAGES": 4 * 5, "SC_PAGE_SIZE": block}.get)
    with LLM(llama(), tensor_parallel=2) as llm:
        assert llm.memory.manager.num_blocks == LLM(llama()).memory.manager.num_blocks == 5


# ------------------------------------------------------------------------------------------------ what is refused


def test_torchrun_must_have_started_as_many_processes(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="tensor_parallel = 2 must be the number of processes, and there are 4: give"):
        LLM(llama(), num_blocks=8, tensor_parallel=2)


def test_the_commands_take_as_many_processes_as_torchrun_started(monkeypatch):
    for started, expected in ((None, 1), ("4", 4)):
        if started is not None:
            monkeypatch.setenv("WORLD_SIZE", started)
        parser = argparse.ArgumentParser()
        add_engine_options(parser)
        assert parser.parse_args([]).tensor_parallel == expected
        assert parser.parse_args(["--tensor-parallel", "2"]).tensor_parallel == 2


def test_a_follower_that_cannot_start_is_named(monkeypatch, capfd):
    monkeypatch.setattr(leader, "started", type("Missing", (), {"__module__": "no_such_module"}))
    with pytest.raises(GroupLost, match="process 1 of tensor_parallel = 2 ended with exit status 1: make a new LLM"):
        LLM(llama(), num_blocks=8, tensor_parallel=2)
    assert "No module named 'no_such_module'" in capfd.readouterr().err


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(ValueError, match='tensor_parallel = 2 needs as many GPUs, and there are 1: give device="cpu"'):
        leader.Leader("folder", llama(), EngineConfig(tensor_parallel=2, device="cuda"))


def test_the_process_that_ended_is_named_and_not_those_that_lost_their_connection_to_it():
    group = leader.Leader.__new__(leader.Leader)
    group.count, group._processes, group._connections = 3, {}, {}
    group._folder = tempfile.TemporaryDirectory()
    error = group._given_up({1: "RuntimeError: Connection closed by peer", 2: ""}, RuntimeError("Read error"))
    assert str(error) == "process 2 of tensor_parallel = 3 ended: make a new LLM"


# ------------------------------------------------------------------------------------------------ a process ends


@pytest.fixture(scope="module")
def served():
    """An engine with a follower of its own: {"llm": it}."""
    with LLM(TINY, num_blocks=256, block_size=4, tensor_parallel=2, device="cpu") as llm:
        yield llm


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
        patch.setattr("pagewise.engine.steps.draw", lambda *_: 1 / 0)
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
def test_torchrun_runs_the_command_on_two_processes(capsys):
    flags = ["The block table", "--device", "cpu", "--num-blocks", "32", "--max-tokens", "12", "--temperature", "0"]
    assert main(flags) == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "pagewise.engine", *flags]
    done = subprocess.run(torchrun, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, capsys.readouterr().out), done.stderr


@pytest.mark.slow
def test_a_follower_that_is_killed_ends_the_engine_with_its_rank(served):
    """It is killed in the middle of a step. Afterwards every call says the same at once."""
    (process,) = served._leader._processes.values()
    threading.Timer(0.3, os.kill, (process.pid, signal.SIGKILL)).start()
    message = "process 1 of tensor_parallel = 2 ended with SIGKILL: make a new LLM"
    with pytest.raises(GroupLost, match=message):
        served.generate(TEXTS * 20, SamplingParams(max_tokens=400, ignore_eos=True))
    with pytest.raises(GroupLost, match=message):
        served.generate(TEXTS, SAMPLING)
    assert not served.has_unfinished
    assert served.memory.manager.num_free_blocks == 256


@pytest.mark.slow
def test_when_process_0_is_killed_its_follower_ends_with_one_message(tmp_path):
    """Process 0 is a fork of this process, which is killed in the middle of a step."""
    log = tmp_path / "log"
    if (child := os.fork()) == 0:
        with log.open("wb") as file:
            os.dup2(file.fileno(), 2)
        tempfile.tempdir = str(tmp_path)
        llm = LLM(TINY, num_blocks=64, tensor_parallel=2, device="cpu")
        (process,) = llm._leader._processes.values()
        (tmp_path / "pid").write_text(str(process.pid))
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        llm.generate(["x"] * 64, SamplingParams(max_tokens=400, ignore_eos=True))
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    pid = int((tmp_path / "pid").read_text())
    assert soon(lambda: has_ended(pid), 5)
    assert log.read_text() == "process 1 of tensor parallelism ends, because process 0 has ended\n"
    assert list(tmp_path.glob("pagewise-*")) == []


@pytest.mark.slow
def test_the_server_answers_with_an_error_and_ends_when_a_follower_is_killed():
    """One client reads a stream, another one waits for a whole answer."""
    httpx = pytest.importorskip("httpx", reason="the server needs the extra `serve`")
    command = [sys.executable, "-m", "pagewise.engine.serve", "--port", "0", "--num-blocks", "600", "--device", "cpu"]
    command += ["--tensor-parallel", "2"]
    body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server, contextlib.ExitStack() as clients:
        clients.callback(server.kill)
        url = next(found[0] for line in server.stderr if (found := re.findall(r"http://[\d.:]+", line)))
        answers = []
        whole = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json=body | {"n": 8}, timeout=60))
        )
        stream = clients.enter_context(
            httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=60)
        )
        lines = stream.iter_lines()
        next(lines)
        whole.start()
        assert soon(lambda: httpx.get(f"{url}/health", timeout=60).json()["running"] == 2)
        (follower,) = subprocess.check_output(["ps", "-o", "pid=", "--ppid", str(server.pid)], text=True).split()
        os.kill(int(follower), signal.SIGKILL)
        reason = "process 1 of tensor_parallel = 2 ended with SIGKILL"
        assert reason in [line for line in lines if line][-1]
        whole.join(60)
        assert (answers[0].status_code, reason in answers[0].text) == (500, True)
        assert server.wait(60) == 1
        said = server.stderr.read()
        assert said.count(reason) == 1
        assert "Traceback" not in said
