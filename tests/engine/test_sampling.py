"""Sampling agrees with transformers' processors, has the right frequencies, and works at its limits."""

import dataclasses
import math
import random
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from exact_model import row as row_of
from torch.utils._python_dispatch import TorchDispatchMode

from pagewise.engine import LLM, SamplingParams, sampling
from pagewise.engine.sampling import TokenCounts, adjusted, likeliest, sample, uniform
from pagewise.models import tiny_model

VOCAB = 12
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0)) * 2
SETTINGS = [
    {},
    {"temperature": 0.3},
    {"top_k": 4},
    {"top_p": 0.6},
    {"top_k": 6, "top_p": 0.7, "temperature": 1.7},
    {"repetition_penalty": 1.8, "top_p": 0.9},
    {"repetition_penalty": 0.5},
    {"top_k": 1},
    {"top_p": 1e-9},
    {"top_k": 100},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"min_p": 0.3, "temperature": 3.0},
    {"min_p": 0.1, "top_p": 0.95, "top_k": 7},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.8},
    {"presence_penalty": -2.0, "frequency_penalty": 1.1, "repetition_penalty": 1.4, "min_p": 0.02},
]
TOKENS, NUM_NEW = [3, 5, 3, 8, 8, 3], 3  # a prompt of three tokens, and three new ones


