"""The engine as its users see it, on the tiny model: text, ids, streams, requests, failures."""

import contextlib
import dataclasses
import functools
import itertools
import os
import pickle
import signal
import threading
import types

import pytest
import torch
from engine_cases import finished, for_backend

from pagewise.engine import LLM, SamplingParams, paged_memory, sampling
from pagewise.engine.config import EngineConfig
from pagewise.engine.interrupts import held_back
from pagewise.engine.memory import Memory
from pagewise.engine.paged_memory import PagedMemory
from pagewise.kv_cache import generate
from pagewise.models import GPT2, GPT2Config, tiny_model

MODEL, TOKENIZER = tiny_model()
PROMPTS = ["A block table maps", "def ", "The keys and values of " * 2, "x"]
NUM_TOKENS = 7
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)


def engine(**options):
    return LLM(MODEL, **({"tokenizer": TOKENIZER, "num_blocks": 64} | options))


@functools.cache
def unserved(prompt, num_tokens=NUM_TOKENS):
    """Return the tokens of lesson 2's loop for one prompt."""
    ids = torch.tensor([TOKENIZER.encode(prompt)])
    return generate(MODEL, ids, num_tokens)[0, ids.shape[1] :].tolist()


def nothing_is_held(llm):
    return llm.memory.usage == llm.memory.used_nbytes == 0


# ------------------------------------------------------------------------------------------------ what comes out


@pytest.mark.parametrize("scheduler", ["naive", "static", "continuous"])
@pytest.mark.parametrize("attention", ["dense", "paged", "block_tensors"])
def test_every_way_to_serve_gives_the_tokens_of_each_prompt_alone(scheduler, attention, shapes_unchecked):
    limits = {"block_size": 2, "num_blocks": 100, "max_num_batched_tokens": 9, "max_num_seqs": 3}
    llm = engine(scheduler=scheduler, attention=attention, **limits)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == [unserved(prompt) for prompt in PROMPTS]
    assert [output.prompt_token_ids for output in outputs] == [TOKENIZER.encode(prompt) for prompt in PROMPTS]
    assert [output.text for output in outputs] == [TOKENIZER.decode(unserved(prompt)) for prompt in PROMPTS]
    assert nothing_is_held(llm)


@pytest.mark.parametrize("attention", ["paged", "dense"])
def test_on_every_device_it_gives_these_tokens(attention, device):
    """A GPU uses Triton's kernels, and replays paged decode steps as CUDA graphs."""
    model, _ = tiny_model(device=device)
    llm = LLM(model, tokenizer=TOKENIZER, num_blocks=64, attention=attention, max_num_batched_tokens=20)
    assert llm.config.backend == {"cpu": "torch", "cuda": "triton"}[device.type]
    assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == [unserved(prompt) for prompt in PROMPTS]


def test_without_a_tokenizer_there_are_ids_only():
    llm = LLM(MODEL, num_blocks=8)
    prompt = TOKENIZER.encode(PROMPTS[0])
    (output,) = llm.generate([torch.tensor(prompt)], GREEDY)
    assert (output.token_ids, output.text, output.logprobs) == (unserved(PROMPTS[0]), None, [None])
    assert list(llm.stream(prompt, GREEDY)) == output.token_ids


def test_a_stream_gives_the_same_text_piece_by_piece():
    llm = engine()
    pieces = list(llm.stream(PROMPTS[0], SamplingParams(max_tokens=15, seed=4)))
    assert not llm.has_unfinished
    assert "".join(pieces) == llm.generate(PROMPTS[:1], SamplingParams(max_tokens=15, seed=4))[0].text
    assert len(pieces) > 10


def test_a_stream_that_is_left_or_never_begun_holds_nothing():
    llm = engine()
    stream = llm.stream(PROMPTS[0], GREEDY)
    assert not llm.has_unfinished
    next(stream)
    assert len(llm.scheduler.running) == 1
    stream.close()
    assert not llm.has_unfinished
    assert nothing_is_held(llm)


@pytest.mark.slow
def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_after_a_preemption(shapes_unchecked):
    params = [SamplingParams(max_tokens=16, seed=seed, top_p=0.95) for seed in range(4)]
    prompts = [PROMPTS[0]] * 4
    alone = [engine().generate(prompts[:1], [one])[0].token_ids for one in params]
    assert len({tuple(tokens) for tokens in alone}) == 4
    assert [output.token_ids for output in engine().generate(prompts, params)] == alone
    cramped = engine(num_blocks=10, block_size=8, prefix_cache=False)
    assert [output.token_ids for output in cramped.generate(prompts, params)] == alone
    assert cramped.scheduler.num_preemptions > 0


