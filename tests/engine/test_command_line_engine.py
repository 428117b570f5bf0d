"""`python -m pagewise.engine "prompt"` prints text as it comes, and one line if something is wrong."""

import json
import re
import runpy
import shutil
import socket
import sys

import pytest
import torch

from pagewise.engine import LLM, SamplingParams
from pagewise.engine import __main__ as command_line
from pagewise.engine.__main__ import main
from pagewise.engine.serve import __main__ as server
from pagewise.flash_decoding_plus_plus import Dataflow
from pagewise.flash_decoding_plus_plus.dataflow import device_label
from pagewise.models import tiny_model
from pagewise.models.load import TINY

CPU = ("--device", "cpu", "--num-blocks", "8")


def engine():
    model, tokenizer = tiny_model(device="cpu")
    return LLM(model, tokenizer=tokenizer, num_blocks=8)


def test_it_prints_what_generate_gives(capsys):
    assert main(["The attention", *CPU, "--max-tokens", "12", "--temperature", "0"]) == 0
    (output,) = engine().generate(["The attention"], SamplingParams(max_tokens=12, temperature=0.0))
    assert capsys.readouterr().out == output.text + "\n"


def test_every_sampling_flag_reaches_the_request(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(LLM, "stream", lambda self, prompt, sampling: asked.append((prompt, sampling)) or iter("xy"))
    flags = "--max-tokens 5 --temperature 0.5 --top-k 9 --top-p 0.8 --repetition-penalty 1.2 --seed 3 --ignore-eos"
    newer = "--min-p 0.1 --presence-penalty 0.5 --frequency-penalty -0.5 --min-tokens 2"
    main(["Hello", *CPU, *flags.split(), *newer.split(), "--stop", ".", "--stop", "\n", "--stop-token-ids", "7"])
    assert asked == [
        (
            "Hello",
            SamplingParams(
                max_tokens=5, temperature=0.5, top_k=9, top_p=0.8, repetition_penalty=1.2, seed=3, ignore_eos=True,
                stop=(".", "\n"), min_p=0.1, min_tokens=2, stop_token_ids=(7,), presence_penalty=0.5,
                frequency_penalty=-0.5,
            ),
        )
    ]  # fmt: skip
    assert capsys.readouterr().out == "xy\n"


@pytest.mark.parametrize("command", [command_line, server])
def test_flags_of_both_commands_reach_the_engine(command, tmp_path, monkeypatch, capsys):
    """Without the flags the engine has its defaults."""
    names, given = ("kv_cache_dtype", "k_scale", "v_scale", "dataflow"), []

    def build(model, config):
        given.append([getattr(config, name) for name in names])
        raise ValueError("enough seen")

    monkeypatch.setattr(command, "LLM", build)
    table = Dataflow(device_label(torch.device("cpu")), torch.float32, {(192, 192): (1, 1)})
    table.save(tmp_path / "table.json")
    prompt = ["Hello"] if command is command_line else []
    flags = [*prompt, "--device", "cpu", "--dataflow", str(tmp_path / "table.json")]
    assert command.main([*flags, "--kv-cache-dtype", "float8_e5m2", "--k-scale", "0.5", "--v-scale", "0.25"]) == 2
    assert command.main(prompt) == 2
    assert given == [[torch.float8_e5m2, 0.5, 0.25, table], [None, 1.0, 1.0, None]]
    (tmp_path / "table.json").write_text("{}")
    assert command.main(flags) == 2
    assert re.match(r"(error: enough seen\n){2}error: .*table.json: not a saved Dataflow", capsys.readouterr().err)


@pytest.mark.slow
def test_with_speculation_it_prints_the_same_text_in_fewer_steps(monkeypatch, capsys):
    engines = []
    usual = LLM.__init__
    monkeypatch.setattr(
        LLM, "__init__", lambda self, *args, **kwargs: engines.append(self) or usual(self, *args, **kwargs)
    )
    for number in ("0", "4"):
        main(["one two one two", *CPU, "--max-tokens", "40", "--temperature", "0", "--speculate", number])
    first, second = capsys.readouterr().out.splitlines()
    assert second == first
    assert [llm.scheduler.num_accepted > 0 for llm in engines] == [False, True]


def test_each_piece_is_printed_when_it_comes(monkeypatch, capsys):
    seen = []

    def pieces(*_):
        yield "first"
        seen.append(capsys.readouterr().out)
        yield "second"

    monkeypatch.setattr(LLM, "stream", pieces)
    main(["Hello", *CPU])
    assert seen == ["first"]


def test_a_checkpoint_without_a_tokenizer_takes_and_gives_token_ids(tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    settings = json.loads((folder / "config.json").read_text())
    del settings["tokenizer"]
    (folder / "config.json").write_text(json.dumps(settings))
    flags = ("--model", str(folder), *CPU, "--max-tokens", "4", "--temperature", "0")
    assert main(["84 104 101", *flags]) == 0
    (output,) = engine().generate([[84, 104, 101]], SamplingParams(max_tokens=4, temperature=0.0))
    assert capsys.readouterr().out.split() == [str(token) for token in output.token_ids]
    assert main(["The", *flags]) == 2
    assert "the prompt must be token ids, got 'The'" in capsys.readouterr().err


def status_of(main, arguments):
    """The exit status of a command, whether it returns or exits."""
    try:
        return main(arguments)
    except SystemExit as error:
        return error.code


HUGE = ("--num-blocks", "999999999")
BEFORE_THE_MODEL = [
    (("Hello", "--top-p", "2"), "top_p must be above 0 and at most 1, got 2.0"),
    (("Hello", "--top-k", "x"), "argument --top-k: invalid int value: 'x'"),
    (("Hello", "--speculate", "-1"), "speculate must be at least 0, got -1"),
    (("Hello", "--stop", ""), "stop must not hold an empty string"),
    (("Hello", "--min-tokens", "65"), "min_tokens must be at most max_tokens = 64, got 65"),
    (("Hello", "--k-scale", "2"), "k_scale must be 1.0 where the cache has the model's dtype, got 2.0"),
    (("Hello", "--block-size", "0"), "block_size must be at least 1, got 0"),
    (("Hello", "--dtype", "int8"), "argument --dtype: invalid choice: 'int8'"),
    (("Hello", "--dataflow", "/no/such/table"), "/no/such/table"),
    (("Hello", "--tensor-parallel", "2", "--attention", "dense"), 'needs attention="paged"'),
    (("Hello", "again"), "unrecognized arguments: again"),
    (("--stop", "END"), "the following arguments are required: prompt"),
]
SERVER_BEFORE_THE_MODEL = [
    (("--port", "99999"), "port must be from 0 to 65535, got 99999"),
    (("--port", "-1"), "port must be from 0 to 65535, got -1"),
    (("--port", "eight"), "argument --port: invalid int value: 'eight'"),
    (("--host", "no.such.host.invalid"), "cannot serve at no.such.host.invalid port 8000: "),
    (("--host", "192.0.2.1"), "cannot serve at 192.0.2.1 port 8000: "),  # kept for documentation: never ours
    (("--grace", "-1"), "grace must be at least 0, got -1"),
    (("--max-queue", "0"), "max_queue must be at least 1, got 0"),
    (("--max-num-seqs", "0"), "max_num_seqs must be at least 1, got 0"),
]


@pytest.mark.parametrize(
    ("command", "arguments", "said"),
    [(command_line, *one) for one in BEFORE_THE_MODEL] + [(server, *one) for one in SERVER_BEFORE_THE_MODEL],
    ids=str,
)
def test_a_wrong_option_is_one_line_and_status_2_before_there_is_a_model(command, arguments, said, monkeypatch, capsys):
    monkeypatch.setattr(command, "LLM", None)
    assert status_of(command.main, arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert said in err


@pytest.mark.parametrize("command", [command_line, server])
def test_blocks_beyond_the_memory_of_the_machine_are_one_line_and_status_2(command, capsys):
    prompt = ("Hello",) if command is command_line else ("--port", "0")
    assert command.main((*prompt, "--device", "cpu", *HUGE)) == 2
    assert re.fullmatch(
        r"error: num_blocks = 999999999 blocks of \d+ bytes exceed the memory of \d+ bytes: .*\n",
        capsys.readouterr().err,
    )


@pytest.mark.parametrize("command", [command_line, server])
@pytest.mark.parametrize("started", ["abc", "", "1.5"])
def test_a_wrong_world_size_is_an_option_that_does_not_fit(command, started, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", started)
    monkeypatch.setattr(command, "LLM", None)
    assert status_of(command.main, ["Hello"] if command is command_line else []) == 2
    assert capsys.readouterr().err == f"error: argument --tensor-parallel: invalid int value: {started!r}\n"
    assert status_of(command.main, ["--help"]) == 0


def test_a_port_in_use_is_one_line_and_status_2_before_a_model_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr(server, "LLM", None)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert server.main(["--port", str(port)]) == 2
    assert capsys.readouterr().err == f"error: cannot serve at 127.0.0.1 port {port}: Address already in use\n"


@pytest.mark.parametrize("order", [("--stop", "END", "The"), ("The", "--stop", "END"), ("--stop=END", "The")], ids=str)
def test_a_stop_string_before_the_prompt_leaves_the_prompt_alone(order, monkeypatch):
    asked = []
    monkeypatch.setattr(LLM, "stream", lambda self, prompt, sampling: asked.append((prompt, sampling.stop)) or iter(()))
    assert main([*order, *CPU]) == 0
    assert asked == [("The", ("END",))]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("", *CPU), "the prompt must hold at least 1 token"),
        (("Hello", *CPU, "--top-p", "2"), "top_p must be above 0 and at most 1, got 2.0"),
        (("Hello", *CPU, "--max-tokens", "600"), "context of 512"),
        (("Hello", *CPU, "--speculate", "-1"), "speculate must be at least 0, got -1"),
        (("Hello", *CPU, "--max-tokens", "200"), "raise num_blocks"),
        (("Hello", *CPU, "--model", "/no/such/folder"), "/no/such/folder"),
        (("Hello", *CPU, "--attention", "dense", "--num-blocks", "0"), "num_blocks"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_status_2(arguments, said, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert said in err


def test_ctrl_c_ends_it_without_a_traceback(monkeypatch, capsys):
    def interrupted(*_):
        yield "The"
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", interrupted)
    assert main(["Hello", *CPU]) == command_line.INTERRUPTED
    assert capsys.readouterr().out == "The\n"


def test_it_runs_as_a_module(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["engine", "The", *CPU, "--max-tokens", "3", "--seed", "1"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(command_line.__file__, run_name="__main__")
    out, err = capsys.readouterr()
    assert out.endswith("\n")
    assert err == ""