@pytest.fixture(params=["C++", "torch"])
def way(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(sampling, "_in_cpp", lambda *a: None)


BOTH = pytest.mark.usefixtures("way")


def row(logits=0, tokens=TOKENS, seed=0, choice=0, num_new=NUM_NEW, **params):
    return row_of(logits, SamplingParams(**params), list(tokens), num_new, seed, choice)


def drawn(logits, **params):
    """Return how often each token is drawn, with 2000 seeds."""
    params = SamplingParams(**params)
    rows = [row_of(0, params, TOKENS, NUM_NEW, seed) for seed in range(2000)]
    return torch.tensor([pick.token for pick in sample(logits[None], rows)]).bincount(minlength=len(logits))


@BOTH
@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_tokens_are_drawn_as_transformers_processors_say(params):
    """OpenAI's two penalties, which transformers does not have, follow its repetition penalty as their formula says."""
    import transformers

    params = SamplingParams(**params)
    counts = torch.tensor(TOKENS[-NUM_NEW:]).bincount(minlength=VOCAB)
    penalties = params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    processors = transformers.LogitsProcessorList(
        [
            transformers.RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
            lambda _, scores: scores - penalties,
            transformers.TemperatureLogitsWarper(params.temperature),
            transformers.TopKLogitsWarper(params.top_k or VOCAB),
            transformers.TopPLogitsWarper(params.top_p),
            transformers.MinPLogitsWarper(params.min_p),
        ]
    )
    expected = processors(torch.tensor([TOKENS]), LOGITS[None].clone())[0].double().softmax(-1)
    counts = drawn(LOGITS, **dataclasses.asdict(params))
    assert counts[expected == 0].sum() == 0
    n = counts.sum()
    assert ((counts - n * expected).abs() <= 4.5 * (n * expected * (1 - expected)).sqrt() + 1e-6).all()


@BOTH
def test_temperature_zero_takes_the_likeliest_after_the_penalty():
    assert sample(LOGITS[None], [row(temperature=0)])[0].token == LOGITS.argmax()
    best, expected = LOGITS.topk(2).indices.tolist()
    logits = LOGITS[None]
    for penalty in ({"repetition_penalty": 50.0}, {"presence_penalty": 2.0}, {"frequency_penalty": 1.0}):
        second = sample(logits, [row(tokens=[1, best, best], num_new=2, temperature=0, logprobs=1, **penalty)])[0]
        assert second.token == expected
        exact = LOGITS.log_softmax(-1).tolist()  # the model's, not penalised
        assert second.likeliest == pytest.approx({expected: exact[expected], best: exact[best]})
        both = sample(logits, [row(tokens=[best, expected], num_new=2, temperature=0, **penalty)])[0]
        assert both.logprob == pytest.approx(exact[both.token])


@pytest.mark.parametrize(
    ("penalties", "expected"),
    [
        ({"presence_penalty": 0.5}, [2.0, -2.5, 0.5]),
        ({"frequency_penalty": 0.5}, [2.0, -3.0, 0.5]),
        ({"presence_penalty": 0.5, "frequency_penalty": 0.25}, [2.0, -3.0, 0.25]),
        ({"presence_penalty": -1.0, "frequency_penalty": 1.0, "repetition_penalty": 2.0}, [1.0, -5.0, 0.5]),
    ],
    ids=str,
)
def test_presence_and_frequency_penalties_count_new_tokens_only(penalties, expected):
    """A repetition penalty moves negative logits down, too, and counts a token once."""
    logits = torch.tensor([[2.0, -2.0, 1.0]] * 3)
    rows = [([0, 1, 1, 2, 1], 3, penalties), ([0, 1], 0, {}), ([0, 0], 0, penalties | {"repetition_penalty": 1.0})]
    rows = [row(0, tokens, num_new=num_new, **params) for tokens, num_new, params in rows]
    assert adjusted(logits.clone(), rows).tolist() == [expected, *logits[1:].tolist()]


@BOTH
@pytest.mark.parametrize("temperature", [1e-46, 1e-30, 1e-8, 1e-5, 1e-3])
def test_a_very_low_temperature_is_greedy(temperature):
    for logits in (LOGITS, LOGITS + 100, LOGITS.flip(0) + 100):
        picks = sample(logits[None], [row(seed=s, temperature=temperature) for s in range(50)])
        assert {pick.token for pick in picks} == {int(logits.argmax())}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("params", "most"),
    [
        ({"temperature": 0}, 6),
        ({"temperature": 0.8}, 19),
        ({"temperature": 0.8, "top_k": 5}, 30),
        ({"temperature": 0.8, "top_p": 0.9, "min_p": 0.1}, 29),
        ({"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.5}, 38),
    ],
    ids=str,
)
def test_a_step_takes_few_torch_operations(params, most, monkeypatch):
    """On a GPU each operation is a launch, and a step waits for all of them. top_k needs nine for equal logits."""
    monkeypatch.setattr(sampling, "_in_cpp", lambda *a: None)
    operations, logits = [], LOGITS.repeat(4, 1)

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            operations.append(str(operation))
            return operation(*args, **kwargs or {})

    with Recorder():
        sample(logits, [row(i, seed=i, **params) for i in range(4)])
    assert len(operations) <= most, operations


@BOTH
def test_what_a_row_draws_does_not_depend_on_the_rows_around_it():
    logits = torch.randn(30, 500, generator=torch.Generator().manual_seed(1)) * 3
    rows = [row(i, tokens=range(i + 4), seed=i, **SETTINGS[i % len(SETTINGS)]) for i in range(30)]
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], [one._replace(logits=0)])[0] for i, one in enumerate(rows)]
    assert [p.token for p in together] == [p.token for p in alone]
    assert [p.token for p in sample(logits, rows[::-1])] == [p.token for p in together[::-1]]
    some = [4, 17, 3]
    assert [p.token for p in sample(logits, [rows[i] for i in some])] == [together[i].token for i in some]


COARSE = (torch.randn(40, 300, generator=torch.Generator().manual_seed(2)) * 2).bfloat16().float().round()
NEIGHBOURS = {
    "top_p": {"top_p": 0.9},
    "a larger top_k": {"top_k": 170},
    "top_k of all": {"top_k": 300},
    "nothing": {},
    "greedy": {"temperature": 0},
    "penalties": {"repetition_penalty": 1.3, "top_k": 200},
    "log p": {"logprobs": 100},
}