# ------------------------------------------------------------------------------------------------ how it ends


def test_an_end_token_ends_a_sequence_unless_it_is_to_be_ignored():
    tokens = unserved(PROMPTS[0])
    end = tokens[5]
    expected = tokens[: tokens.index(end) + 1]
    model = MODEL.__class__(MODEL.config)
    model.load_state_dict(MODEL.state_dict())
    model.eos_token_ids = (300, end)
    llm = LLM(model, tokenizer=TOKENIZER, num_blocks=16)
    (output,) = llm.generate(PROMPTS[:1], GREEDY)
    assert (output.token_ids, output.finish_reason) == (expected, "stop")
    assert output.text == TOKENIZER.decode(expected[:-1])
    ignoring = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    assert llm.generate(PROMPTS[:1], ignoring)[0].token_ids == tokens
    for ignore_eos in (False, True):
        stopping = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, stop=end, ignore_eos=ignore_eos)
        (by_id,) = engine().generate(PROMPTS[:1], stopping)
        assert (by_id.token_ids, by_id.text, by_id.finish_reason) == (expected, output.text, "stop")


class Added(str):
    """The text of an added token, and whether it is a special one."""

    __slots__ = ("special",)

    def __new__(cls, text, *, special):
        self = super().__new__(cls, text)
        self.special = special
        return self


class Named:
    """The tokenizer, with special tokens that have names, as transformers' tokenizers have."""

    def __init__(self, eos_token_id, special):
        self.eos_token_id, self.special = eos_token_id, special
        self.added_tokens_decoder = {special: Added("<|im_end|>", special=True), 5: Added("plain", special=False)}

    def encode(self, text):
        return TOKENIZER.encode(text)

    def decode(self, ids, *, skip_special_tokens):
        assert skip_special_tokens
        return TOKENIZER.decode([i for i in ids if i not in (self.special, self.eos_token_id)])


@pytest.mark.parametrize("of_model", [True, False])
def test_the_end_tokens_of_model_and_tokenizer_both_end_a_sequence(of_model):
    tokens = unserved(PROMPTS[0])
    end = tokens[4]
    model = MODEL.__class__(MODEL.config)
    model.load_state_dict(MODEL.state_dict())
    model.eos_token_ids = (end if of_model else 255,)
    llm = LLM(model, tokenizer=Named(254 if of_model else end, 253), num_blocks=16)
    (output,) = llm.generate(PROMPTS[:1], GREEDY)
    assert (output.token_ids, output.finish_reason) == (tokens[: tokens.index(end) + 1], "stop")
    ignoring = dataclasses.replace(GREEDY, ignore_eos=True)
    assert llm.generate(PROMPTS[:1], ignoring)[0].token_ids == tokens


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_stop_string_that_names_a_special_token_ends_the_text_at_this_token(ignore_eos):
    """The text never shows a special token, so the string alone would never be found."""
    tokens = unserved(PROMPTS[0])
    special = tokens[4]
    llm = engine(tokenizer=Named(None, special))
    (output,) = llm.generate(PROMPTS[:1], dataclasses.replace(GREEDY, stop="<|im_end|>", ignore_eos=ignore_eos))
    assert (output.token_ids, output.finish_reason) == (tokens[: tokens.index(special) + 1], "stop")
    assert output.text == TOKENIZER.decode(tokens[: tokens.index(special)])
    for other in ("plain", "<|end|>"):  # a token that is not special, and a text that is no token
        (output,) = llm.generate(PROMPTS[:1], dataclasses.replace(GREEDY, stop=other))
        assert output.token_ids == tokens


@pytest.mark.parametrize("way", [{"stop_token_ids": "end"}, {"stop": "end"}], ids=["stop_token_ids", "stop"])
@pytest.mark.parametrize("speculate", [0, 3])
def test_min_tokens_come_before_any_end(way, speculate):
    """The likeliest token after the prompt ends the sequence, and is not drawn as long as there are too few."""
    end = unserved(PROMPTS[0])[0]
    stops = dict.fromkeys(way, (end,))
    llm = engine(speculate=speculate)
    early, late = llm.generate(PROMPTS[:1] * 2, [dataclasses.replace(GREEDY, min_tokens=n, **stops) for n in (0, 3)])
    assert early.token_ids == [end]
    assert end not in late.token_ids[:3]
    assert len(late.token_ids) >= 3


