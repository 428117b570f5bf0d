"""Extreme fields and bodies of any kind from one client do not keep other clients from their tokens."""

import functools
import json
import math
from fractions import Fraction

import pytest
import torch
from exact_model import VOCAB, ExactModel
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pagewise.engine import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shapes_unchecked")]
QUICK = {"deadline": None, "database": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}

NUMBERS = (0, 1, 2, -1, 0.5, 1e-320, 1e-46, 1e-40, 1e-5, 1e-2, 1e2, 1e6, 1e38, 1e300, math.nan, math.inf, -math.inf)
WHOLE = (0, 1, 2, 3, 7, 20, -1, 2**31, 2**62, 2**63, -(2**63), 10**30)
ODD = (None, True, "1", [], (), {}, Fraction(1, 3), 10**400, torch.tensor(2), b"x")
FIELDS = {
    **dict.fromkeys(("max_tokens", "top_k", "n", "beam_width", "seed", "logprobs"), (*WHOLE, *ODD)),
    **dict.fromkeys(("temperature", "repetition_penalty"), (*NUMBERS, *ODD)),
    **dict.fromkeys(("top_p", "min_p"), (*NUMBERS, 1 - 2**-53, *ODD)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (*NUMBERS, -2, -1e-320, *ODD)),
    "stop": [(), 0, (7,), VOCAB, tuple(range(VOCAB)), "x", "", (None,), *ODD],
    "ignore_eos": [True, False, *ODD],
}
ONE_FIELD = st.sampled_from([(name, value) for name, values in FIELDS.items() for value in values])


class Huge(ExactModel):
    """Logits near float32's largest and smallest numbers for sequences that hold token 1, and many that are -inf."""

    def forward(self, token_ids, positions, attend, *, logits_for=None):
        logits = super().forward(token_ids, positions, attend, logits_for=logits_for)
        newest = token_ids if logits_for is None else token_ids[:, logits_for]
        huge = torch.where(logits > 3, 1e38 * (logits - 3.5), -torch.inf)
        return torch.where((newest == 1)[..., None], huge, logits)


MODEL = Huge()
INNOCENT = ([5, 9, 3], SamplingParams(max_tokens=6, seed=1, top_p=0.9, ignore_eos=True))
INNOCENT_GREEDY = ([8, 9], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))


def engine():
    return LLM(MODEL, num_blocks=64, block_size=4, max_num_seqs=16)


@functools.cache
def alone():
    return [engine().generate([prompt], params)[0].choices for prompt, params in (INNOCENT, INNOCENT_GREEDY)]


@settings(max_examples=150, **QUICK)
@given(st.lists(ONE_FIELD, min_size=1, max_size=3).map(dict))
@example({"temperature": 1e-46})
@example({"repetition_penalty": 0.01, "max_tokens": 4})
@example({"presence_penalty": 2, "frequency_penalty": 2, "max_tokens": 7})
@example({"presence_penalty": -2, "frequency_penalty": -2, "beam_width": 2})
@example({"min_p": 1, "n": 7, "max_tokens": 7})
@example({"n": 2**62, "max_tokens": 1})
@example({"beam_width": 7, "stop": tuple(range(VOCAB))})
def test_no_sampling_parameters_change_the_tokens_of_others(fields):
    llm = engine()
    ids = [llm.add_request(*one) for one in (INNOCENT, INNOCENT_GREEDY)]
    try:
        request = llm.add_request([1, 4], SamplingParams(**fields))
        refusal = None
    except (ValueError, TypeError) as error:
        refusal = str(error)
    outputs = {}
    for _ in range(200):
        outputs |= {output.request_id: output for output in llm.step()}
    assert not llm.has_unfinished
    assert [outputs[i].choices for i in ids] == alone()
    if refusal:
        assert any(name in refusal for name in fields), refusal
        return
    params = SamplingParams(**fields)
    assert 1 <= len(outputs[request].choices) <= params.width
    for choice in outputs[request].choices:
        assert len(choice.token_ids) <= params.max_tokens
        assert choice.finish_reason in ("stop", "length", "error")


# ------------------------------------------------------------------------------------------------ bodies

JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)


def plausible(*values):
    """Return one of these values, or now and then an arbitrary value."""
    return st.integers(0, 9).flatmap(lambda number: JUNK if number == 9 else st.sampled_from(values))


MESSAGE = st.fixed_dictionaries(
    {"role": plausible("user", "system", "tool"), "content": plausible("Hi", [], "é\ud800")}
)
OPTIONS = {
    "temperature": (0, 1e-46, 2.0, 1e308),
    "top_k": (0, 1, 5, 2**62),
    "top_p": (1, 1e-320, 0.5),
    "n": (1, 2, 64, 2**62),
    "beam_width": (1, 2, 65, 2**62),
    "stop": ("e", ["e", 101], [[]]),
    "seed": (1, -(2**63), 2**63),
    "ignore_eos": (True,),
    "repetition_penalty": (1.5, 0.01, 1e-40, 100),
    "min_p": (0, 1, 1e-320, 2),
    "presence_penalty": (2, -2, 1e-320, 1e308),
    "frequency_penalty": (2, -2, 1e-320, 1e308),
    "logprobs": (1, 20, True, 21),
    "top_logprobs": (2, 20),
    "stream": (True, False),
    "stream_options": ({"include_usage": True},),
    "tools": ([],),
    "user": ("me",),
}
OPTION = st.sampled_from(sorted(OPTIONS)).flatmap(lambda name: st.tuples(st.just(name), plausible(*OPTIONS[name])))
BODY = st.builds(
    lambda fixed, options: fixed | dict(options),
    st.fixed_dictionaries(
        {
            "prompt": plausible("A", ["A", "B"], [65], [[65], [66, 67]], [256], "\x00", "é" * 300),
            "messages": st.lists(MESSAGE, max_size=2),
            "max_tokens": st.sampled_from([1, 2, 3, 4, 5, 2**70]),
        }
    ),
    st.lists(OPTION, max_size=3),
)


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("uvicorn", reason="the server needs the extra `serve`")
    from serving import serving, tiny_llm

    with serving(tiny_llm(num_blocks=128), max_queue=8) as server:
        yield server
        assert server.becomes_idle()


@settings(max_examples=120, **QUICK)
@given(path=st.sampled_from(["/v1/completions", "/v1/chat/completions"]), body=BODY, both=st.integers(0, 9))
def test_a_body_is_answered_or_refused_with_a_message(server, path, body, both):
    if both:  # a field of the other endpoint is refused
        body = {name: value for name, value in body.items() if name != ("messages", "prompt")["chat" in path]}
    answer = server.post(path, json.dumps(body).encode())
    if answer.status_code == 200:
        whole = answer.text.endswith("data: [DONE]\n\n") if body.get("stream") else answer.json()["choices"]
        assert whole, answer.text
        assert "error" not in answer.text.split('"finish_reason"')[0]
        return
    assert 400 <= answer.status_code < 500, (answer.status_code, answer.text)
    assert answer.json()["error"]["message"]