@BOTH
@pytest.mark.parametrize("params", [{"top_k": 20}, {"top_p": 0.8}, {"top_k": 30, "top_p": 0.6, "logprobs": 7}], ids=str)
@pytest.mark.parametrize("neighbour", NEIGHBOURS)
def test_equal_logits_have_one_order_whatever_stands_beside_them(params, neighbour):
    """As in bfloat16: of 300 logits only a dozen differ."""
    logits = COARSE[:20]
    rows = [row(i, seed=i, **params) for i in range(20)]
    alone = [sample(logits[i : i + 1], [one._replace(logits=0)])[0] for i, one in enumerate(rows)]
    beside = sample(COARSE[:21], [*rows, row(20, **NEIGHBOURS[neighbour])])[:20]
    assert [pick.token for pick in beside] == [pick.token for pick in alone]
    assert [pick.likeliest and list(pick.likeliest) for pick in beside] == [
        pick.likeliest and list(pick.likeliest) for pick in alone
    ]


@pytest.mark.parametrize("k", [1, 3, 7, 299, 300])
@pytest.mark.parametrize("equal", [-0.0, -1e-44, -1.0, -math.inf])
def test_of_equal_scores_those_of_smaller_ids_come_first(k, equal):
    scores = torch.full((2, 300), equal)
    scores[1, 250] = 0.0
    values, ids = likeliest(scores, k)
    assert ids[0].tolist() == list(range(k))
    order = [250, *range(250), *range(251, 300)] if equal < 0 else list(range(300))
    assert ids[1].tolist() == order[:k]
    assert values.equal(scores.gather(1, ids))


def test_a_smaller_top_k_takes_the_beginning_of_a_larger_one():
    scores = COARSE - COARSE.amax(dim=-1, keepdim=True)
    whole = likeliest(scores, 300)[1]
    for k in (1, 2, 5, 50, 299):
        assert likeliest(scores, k)[1].equal(whole[:, :k])


def test_counts_that_grow_with_a_sequence_are_those_of_all_its_tokens():
    draw = random.Random(0)
    for with_prompt in (False, True):
        tokens = draw.choices(range(9), k=12)
        growing = TokenCounts(tokens, 12, with_prompt=with_prompt)
        for _ in range(40):
            tokens += draw.choices(range(12), k=draw.randrange(3))
            drafts = tuple(draw.choices(range(12), k=draw.randrange(4)))
            expected = Counter(tokens[12:]) + Counter(drafts)
            listed = {*expected, *(tokens if with_prompt else ())}
            ids, counts = growing.after(drafts)
            assert len(ids) == len(set(ids.tolist()))
            assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {t: expected[t] for t in listed}


def test_a_penalty_looks_at_each_token_once(shapes_unchecked):
    """However long the context is, and with drafts that are refused again and again."""
    looked = []

    class Watched(list):
        def __getitem__(self, at):
            looked.append(at)
            return super().__getitem__(at)

    tokens = Watched(range(9))
    first = row_of(0, SamplingParams(repetition_penalty=1.2, presence_penalty=0.5), tokens, 5)
    looked.clear()
    for step in range(5):
        sample(LOGITS[None], [first._replace(drafts=(5, step))])
        tokens.append(step)
    assert looked == list(range(13))


@BOTH
@pytest.mark.parametrize("penalty", [{}, {"repetition_penalty": 1.7}, {"presence_penalty": 1.0}], ids=str)
def test_a_bias_is_added_before_the_penalties_and_not_to_log_p(penalty):
    logits = torch.tensor([[1.0, -2.0, 0.5, 0.0]])
    biased = row(0, [3, 0], num_new=1, logit_bias={2: 3, 1: -100.0, 0: 0.25}, temperature=0, logprobs=2, **penalty)
    by_hand = adjusted(logits + torch.tensor([[0.25, -100.0, 3.0, 0.0]]), [row(0, [3, 0], num_new=1, **penalty)])
    assert adjusted(logits.clone(), [biased]).equal(by_hand)
    (pick,) = sample(logits, [biased])
    assert pick.token == 2
    exact = logits[0].log_softmax(-1).tolist()
    assert pick.likeliest == pytest.approx({2: exact[2], 0: exact[0]})