def test_a_bias_decides_what_is_drawn():
    (output,) = engine().generate(PROMPTS[:1], dataclasses.replace(GREEDY, logit_bias={65: 100.0}))
    assert output.text == "A" * NUM_TOKENS
    first = unserved(PROMPTS[0])[0]
    (output,) = engine().generate(PROMPTS[:1], dataclasses.replace(GREEDY, logit_bias={first: -100.0}))
    assert first not in output.token_ids
    with pytest.raises(ValueError, match=r"logit_bias must name tokens in \[0, vocab_size = 257\), got 257"):
        engine().add_request(PROMPTS[0], SamplingParams(logit_bias={257: 1.0}))


# ------------------------------------------------------------------------------------------------ options


def test_an_engine_takes_its_options_as_one_value_or_one_by_one():
    config = EngineConfig(num_blocks=64, block_size=4)
    llm = LLM(MODEL, config, tokenizer=TOKENIZER)
    assert llm.config == dataclasses.replace(config, backend=llm.config.backend, max_model_len=512)
    other = LLM(MODEL, config, tokenizer=TOKENIZER, block_size=8)
    assert (other.config.num_blocks, other.memory.block_size) == (64, 8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        llm.config.block_size = 5
    assert pickle.loads(pickle.dumps(llm.config)) == llm.config
    with pytest.raises(TypeError, match="unexpected keyword argument 'blocks'"):
        LLM(MODEL, blocks=3)


def test_a_memory_of_ones_own_serves_the_engine():
    """Any object with the methods of `Memory`, and no other."""
    made = []

    class Counting:
        """A paged memory behind the protocol alone."""

        def __init__(self, config, sizes, device, dtype):
            self._paged = PagedMemory(config, sizes, device, dtype)
            made.append(self)

    for name in {name for name in vars(Memory) if not name.startswith("_")} | Memory.__annotations__.keys():
        setattr(Counting, name, property(lambda self, name=name: getattr(self._paged, name)))
    llm = engine(memory=Counting)
    assert llm.memory is made[0]
    assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == [unserved(prompt) for prompt in PROMPTS]
    methods = [name for name, value in vars(Memory).items() if callable(value) and not name.startswith("_")]
    assert len(methods) <= 8


def test_the_last_token_may_complete_a_stop_string_or_leave_half_of_one():
    whole = TOKENIZER.decode(unserved(PROMPTS[0]))
    stop = next(whole[-n:] for n in range(1, len(whole)) if whole.index(whole[-n:]) == len(whole) - n)
    pieces = []
    llm = engine()
    for string in (stop, stop + "never"):
        llm.add_request(PROMPTS[0], dataclasses.replace(GREEDY, stop=string), listener=pieces.append)
    outputs = {output.request_id: output for output in finished(llm)}
    stopped, full = outputs[0], outputs[1]
    assert (stopped.text, stopped.finish_reason) == (whole.removesuffix(stop), "stop")
    assert (full.text, full.finish_reason) == (whole, "length")
    assert "".join(piece.text for piece in pieces if piece.request_id == 1) == whole


# ------------------------------------------------------------------------------------------------ samples


@pytest.mark.parametrize("attention", ["paged", "dense"])
def test_samples_of_a_prompt_differ_and_their_scores_are_the_sums_of_their_logprobs(attention):
    llm = engine(attention=attention, block_size=4)
    (output,) = llm.generate([PROMPTS[2]], SamplingParams(max_tokens=10, n=4, seed=3, logprobs=1))
    assert len({tuple(choice.token_ids) for choice in output.choices}) == 4
    for choice, logprobs in zip(output.choices, output.logprobs, strict=True):
        chosen = [step[token] for token, step in zip(choice.token_ids, logprobs, strict=True)]
        assert choice.score == pytest.approx(sum(chosen))
    assert nothing_is_held(llm)


def test_what_was_in_the_memory_of_a_dense_batch_before_does_not_matter():
    llm = engine(attention="dense")
    llm.memory._padded_buffer = torch.full((100_000,), torch.nan)
    outputs = llm.generate(PROMPTS[:2], GREEDY)
    assert [output.token_ids for output in outputs] == [unserved(prompt) for prompt in PROMPTS[:2]]


@pytest.mark.parametrize("attention", ["paged", "dense"])
def test_a_listener_and_the_output_number_samples_alike(attention):
    """The samples end at different steps, and the likeliest sample is not the first one."""
    llm, heard = engine(attention=attention), {}
    params = SamplingParams(max_tokens=12, n=4, seed=3, stop="e")

    def listen(piece):
        heard[piece.choice] = heard.get(piece.choice, "") + piece.text

    llm.add_request(PROMPTS[2], params, listener=listen)
    (output,) = finished(llm)
    assert [heard[i] for i in range(4)] == [choice.text for choice in output.choices]
    assert (output.text, output.token_ids) == output.choices[0][1::-1]
    scores = [choice.score for choice in output.choices]
    assert scores != sorted(scores, reverse=True)
    assert len({len(choice.token_ids) for choice in output.choices}) > 1


# ------------------------------------------------------------------------------------------------ requests and steps


def test_requests_may_come_and_go_while_others_run():
    llm = engine()
    pieces = []
    first = llm.add_request(PROMPTS[0], GREEDY, listener=pieces.append)
    llm.step()
    second = llm.add_request(PROMPTS[1], GREEDY)
    llm.step()
    third = llm.add_request(PROMPTS[3], GREEDY)
    llm.abort(second)
    outputs = {output.request_id: output for output in finished(llm)}
    assert outputs.keys() == {first, third}
    assert [token for piece in pieces for token in piece.token_ids] == outputs[first].token_ids
    assert "".join(piece.text for piece in pieces) == outputs[first].text
    assert [piece.finish_reason for piece in pieces] == [None] * (NUM_TOKENS - 1) + ["length"]
    llm.abort(second), llm.abort(first)  # they have ended: nothing happens
    with pytest.raises(ValueError, match="there is no request 3"):
        llm.abort(3)


def test_what_ends_while_generate_runs_is_told_by_the_next_step():
    llm = engine()
    other = llm.add_request(PROMPTS[0], SamplingParams(max_tokens=2, temperature=0))
    longer = llm.add_request(PROMPTS[0], SamplingParams(max_tokens=2 * NUM_TOKENS, ignore_eos=True))
    (output,) = llm.generate(PROMPTS[1:2], GREEDY)
    assert output.token_ids == unserved(PROMPTS[1])
    assert llm.has_unfinished
    assert [output.request_id for output in llm.step()] == [other]
    assert len(llm.scheduler.running) == 1  # no one waited for the longer request
    llm.abort(longer)
    assert not llm.has_unfinished


def test_the_bar_counts_the_prompts_that_have_ended(monkeypatch):
    counted = []
    bar = contextlib.nullcontext(types.SimpleNamespace(update=counted.append))
    monkeypatch.setattr("pagewise.engine.llm.progress_bar", lambda *_, **options: bar)
    engine().generate(PROMPTS[:3], [dataclasses.replace(GREEDY, max_tokens=n) for n in (2, 3, 2)])
    assert counted == [0, 2, 1]


# ------------------------------------------------------------------------------------------------ failures


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["model", "write", "sample"])
@pytest.mark.parametrize("attention", ["paged", "dense"])
def test_a_step_that_fails_leaves_everything_as_if_it_had_not_begun(error, where, attention, monkeypatch):
    if where == "write" and attention == "dense":
        where = "model"
    llm = engine(attention=attention)
    ids = [llm.add_request(prompt, GREEDY) for prompt in PROMPTS]
    llm.step(), llm.step()
    target, name = {
        "model": (MODEL, "forward"),
        "write": (paged_memory, "kv_writer"),
        "sample": (sampling, "_in_cpp"),
    }[where]

    def fail(*arguments, **options):
        raise error("planted")

    with monkeypatch.context() as patch:
        patch.setattr(target, name, fail)
        with pytest.raises(error, match="planted"):
            llm.step()
    assert llm.failed_ids == ids
    assert [request.id for request in llm.scheduler.waiting] == ids
    assert nothing_is_held(llm)
    outputs = {output.request_id: output for output in finished(llm)}
    assert [outputs[i].token_ids for i in ids] == [unserved(prompt) for prompt in PROMPTS]


