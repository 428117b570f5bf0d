"""What a checkpoint recommends beside its weights: sampling parameters, end tokens, and names of special tokens."""

import json
import logging
import re

import pytest
import torch
from scripted import Scripted as Model
from scripted import byte_fallback, byte_level

from pagewise.engine import LLM, SamplingParams
from pagewise.engine.__main__ import main
from pagewise.models.load import TINY, sampling_defaults

pytestmark = pytest.mark.usefixtures("shapes_unchecked")
RECOMMENDED = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.3}
DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


def engine(script=(), tokenizer=None, recommended=None, ends=(), **options):
    model = Model(script, start=2, vocab_size=300)
    model.sampling_defaults, model.eos_token_ids = recommended or {}, ends
    return LLM(model, tokenizer=tokenizer, num_blocks=32, **options)


# ------------------------------------------------------------------------------------------------ sampling parameters


@pytest.mark.parametrize("names", [(), ("temperature",), ("top_k", "repetition_penalty"), tuple(RECOMMENDED)], ids=str)
def test_what_a_request_does_not_say_the_checkpoint_says(names):
    llm = engine(recommended={name: RECOMMENDED[name] for name in names})
    params = llm.sampling_params(max_tokens=3)
    for name, default in DEFAULTS.items():
        assert getattr(params, name) == (RECOMMENDED[name] if name in names else default)
    assert llm.prepare([1, 2]).sampling == llm.sampling_params()
    assert llm.sampling_params(**DEFAULTS) == SamplingParams(**DEFAULTS)  # what it says counts
    assert llm.prepare([1, 2], SamplingParams()).sampling == SamplingParams()


def test_a_repetition_penalty_of_the_checkpoint_changes_greedy_tokens():
    llm = engine([5] * 4, recommended={"repetition_penalty": 100.0, "temperature": 0.0})
    llm.model.logits[6] = 1.0
    assert llm.generate([[5, 7]])[0].token_ids[0] == 6
    assert llm.generate([[5, 7]], SamplingParams(temperature=0))[0].token_ids[:4] == [5] * 4


def test_a_beam_search_takes_of_it_what_it_can():
    params = engine(recommended=RECOMMENDED).sampling_params(beam_width=2)
    assert params == SamplingParams(beam_width=2, temperature=0.6, repetition_penalty=1.3)


def test_one_line_names_it_and_an_option_leaves_it_out(caplog):
    with caplog.at_level(logging.INFO):
        engine()
        engine(recommended=RECOMMENDED, generation_config="none")
    assert not caplog.records
    assert engine(recommended=RECOMMENDED, generation_config="none").sampling_params() == SamplingParams()
    engine(recommended=RECOMMENDED)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING  # shown without any setting of logging
    for name, value in RECOMMENDED.items():
        assert f"{name} = {value}" in record.message
    assert 'generation_config="none"' in record.message
    assert "\n" not in record.message


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_k": "many"}], ids=str)
def test_what_is_impossible_is_refused_at_the_start(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f'generation_config.json of the checkpoint: {name}.*generation_config="none"'):
        engine(recommended=wrong)
    engine(recommended=wrong, generation_config="none")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), RECOMMENDED),
        (("--top-k", "0", "--temperature", "1"), RECOMMENDED | {"top_k": 0, "temperature": 1.0}),
        (("--generation-config", "none"), {}),
        (("--generation-config", "none", "--min-p", "0.2"), {"min_p": 0.2}),
    ],
    ids=str,
)
def test_the_command_takes_what_its_flags_do_not_say_from_the_checkpoint(flags, expected, tmp_path, monkeypatch):
    for path in TINY.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps(RECOMMENDED))
    asked = []
    monkeypatch.setattr(LLM, "stream", lambda self, prompt, sampling: asked.append(sampling) or iter("x"))
    assert main(["A", "--model", str(tmp_path), "--num-blocks", "8", *flags]) == 0
    assert asked == [SamplingParams(max_tokens=64, **expected)]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"do_sample": False, "temperature": 0.6, "top_k": 20}, {"temperature": 0.0}),
        ({"do_sample": False, "repetition_penalty": 1.3}, {"temperature": 0.0, "repetition_penalty": 1.3}),
        ({"do_sample": True, "temperature": 0.6}, {"temperature": 0.6}),
        ({"top_k": 20, "do_sample": None}, {"top_k": 20}),
        ({"max_new_tokens": 40, "max_length": 100}, {"max_tokens": 40}),
        ({"max_new_tokens": None}, {}),
    ],
    ids=str,
)
def test_the_file_says_whether_to_draw_and_how_long_an_answer_may_be(said, expected):
    assert sampling_defaults(said) == expected