@BOTH
@pytest.mark.parametrize("num_new", [0, 1, 2, 3])
@pytest.mark.parametrize("drafts", [(), (0,)])
def test_end_tokens_are_not_drawn_before_there_are_min_tokens(num_new, drafts):
    logits = torch.tensor([[0.0, 9.0, 1.0, 8.0], [0.0, 9.0, 1.0, 8.0]])
    params = SamplingParams(temperature=0, min_tokens=3)
    rows = [row_of(0, params, [0] * 5, num_new, drafts=drafts, ends=frozenset({1, 3})), row(1, temperature=0)]
    picks = sample(logits, rows)
    assert [pick.token for pick in picks] == [2 if num_new + len(drafts) < 3 else 1, 1]


@BOTH
def test_if_only_end_tokens_are_possible_before_min_tokens_there_is_no_token():
    params = SamplingParams(min_tokens=1)
    assert sample(torch.zeros(1, 2), [row_of(0, params, [0], 0, ends=frozenset({0, 1}))]) == [None]


@BOTH
@pytest.mark.parametrize("params", [{}, {"top_p": 0.999999}, {"top_k": 3}], ids=str)
def test_a_token_that_the_model_excludes_is_never_drawn(params):
    logits = torch.full((VOCAB,), -math.inf)
    logits[[0, 7]] = torch.tensor([0.0, 1.0])
    assert set(drawn(logits, **params).nonzero()[:, 0].tolist()) == {0, 7}


@BOTH
def test_the_largest_number_that_is_drawn_still_finds_a_likely_token(monkeypatch):
    """The weights of 500 rows have 500 different sums, which times 1 − 2⁻⁵³ must not round up to the sums."""
    logits = torch.tensor([[0.0, 0.0, -math.inf]]).repeat(500, 1)
    logits[1:, 1] = -torch.rand(499, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr("pagewise.engine.sampling.uniform", lambda *a: 1 - 2.0**-53)
    for params in ({}, {"top_k": 3}, {"top_p": 0.9999}):
        picks = sample(logits, [row(i, tokens=[], num_new=0, **params) for i in range(500)])
        assert {pick.token for pick in picks} == {1}


@BOTH
@pytest.mark.parametrize("params", [{}, {"top_k": 3}, {"top_p": 0.9999}], ids=str)
def test_the_smallest_number_that_is_drawn_finds_no_excluded_token(params, monkeypatch):
    monkeypatch.setattr("pagewise.engine.sampling.uniform", lambda *a: 0.0)
    assert sample(torch.tensor([[-math.inf, 0.0, 0.0]]), [row(tokens=[], num_new=0, **params)])[0].token in (1, 2)


@BOTH
@pytest.mark.parametrize("params", [{}, {"top_k": 3}, {"top_p": 0.9999}], ids=str)
def test_a_number_between_two_tokens_draws_the_second(params, monkeypatch):
    """It is the sum of the first token's probability, which does not exceed it."""
    monkeypatch.setattr("pagewise.engine.sampling.uniform", lambda *a: 0.5)
    assert sample(torch.tensor([[0.0, 0.0, -math.inf]]), [row(tokens=[], num_new=0, **params)])[0].token == 1


@pytest.mark.slow
@BOTH
def test_tokens_that_reach_top_p_exactly_are_enough():
    assert drawn(torch.zeros(2), top_p=0.5).count_nonzero() == 1


@BOTH
def test_another_number_is_drawn_at_each_position():
    picks = sample(torch.zeros(1, 1000), [row(tokens=[1] * n, num_new=0) for n in range(1, 20)])
    assert len({pick.token for pick in picks}) > 15


@BOTH
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [{}, {"temperature": 0}, {"top_k": 3, "logprobs": 2}], ids=str)
def test_a_row_whose_logits_are_not_finite_has_no_token_and_others_have_theirs(bad, params):
    logits = LOGITS.clone()
    logits[slice(None) if bad == -math.inf else 4] = bad
    expected = sample(LOGITS[None], [row(0, **params)])
    rows = [row(0, **params), row(1, **params), row(0, **params)]
    assert sample(torch.stack([LOGITS, logits]), rows) == [*expected, None, *expected]