class FailsOnce:
    """The tokenizer, but call number `at` of `decode` raises an error."""

    def __init__(self, at, error):
        self.at, self.error, self.calls = at, error, itertools.count()

    def decode(self, ids, **options):
        if next(self.calls) == self.at:
            raise self.error("planted")
        return TOKENIZER.decode(ids, **options)


@pytest.mark.parametrize("params", [{"temperature": 0}, {"n": 2, "seed": 1}, {"beam_width": 2}], ids=str)
@pytest.mark.parametrize("prompt", [PROMPTS[3], PROMPTS[0]])
@pytest.mark.parametrize("at", range(3))
def test_a_tokenizer_that_fails_ends_its_own_sequence_and_no_other(at, prompt, params):
    """Sample 1 of a prompt of one token, too, after sample 0 has its first token."""
    llm, heard = engine(), []
    sampling = SamplingParams(max_tokens=2, ignore_eos=True, **params)
    (expected,) = engine().generate([prompt], sampling)
    other = llm.add_request(PROMPTS[1], GREEDY)
    llm.step()
    failing = llm.add_request(prompt, sampling, listener=heard.append)
    request = llm.scheduler.waiting[0]
    request.tokenizer = FailsOnce(at, RuntimeError)
    for sequence in request.live[-1:] if sampling.beam_width == 1 else ():
        sequence.text._decode = request.tokenizer.decode
    outputs = {output.request_id: output for output in finished(llm)}
    assert outputs[other].token_ids == unserved(PROMPTS[1])
    output, choices = outputs[failing], outputs[failing].choices
    failed = [choice.finish_reason == "error" for choice in choices]
    assert failed == {1: [True], 2: [sampling.beam_width > 1, True]}[sampling.width]
    assert output.error == "the tokenizer raised RuntimeError: planted"
    errors = [piece.error for piece in heard if piece.finish_reason == "error"]
    assert errors == [output.error] * sum(failed)
    for choice, wanted, is_failed in zip(choices, expected.choices, failed, strict=True):
        if not is_failed:
            assert choice[:2] == wanted[:2]
        elif sampling.beam_width == 1:
            assert choice.token_ids == wanted.token_ids[: at // 2]  # of two calls for each token
            assert choice.text == TOKENIZER.decode(choice.token_ids)
    assert nothing_is_held(llm)


@pytest.mark.slow
def test_an_interrupt_while_text_is_made_costs_no_letter():
    for at in range(6):
        llm, heard = engine(), {}

        def hear(piece, heard=heard):
            heard[piece.request_id] = heard.get(piece.request_id, "") + piece.text

        ids = [llm.add_request(prompt, GREEDY, listener=hear) for prompt in PROMPTS]
        llm.step()
        fails_once = FailsOnce(at, KeyboardInterrupt)
        for request in llm.scheduler.running:
            request.live[0].text._decode = fails_once.decode
        with pytest.raises(KeyboardInterrupt):
            llm.step()
        outputs = {output.request_id: output for output in finished(llm)}
        for i, prompt in zip(ids, PROMPTS, strict=True):
            assert outputs[i].token_ids == unserved(prompt)
            assert outputs[i].text == heard[i] == TOKENIZER.decode(unserved(prompt))


def test_a_prompt_that_the_tokenizer_cannot_decode_is_refused_alone(monkeypatch):
    """The model may have more tokens than the tokenizer."""
    llm = engine()
    first = llm.add_request(PROMPTS[0], GREEDY)
    llm.step()
    with monkeypatch.context() as patch:
        patch.setattr(TOKENIZER, "decode", lambda *a, **k: [][0])
        with pytest.raises(ValueError, match="prompt must be tokens that the tokenizer decodes: it raised IndexError"):
            llm.add_request([65, 256], GREEDY)
    assert [(output.request_id, output.token_ids) for output in finished(llm)] == [(first, unserved(PROMPTS[0]))]


def test_generate_that_fails_forgets_its_requests_and_no_others(monkeypatch):
    llm = engine()
    other = llm.add_request(PROMPTS[0], GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(MODEL, "forward", lambda *a, **k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate(PROMPTS[1:], GREEDY)
    assert (len(llm.scheduler.waiting), len(llm.scheduler.running)) == (1, 0)
    outputs = finished(llm)
    assert [(output.request_id, output.token_ids) for output in outputs] == [(other, unserved(PROMPTS[0]))]


def test_ctrl_c_during_generate_leaves_a_usable_engine():
    llm = engine()
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS * 20, SamplingParams(max_tokens=400, ignore_eos=True))
    assert llm.step() == []  # in which listeners hear what they have not heard yet
    assert not llm.has_unfinished
    assert nothing_is_held(llm)
    assert llm.generate(PROMPTS[:1], GREEDY)[0].token_ids == unserved(PROMPTS[0])


def test_ctrl_c_within_bookkeeping_is_raised_at_its_end():
    usual, done = signal.getsignal(signal.SIGINT), []

    def bookkeeping():
        with held_back():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        bookkeeping()
    assert done
    assert signal.getsignal(signal.SIGINT) is usual


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(n=2, seed=1), SamplingParams(beam_width=2)], ids=str)
@pytest.mark.parametrize("step", [0, 3])
def test_logits_that_are_not_finite_end_their_own_request_and_no_other(params, step, monkeypatch):
    """The request comes last, so its tokens are the last rows."""
    llm, heard, outputs = engine(), [], {}
    forward = MODEL.forward

    def poisoned(*args, **options):
        logits = forward(*args, **options).clone()
        logits[:, 1:] = torch.nan
        return logits

    ids = [llm.add_request(PROMPTS[0], GREEDY), llm.add_request(PROMPTS[3], params, listener=heard.append)]
    for number in itertools.count():
        with monkeypatch.context() as patch:
            if number == step:
                patch.setattr(MODEL, "forward", poisoned)
            outputs |= {output.request_id: output for output in llm.step()}
        if not llm.has_unfinished:
            break
    assert outputs[ids[0]].token_ids == unserved(PROMPTS[0])
    for choice in outputs[ids[1]].choices:
        assert choice.finish_reason == "error"
        assert len(choice.token_ids) == step
        assert choice.text == TOKENIZER.decode(choice.token_ids)
    assert outputs[ids[1]].error == heard[-1].error == "the model's logits are not finite"
    assert outputs[ids[0]].error is None
    assert heard[-1].finish_reason == "error"
    assert nothing_is_held(llm)