def test_an_answer_is_as_long_as_recommended_or_as_fits_unless_the_request_says(caplog):
    llm = engine(recommended={"max_tokens": 40})
    assert "max_tokens = 40" in caplog.text
    most = llm.max_new_tokens([1, 2])
    assert llm.prepare([1, 2]).sampling.max_tokens == 40 < most
    assert llm.prepare([1] * (most - 5)).sampling.max_tokens == 7  # 2 + most tokens fit
    assert llm.prepare([1, 2], SamplingParams()).sampling.max_tokens == SamplingParams().max_tokens
    assert llm.sampling_params(top_k=3) == SamplingParams(top_k=3)  # a server or a command has its own default
    with pytest.raises(ValueError, match="exceed the model's context"):
        llm.prepare([1] * (most + 2))
    with pytest.raises(ValueError, match=r"generation_config\.json of the checkpoint: max_tokens must be at least 1"):
        engine(recommended={"max_tokens": 0})


# ------------------------------------------------------------------------------------------------ ends


@pytest.mark.parametrize("ends", [(), (9,), (9, 11)])
@pytest.mark.parametrize("tokenizer", [None, byte_level, byte_fallback])
def test_every_end_token_of_every_source_ends_a_text(ends, tokenizer):
    tokenizer = tokenizer and tokenizer()
    own = () if tokenizer is None else (tokenizer.eos_token_id,)
    for end in (*ends, *own):
        llm = engine([5, end, 6], tokenizer, ends=ends)
        (output,) = llm.generate([[1, 2]], SamplingParams(max_tokens=3, temperature=0))
        assert (output.token_ids, output.finish_reason) == ([5, end], "stop")
        (output,) = llm.generate([[1, 2]], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
        assert output.token_ids == [5, end, 6]


@pytest.mark.parametrize("more", [(), ("never",), (7,)], ids=str)
@pytest.mark.parametrize(
    ("kind", "name"), [(byte_level, "<|im_end|>"), (byte_level, "<|im_start|>"), (byte_fallback, "<s>")]
)
def test_a_stop_string_that_is_a_special_token_ends_a_text(kind, name, more):
    tokenizer = kind()
    token = tokenizer.convert_tokens_to_ids(name)
    llm = engine([70, 71, token, 72], tokenizer)
    sampling = SamplingParams(max_tokens=4, temperature=0, stop=[name, *more], ignore_eos=True)
    (output,) = llm.generate([[1, 2]], sampling)
    assert (output.token_ids, output.finish_reason) == ([70, 71, token], "stop")
    assert output.text == tokenizer.decode([1, 2, 70, 71]).removeprefix(tokenizer.decode([1, 2]))
    assert "".join(llm.stream([1, 2], sampling)) == output.text


def test_a_special_tokens_name_that_is_spelled_out_ends_a_text_too():
    tokenizer = byte_level()
    script = [tokenizer.convert_tokens_to_ids(character) for character in "a<|im_end|>b"]
    sampling = SamplingParams(max_tokens=12, temperature=0, stop="<|im_end|>")
    (output,) = engine(script, tokenizer).generate([[1, 2]], sampling)
    assert (output.text, output.finish_reason) == ("a", "stop")


@pytest.mark.parametrize(
    ("stop", "first"),
    [
        ("<|im_end|>\n", "<|im_end|>"),
        ("a<|im_start|>", "<|im_start|>"),
        ("<|im_end|><|endoftext|>", "<|im_end|>"),
        ("<|endoftext|><|im_end|>", "<|endoftext|>"),
    ],
)
def test_a_stop_string_that_no_text_can_hold_is_refused(stop, first):
    says = f"stop = {stop!r} holds the special token {first!r}, which text leaves out: give {first!r} alone"
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        engine(tokenizer=byte_level()).add_request([1, 2], SamplingParams(stop=["a", stop]))


def test_an_added_token_that_is_not_special_is_text():
    tokenizer = byte_level()
    tokenizer.add_tokens(["<tool>"])
    token = tokenizer.convert_tokens_to_ids("<tool>")
    assert torch.tensor(token) < 300
    for stop, text in (("<tool>", "i"), ("<tool>j", "i"), ("ol>", "i<to")):
        sampling = SamplingParams(max_tokens=3, temperature=0, stop=stop)
        (output,) = engine([72, token, 73], tokenizer).generate([[1, 2]], sampling)
        assert output.text == text
