"""Beam search: the selection alone, on a toy model that can be enumerated, and its blocks in the engine."""

import copy
import itertools
import math

import pytest
import torch
from torch import Tensor

from pagewise.engine import LLM, SamplingParams
from pagewise.engine.beam_search import Branch, apply, branches, select
from pagewise.engine.config import EngineConfig, KVSizes
from pagewise.engine.paged_memory import PagedMemory
from pagewise.engine.request import NOT_FINITE, Choice, Request, Sequence
from pagewise.models.load import ByteTokenizer, tiny_model

# ------------------------------------------------------------------------------------------------ the selection


def toy_logits(tokens: list[int], vocab: int = 4) -> Tensor:
    """Return the logits of a model without a pattern. They differ after every text."""
    seed = sum((token + 1) * 31**i for i, token in enumerate(tokens))
    return 2 * torch.randn(vocab, generator=torch.Generator().manual_seed(seed))


class Ledger(PagedMemory):
    """A memory that only counts who holds what."""

    def __init__(self, request: Request) -> None:
        super().__init__(EngineConfig(num_blocks=1), KVSizes(1, 1, 2), torch.device("cpu"), torch.float32)
        self.held, self.most = {request.live[0]}, 1

    def free(self, sequence: Sequence) -> None:
        self.held.discard(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        assert parent in self.held
        assert parent.tokens == child.tokens, "forked after the parent had grown"
        assert child not in self.held
        self.held.add(child)
        self.most = max(self.most, len(self.held))


def searching(width: int, max_tokens: int, prompt=(2, 0), ends=(), **options) -> Request:
    params = SamplingParams(max_tokens=max_tokens, beam_width=width, **options)
    return Request(list(prompt), params, None, frozenset(ends))


def search(request: Request, vocab=4) -> tuple[list[Choice], Ledger]:
    """Return the choices of a whole search on the toy model, and the ledger."""
    memory, ended = Ledger(request), False
    while not ended:
        logits = torch.stack([toy_logits(beam.tokens, vocab) for beam in request.live])
        ended = apply(request, select(request, logits), memory)
        assert memory.held == set(request.live)
    return request.beams, memory


def every_text(prompt: list[int], max_tokens: int, ends, vocab=4) -> dict[tuple[int, ...], float]:
    """Return {tokens: Σ log p / length} of every text that the toy model can write."""
    scores = {}
    for length in range(1, max_tokens + 1):
        for tokens in itertools.product(range(vocab), repeat=length):
            ended = [token in ends for token in tokens]
            if any(ended[:-1]) or not (ended[-1] or length == max_tokens):
                continue
            log_p = [toy_logits([*prompt, *tokens[:i]], vocab).log_softmax(-1)[tokens[i]] for i in range(length)]
            scores[tokens] = float(sum(log_p)) / length
    return scores


@pytest.mark.parametrize("ends", [frozenset(), frozenset({1}), frozenset({0, 3})], ids=str)
def test_a_beam_as_wide_as_all_texts_finds_all_of_them_best_first(ends):
    exact = every_text([2, 0], 3, ends)
    choices, _ = search(searching(len(exact), 3, ends=ends))
    assert {tuple(choice.token_ids): choice.score for choice in choices} == pytest.approx(exact, abs=1e-5)
    scores = [choice.score for choice in choices]
    assert scores == sorted(scores, reverse=True)


def test_penalties_act_on_log_p_of_new_tokens():
    params = {"presence_penalty": 0.7, "frequency_penalty": -0.3}
    exact = every_text([2, 0], 3, frozenset())
    for tokens, score in exact.items():
        counts = [tokens[:i].count(token) for i, token in enumerate(tokens)]
        exact[tokens] = score - sum(0.7 * (count > 0) - 0.3 * count for count in counts) / 3
    choices, _ = search(searching(len(exact), 3, **params))
    assert {tuple(choice.token_ids): choice.score for choice in choices} == pytest.approx(exact, abs=1e-5)


def test_a_narrow_beam_is_greedy_about_beams_and_its_scores_are_true():
    """Width 3 of 4 ** 5 texts: every choice is a text of the model with its own score; together they hold 3 beams."""
    exact = every_text([2, 0], 5, {1})
    choices, memory = search(searching(3, 5, ends={1}))
    assert len({tuple(choice.token_ids) for choice in choices}) == 3
    for choice in choices:
        assert choice.score == pytest.approx(exact[tuple(choice.token_ids)], abs=1e-5)
        assert choice.finish_reason == ("stop" if choice.token_ids[-1] == 1 else "length")
    assert memory.most <= 3
    assert not memory.held


@pytest.mark.parametrize(("width", "ends", "num_ended"), [(2, [], 0), (2, [2], 0), (3, [2], 1)])
def test_the_best_branches_of_all_beams_are_taken_and_an_end_among_them_takes_no_place(width, ends, num_ended):
    """An end below the best branches is not a hypothesis."""
    scores = torch.tensor([[-1.0, -5.0, -2.0], [-4.0, -1.5, -9.0]])
    live = [Branch(0, 0, -1.0), Branch(1, 1, -1.5), Branch(1, 0, -4.0)]
    assert branches(scores, width, frozenset(ends)) == (live[:width], [Branch(0, 2, -2.0)][:num_ended])


def test_width_beams_are_left_however_many_of_the_best_end():
    scores = torch.tensor([[-1.0, -2.0, -3.0, -9.0, -8.0], [-1.5, -2.5, -3.5, -7.0, -9.0]])
    live, ended = branches(scores, 2, frozenset({0, 1, 2}))
    assert live == [Branch(1, 3, -7.0), Branch(0, 4, -8.0)]
    assert ended == [Branch(0, 0, -1.0), Branch(1, 0, -1.5)]


def after_one_step(hypotheses: list[float], beams: list[float], ends=(1,)) -> Request:
    """Return a search of width 2 over 3 tokens, one token after the prompt."""
    request = searching(2, 10, ends=ends)
    request.live = [Sequence([2, 0, token]) for token in range(len(beams))]
    for beam, score in zip(request.live, beams, strict=True):
        beam.score = score
    request.beams = [Choice([1], None, "stop", score) for score in hypotheses]
    return request


LIKELY_0 = torch.tensor([[20.0, 0.0, 0.0]] * 2)  # log p of token 0 is 0 but for 4e-9


@pytest.mark.parametrize(
    ("hypotheses", "beams", "goes_on"),
    [
        ([-0.6], [-2.0, -3.0], True),  # a hypothesis is missing
        ([-0.6, -1.2], [-2.0, -3.0], True),  # the best beam may yet become −2 / 2 > −1.2
        ([-0.6, -1.0], [-2.0, -3.0], False),  # −2 / 2 is no better
        ([-0.6, -0.9], [-2.0, -3.0], False),  # −2 / 2 < −0.9: what ends from here on is worse
        ([-0.6, -1.2], [-2.5, -2.6], False),  # −2.5 / 2 < −1.2
    ],
)
def test_the_search_ends_when_the_best_beam_is_worse_than_the_worst_hypothesis(hypotheses, beams, goes_on):
    selection = select(after_one_step(hypotheses, beams), LIKELY_0)
    assert bool(selection.live) == goes_on
    assert [choice.score for choice in selection.found] == hypotheses


def test_a_better_hypothesis_drives_out_the_worst():
    ending = torch.tensor([[0.0, 20.0, 0.0], [20.0, 0.0, 0.0]])  # beam 0 ends
    selection = select(after_one_step([-0.9, -1.2], [-2.0, -3.0]), ending)
    assert [choice.score for choice in selection.found] == pytest.approx([-0.9, -1.0])
    assert selection.found[1].token_ids == [0, 1]


def test_selecting_changes_nothing():
    request = after_one_step([-0.6], [-2.0, -3.0])
    before = copy.deepcopy([(beam.tokens, beam.score, request.beams) for beam in request.live])
    select(request, LIKELY_0)
    assert [(beam.tokens, beam.score, request.beams) for beam in request.live] == before


def test_the_penalty_is_on_log_p_of_tokens_that_a_beam_or_its_prompt_has():
    request = searching(2, 1, prompt=(2, 2), repetition_penalty=3.0)
    logits = torch.tensor([[1.0, 0.0, 2.0]])
    log_p = (logits - logits.logsumexp(-1))[0].tolist()
    selection = select(request, logits)
    assert [choice.token_ids for choice in selection.found] == [[2], [0]]  # 3 · −0.41 is still above −1.41
    assert [choice.score for choice in selection.found] == pytest.approx([3 * log_p[2], log_p[0]])


def test_one_beam_whose_logits_are_not_finite_ends_the_search():
    request = Request([1], SamplingParams(max_tokens=5, beam_width=2), None)
    request.live = [Sequence([1, 2], score=-1.0), Sequence([1, 3], score=-2.0)]
    logits = torch.zeros(2, 8)
    assert select(request, logits).error is None
    logits[1] = torch.nan
    selection = select(request, logits)
    assert selection.error == NOT_FINITE
    assert selection.live == []
    assert [(choice.token_ids, choice.finish_reason) for choice in selection.found] == [([2], "error"), ([3], "error")]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_end_the_search_with_the_beams_that_there_are(bad):
    request = after_one_step([], [-1.0, -2.0])
    selection = select(request, LIKELY_0 * bad)
    assert selection.live == []
    assert [choice.finish_reason for choice in selection.found] == ["error"] * 2
    assert [choice.token_ids for choice in selection.found] == [[0], [1]]


# ------------------------------------------------------------------------------------------------ in the engine


PROMPTS = ["The KV cache holds the keys and values of ", "A block of "]
BEAMS = SamplingParams(beam_width=4, max_tokens=12)
MODEL, TOKENIZER = tiny_model()


def engine(num_blocks, **options):
    return LLM(MODEL, tokenizer=TOKENIZER, num_blocks=num_blocks, backend="torch", **options)


def texts(outputs) -> list[list[tuple]]:
    return [[(choice.text, choice.finish_reason, round(choice.score, 4)) for choice in out.choices] for out in outputs]


@pytest.fixture(scope="module")
def alone():
    """Return the choices of each prompt when it runs alone."""
    llm = engine(64, block_size=4)
    return [texts(llm.generate([prompt], BEAMS))[0] for prompt in PROMPTS]


@pytest.mark.parametrize(
    "kind", [{}, {"prefix_cache": False}, {"scheduler": "static"}, {"attention": "dense"}], ids=str
)
def test_a_search_finds_the_same_beside_others(kind, alone):
    llm = engine(256, block_size=4, **kind)
    others = [SamplingParams(max_tokens=9, n=3, seed=1), SamplingParams(max_tokens=15, temperature=0.0)]
    outputs = llm.generate(["The first ", "Another", *PROMPTS], [*others, BEAMS, BEAMS])
    assert texts(outputs[2:]) == alone


def test_a_preempted_search_finds_the_same(alone):
    llm = engine(27, block_size=4, max_num_batched_tokens=16)
    outputs = llm.generate(PROMPTS, BEAMS)
    assert llm.scheduler.num_preemptions > 0
    assert texts(outputs) == alone
    assert llm.memory.num_free_blocks == 27


def test_beams_share_the_blocks_of_what_they_have_in_common():
    """The 41 prompt tokens fill 10 blocks of 4. Without sharing, four beams would hold at least 44 blocks."""
    llm = engine(64, block_size=4, prefix_cache=False)
    manager = llm.memory
    request_id = llm.add_request(PROMPTS[0][:41], BEAMS)
    used, copies = [], []
    while llm.has_unfinished:
        llm.step()
        used.append(manager.stats().used)
        copies.append(manager.stats().copies)
        beams = [beam for request in llm.scheduler.running for beam in request.live]
        assert len(beams) <= 4
        if beams:
            assert all(manager.ref_count(block) == len(beams) for block in beams[0].block_table[:10])
    assert used[0] == 11  # the prompt, computed once, for four beams
    assert max(used) <= 10 + 4 * 4
    assert copies[1] == 3  # four beams write the last block of the prompt: three copies
    assert used[-1] == 0
    llm.abort(request_id)  # it has ended, so nothing happens


def test_an_aborted_search_leaves_nothing():
    llm = engine(64, block_size=4)
    request_id = llm.add_request(PROMPTS[0], BEAMS)
    for _ in range(5):
        llm.step()
    assert llm.memory.num_free_blocks < 64
    llm.abort(request_id)
    assert llm.memory.num_free_blocks == 64
    assert not llm.has_unfinished


@pytest.mark.parametrize("failing", [3, 6])
def test_a_copy_that_does_not_fit_costs_a_step_and_no_more(alone, monkeypatch, failing):
    """A fork copies in dense memory. The prompt's own allocation comes first."""
    llm = engine(64, attention="dense")
    new, rooms = llm.memory._new, itertools.count(1)

    def scarce(num_tokens):
        if next(rooms) == failing:
            raise MemoryError("planted")
        return new(num_tokens)

    monkeypatch.setattr(llm.memory, "_new", scarce)
    llm.add_request(PROMPTS[0], BEAMS)
    outputs, failures = [], 0
    while llm.has_unfinished:
        try:
            outputs += llm.step()
        except MemoryError:
            failures += 1
            assert llm.memory.nbytes == 0
    assert failures == 1
    assert texts(outputs) == alone[:1]
    assert llm.memory.nbytes == 0


def test_the_text_of_a_choice_leaves_out_what_ended_it():
    llm = engine(64)
    space = ord(" ")
    (output,) = llm.generate(["The ca"], SamplingParams(beam_width=3, max_tokens=12, stop=space))
    ended = [choice for choice in output.choices if choice.finish_reason == "stop"]
    assert ended
    for choice in ended:
        assert choice.token_ids[-1] == space
        assert choice.text == ByteTokenizer().decode(choice.token_ids[:-1])
        assert space not in choice.token_ids[:-1]
    assert output.token_ids == output.choices[0].token_ids


def test_listeners_hear_of_beams_when_the_search_has_ended():
    llm = engine(64)
    pieces = []
    llm.add_request("The", SamplingParams(beam_width=3, max_tokens=4), listener=pieces.append)
    outputs = []
    while llm.has_unfinished:
        assert not pieces
        outputs += llm.step()
    assert [(piece.choice, piece.token_ids, piece.text, piece.finish_reason) for piece in pieces] == [
        (i, choice.token_ids, choice.text, choice.finish_reason) for i, choice in enumerate(outputs[0].choices)
    ]