# ------------------------------------------------------------------------------------------------ limits


def test_what_just_fits_is_taken():
    llm = engine(num_blocks=64, max_num_seqs=6, max_num_batched_tokens=5)
    llm.add_request("x" * 500, SamplingParams(max_tokens=12))
    llm.add_request("x", SamplingParams(n=5))
    engine(max_num_seqs=6).add_request("x", SamplingParams(n=6))
    model = for_backend(MODEL, "triton")
    assert LLM(model, backend="triton", block_size=256, num_blocks=1).memory.num_tokens == 256
    model = for_backend(GPT2(GPT2Config(9, 256, 1, 1)), "triton")
    assert LLM(model, backend="triton", num_blocks=1).config.backend == "triton"


def test_greedy_requests_leave_torchs_generator_alone():
    before = torch.random.get_rng_state()
    engine().generate(PROMPTS[:1], GREEDY)
    engine().generate(PROMPTS[:1], SamplingParams(beam_width=2, max_tokens=2))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.slow
def test_the_most_new_tokens_are_what_context_and_memory_leave():
    assert engine(num_blocks=64).max_new_tokens("x" * 100) == MODEL.config.max_position_embeddings - 100
    for attention in ("paged", "dense"):
        llm = engine(num_blocks=8, attention=attention)
        most = llm.max_new_tokens("x" * 100)
        assert most == 8 * 16 + 1 - 100  # the last token needs no slot
        (output,) = llm.generate(["x" * 100], SamplingParams(max_tokens=most, ignore_eos=True))
        assert len(output.token_ids) == most
        with pytest.raises(ValueError, match="the memory has"):
            llm.add_request("x" * 100, SamplingParams(max_tokens=most + 1))


def test_without_num_blocks_there_is_room_for_all_sequences_or_a_quarter_of_the_free_memory(monkeypatch):
    assert LLM(MODEL, max_num_seqs=3).memory.num_blocks == 3 * 512 // 16
    monkeypatch.setattr(os, "sysconf", {"SC_AVPHYS_PAGES": 1000, "SC_PHYS_PAGES": 9999, "SC_PAGE_SIZE": 4096}.get)
    memory = LLM(MODEL, max_num_seqs=100).memory
    assert memory.nbytes <= 1_024_000 < memory.nbytes + memory.nbytes // memory.num_blocks
    monkeypatch.setattr(os, "sysconf", {"SC_AVPHYS_PAGES": 1, "SC_PHYS_PAGES": 9999, "SC_PAGE_SIZE": 4096}.get)
    with pytest.raises(ValueError, match="no memory for a block of 32768 bytes"):
        LLM(MODEL)