@BOTH
def test_a_penalty_that_leads_out_of_float32_ends_only_its_own_row():
    logits = torch.tensor([[1e38, 0.0, 1.0]])
    rows = [row(tokens=[0], num_new=0, repetition_penalty=0.01), row(tokens=[0], num_new=0)]
    assert [pick and pick.token for pick in sample(logits, rows)] == [None, 0]


@BOTH
@pytest.mark.parametrize("params", [{}, {"temperature": 0}, {"top_p": 0.5}, {"top_k": 2}], ids=str)
def test_the_largest_finite_logits_have_a_token(params):
    assert sample(torch.tensor([[3e38, 0.0, -3e38]]), [row(tokens=[], num_new=0, **params)])[0].token == 0


def test_numbers_of_any_type_are_kept_as_pythons(shapes_unchecked):
    given = {"temperature": Fraction(1, 2), "top_p": np.float32(0.5), "min_p": 1, "presence_penalty": -1, "top_k": 3}
    params = dataclasses.asdict(SamplingParams(**given))
    assert {name: params[name] for name in given} == given
    assert [type(params[name]) for name in given] == [float, float, float, float, int]


@BOTH
def test_logprobs_are_the_models_own_the_chosen_one_first():
    pick = sample(LOGITS[None], [row(temperature=5.0, seed=3, logprobs=2)])[0]
    exact = LOGITS.double().log_softmax(-1)
    likeliest = exact.topk(2).indices.tolist()
    assert next(iter(pick.likeliest)) == pick.token
    assert set(pick.likeliest) == {pick.token, *likeliest}
    assert all(value == pytest.approx(exact[token].item(), abs=1e-5) for token, value in pick.likeliest.items())
    assert sample(LOGITS[None], [row(logprobs=0)])[0].likeliest.keys() == {sample(LOGITS[None], [row()])[0].token}


def test_uniform_numbers_differ_by_seed_choice_and_position_and_fill_the_interval():
    numbers = torch.tensor([uniform(7, 0, position) for position in range(4000)], dtype=torch.float64)
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert numbers.unique().numel() == 4000
    assert abs(numbers.mean() - 0.5) < 0.02
    assert abs((numbers[1:] * numbers[:-1]).mean() - 0.25) < 0.02
    others = [uniform(*key) for key in ((8, 0, 5), (7, 1, 5), (7, 0, 6), (7 + 2**40, 0, 5), (-7, 0, 5))]
    assert len({*others, numbers[5].item()}) == 6


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_k": -2}, "top_k must be at least -1"),
        ({"top_k": 2.5}, "top_k must be an int"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
        ({"n": 0}, "n must be at least 1"),
        ({"n": 2, "beam_width": 3}, "beam_width = 3 and n = 2 exclude each other"),
        ({"temperature": 1e7}, r"temperature must be from 0 to 1e\+06, got 10000000.0: 1 changes nothing"),
        ({"min_p": -0.1}, "min_p must be from 0 to 1, got -0.1: 0 changes nothing"),
        ({"min_p": 1.5}, "min_p must be from 0 to 1, got 1.5"),
        ({"min_p": "0.1"}, "min_p must be a number, got str"),
        ({"presence_penalty": -2.5}, "presence_penalty must be from -2 to 2, got -2.5: 0 changes nothing"),
        ({"frequency_penalty": 3}, "frequency_penalty must be from -2 to 2, got 3"),
        ({"frequency_penalty": math.nan}, "frequency_penalty must be a finite number, got nan"),
        ({"beam_width": 2, "min_p": 0.5}, "min_p = 0.5 with beam_width = 2: a beam search draws nothing"),
        ({"temperature": 10**400}, "temperature must be"),
        ({"n": 2, "temperature": 0}, "n = 2 samples at temperature 0 are all the same"),
        ({"n": 2, "temperature": 1e-6}, "n = 2 samples at temperature 1e-06 are all the same"),
        ({"beam_width": 2, "top_k": 5}, "top_k = 5 with beam_width = 2"),
        ({"beam_width": 2, "top_p": 0.5}, "top_p = 0.5 with beam_width = 2"),
        ({"beam_width": 2, "logprobs": 1}, "logprobs = 1 with beam_width = 2"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be from 0.01 to 100, got 0.0: 1 changes nothing"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty must be from 0.01 to 100, got 1e-40"),
        ({"repetition_penalty": 101}, "repetition_penalty must be from 0.01 to 100, got 101"),
        ({"stop": ("", "a")}, "stop must not hold an empty string"),
        ({"stop": (-1,)}, "stop must be at least 0"),
        ({"stop": 1.5}, "stop must be strings and token ids, got float"),
        ({"stop": (None,)}, "stop must be an int"),
        ({"seed": "1"}, "seed must be an int"),
        ({"seed": 2**63}, "seed must be below"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False"),
        ({"logprobs": -1}, "logprobs must be at least 0"),
        ({"min_tokens": -1}, "min_tokens must be at least 0"),
        ({"min_tokens": 17}, "min_tokens must be at most max_tokens = 16, got 17"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids must be at least 0"),
        ({"stop_token_ids": ("a",)}, "stop_token_ids must be an int"),
        ({"stop_token_ids": 5}, "stop_token_ids must be token ids, got int"),
        ({"stop_token_ids": "5"}, "stop_token_ids must be token ids, got str"),
        ({"logit_bias": {1: 101}}, "logit_bias must be from -100 to 100, got 101 for 1"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias must be at least 0"),
        ({"logit_bias": {"1": 1.0}}, "logit_bias must be an int, got str"),
        ({"logit_bias": {1: math.nan}}, "logit_bias must be a finite number"),
        ({"logit_bias": {1: None}}, "logit_bias must be a number, got NoneType"),
        ({"logit_bias": [1]}, "logit_bias must be {token id: number}, got list"),
    ],
    ids=str,
)
def test_what_contradicts_itself_is_refused_by_name(params, message, shapes_unchecked):
    with pytest.raises((ValueError, TypeError), match=message):
        SamplingParams(**params)


def test_stop_may_be_one_thing_or_several():
    assert SamplingParams(stop="x").stop == ("x",)
    assert SamplingParams(stop=5).stop_ids == (5,)
    params = SamplingParams(stop=["a", 3, "b"], stop_token_ids=[7, 3])
    assert (params.stop_strings, params.stop_ids) == (("a", "b"), (3, 7, 3))


def test_two_spellings_of_the_same_parameters_are_equal():
    assert SamplingParams(top_k=-1, logit_bias={}) == SamplingParams()
    one, other = SamplingParams(logit_bias={5: 1, 2: -3.5}), SamplingParams(logit_bias={2: -3.5, 5: 1.0})
    assert one == other == dataclasses.replace(one)
    assert hash(one) == hash(other)


def test_without_a_seed_torchs_generator_gives_one():
    llm = LLM(tiny_model()[0], num_blocks=8)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        first = llm.prepare([1], SamplingParams()).seed
        torch.manual_seed(5)
        assert llm.prepare([1], SamplingParams()).seed == first
        assert llm.prepare([1], SamplingParams()).seed != first
    assert llm.prepare([1], SamplingParams(seed=9)).seed == 9


@pytest.mark.parametrize("vocab", [1001, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_likeliest_token_is_the_first_of_equal_ones(dtype, vocab):
    logits = torch.randn(8, vocab).to(dtype)
    logits[0, [1000, 17, 400]] = logits[1, [31, 16, 15]] = 9
    logits[2, 5], logits[3, 700], logits[4] = torch.nan, torch.inf, -torch.inf
    logits[5], logits[6, :1000] = -3e38, -torch.inf
    rows = [6, 0, 1, 2, 3, 4, 5, 7]
    for i, pick in zip(rows, sample(logits, [row(i, temperature=0) for i in rows]), strict=True):
        if i in (2, 3, 4):
            assert pick is None
        else:
            assert pick.token == int((logits[i] == logits[i].max()).nonzero()[0])
            assert pick.logprob == pytest.approx(float(logits[i].float().log_softmax(0)[pick.token]), abs=1e-5)


LIMITS = [{}, {"min_p": 0.3}, {"top_k": 40}, {"top_k": 9999}, {"top_p": 0.9}, {"top_p": 0.3, "min_p": 0.02}]
LIMITS += [{"top_k": 700, "top_p": 0.8}, {"temperature": 0.01, "top_k": 50}, {"temperature": 60.0, "top_p": 0.7}]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("kind", ["smooth", "with equal ones", "with excluded ones", "peaked", "all equal"])
@pytest.mark.parametrize("vocab", [1, 15, 3001])
def test_the_kernel_draws_what_torch_draws_from_a_large_vocabulary(kind, limits, vocab):
    logits = 3 * torch.randn(4, vocab, generator=torch.Generator().manual_seed(vocab))
    if kind == "with equal ones":
        logits = logits.bfloat16()
    elif kind == "with excluded ones":
        logits[:, ::3], logits[:, 1::3] = -3e38, -math.inf
    elif kind == "peaked":
        logits[:, vocab // 2] += 90
    elif kind == "all equal":
        logits[:] = -7.5
    rows = [row(seed % 4, seed=seed, **limits) for seed in range(64)]
    in_torch = sample(logits.double(), rows)
    assert [pick.token for pick in sample(logits, rows)] == [pick.token for pick in in_torch]


@BOTH
@pytest.mark.parametrize("in_cache", [1, 3 * 40, 2**17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_drawn_alike_a_few_at_a_time_or_together(dtype, in_cache, monkeypatch):
    """Some rows share logits, and those of one row are not finite."""
    logits = (torch.randn(9, 40, generator=torch.Generator().manual_seed(0)) * 2).to(dtype)
    logits[4, 3] = torch.nan
    kinds = [{"temperature": 0}, {}, {"top_k": 5}, {"top_p": 0.6, "min_p": 0.05}, {"presence_penalty": 1.0}]
    kinds += [{"logit_bias": {3: 9.0}}, {"logprobs": 2, "top_k": 3}]
    rows = [row_of(i % 9, SamplingParams(seed=i, **kinds[i % len(kinds)]), [1, 2, 3], 2, i) for i in range(30)]
    alone = [pick for row in rows for pick in sample(logits, [row])]
    monkeypatch.setattr("pagewise.engine.sampling.IN_CACHE", in_cache)
    assert sample(logits, rows) == alone
    assert [pick is None for pick in alone] == [i % 9 == 4 for i in range(30)]
    assert sample(logits, []) == []


def test_the_kernel_of_a_cpu_and_torch_draw_alike():
    """The kernel has no float64."""
    torch.manual_seed(0)
    logits, greedy = (3 * torch.randn(11, 48)).bfloat16(), {"temperature": 0}
    logits[10, 7], logits[4] = torch.nan, logits[5].max()
    changes = [
        {"logit_bias": {5: 90}},
        {"presence_penalty": 2.0},
        {"min_tokens": 90, "max_tokens": 99},
        {"logprobs": 3},
    ]
    settings = [greedy, {"temperature": 1.3}, *(greedy | change for change in changes), greedy, {"top_k": 3}, greedy]
    logits[:10, 8] = logits[:10].amax(dim=1) + 1  # the likeliest token, which the sequence has, ends a text
    ends = frozenset({8})
    rows = [row_of(3 * i % 10, SamplingParams(**x), TOKENS, NUM_NEW, i, ends=ends) for i, x in enumerate(settings)]
    rows.append(row(10, **greedy))
    together = sample(logits, rows)
    assert together[-1] is None
    for picked, wanted in zip(together[:-1], rows[:-1], strict=True):
        (alone,) = sample(logits.double(), [wanted])
        assert (picked.token, picked.likeliest) == (alone.token, pytest.approx(alone.likeliest, abs=1e-5))
        assert picked.logprob == pytest.approx(alone.logprob, abs=1e-5)
