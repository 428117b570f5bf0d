"""A step as one value, and decode steps on the fixed buffers of a CUDA graph."""

import random

import pytest
import torch
from exact_model import VOCAB, ExactModel

from pagewise.engine import LLM, SamplingParams, model_runner
from pagewise.engine.model_runner import DecodeGraphs
from pagewise.models import tiny_model

MODEL, _ = tiny_model()
PROMPTS = [[1, 2, 3], [4] * 9, [5, 6], [7, 8, 9, 10, 11], [12] * 6]


def engine(**options):
    return LLM(MODEL, num_blocks=40, block_size=4, **options)


def batches_of(llm):
    """The batches of every step from now on."""
    seen, forward = [], llm.runner.forward
    llm.runner.forward = lambda batch: (seen.append(batch), forward(batch))[1]
    return seen


def test_a_batch_says_of_every_token_what_it_is_where_it_stands_and_where_its_keys_go():
    llm = engine(max_num_batched_tokens=14, prefix_cache=False)
    seen = batches_of(llm)
    for prompt in PROMPTS[:3]:
        llm.add_request(prompt, SamplingParams(max_tokens=4, temperature=0))
    llm.step(), llm.step()
    first, second = seen
    assert first.token_ids.tolist() == [1, 2, 3, *[4] * 9, 5, 6]
    assert first.positions.tolist() == [0, 1, 2, *range(9), 0, 1]
    assert first.slots.tolist() == [0, 1, 2, *range(4, 13), 16, 17]
    assert first.block_tables.tolist() == [[0, 0, 0], [1, 2, 3], [4, 0, 0]]
    assert first.seq_lens.tolist() == [3, 9, 2]
    assert first.cu_seqlens_q.tolist() == [0, 3, 12, 14]
    assert first.logits_for.tolist() == [2, 11, 13]
    assert second.positions.tolist() == [3, 9, 2]
    assert second.slots.tolist() == [3, 13, 18]
    assert second.cu_seqlens_q.tolist() == [0, 1, 2, 3]


def test_a_chunk_that_does_not_end_its_prompt_asks_for_no_logits():
    llm = engine(max_num_batched_tokens=5)
    seen = batches_of(llm)
    llm.generate([PROMPTS[1]], SamplingParams(max_tokens=1))
    assert [batch.logits_for.tolist() for batch in seen] == [[], [3]]
    assert [batch.seq_lens.tolist() for batch in seen] == [[5], [9]]


class Replayed:
    """A CUDA graph on the CPU. A replay computes the captured step again, from the buffers as they are now."""

    def __init__(self, runner, size, width, empty):
        self.runner, self.static = runner, empty(size, width, torch.device("cpu"))
        self.logits = runner.forward(self.static).clone()

    def replay(self):
        self.logits.copy_(self.runner.forward(self.static))


@pytest.fixture(name="captured")
def captured_graphs(monkeypatch):
    """Return (size, width) of each graph that was captured."""
    found = []

    def capture(graphs, size, width):
        graph = Replayed(graphs._runner, size, width, model_runner._empty)
        found.append((size, width))
        return graph, graph.static, graph.logits

    monkeypatch.setattr(DecodeGraphs, "_capture", capture)
    return found


@pytest.mark.parametrize("num_prompts", [1, 2, 3, 4, 5])
def test_decode_steps_on_fixed_buffers_give_the_same_tokens(num_prompts, captured):
    params = [SamplingParams(max_tokens=n, temperature=0) for n in (12, 3, 7, 5, 9)][:num_prompts]
    expected = engine().generate(PROMPTS[:num_prompts], params)
    llm = engine()
    llm.runner._graphs = DecodeGraphs(llm.runner)
    outputs = llm.generate(PROMPTS[:num_prompts], params)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert len(captured) == len(set(captured))
    sizes = {1: {1}, 2: {1, 2}, 3: {1, 2, 4}, 4: {1, 2, 4}, 5: {1, 2, 4, 8}}[num_prompts]
    assert {size for size, _ in captured} == sizes
    assert {width for _, width in captured} <= {1, 2, 4, 8}
    k = llm.memory.cache.k[0].flatten(0, 1)
    assert (k[llm.memory.num_blocks * 4 - 1] == 0).all()  # rows that are left over write nowhere


def test_a_step_with_a_piece_of_a_prompt_is_not_replayed(captured):
    params = SamplingParams(max_tokens=4, temperature=0)
    expected = engine().generate(PROMPTS[:2], params)
    llm = engine(max_num_batched_tokens=4)  # the second prompt is read while the first sequence decodes
    llm.runner._graphs = DecodeGraphs(llm.runner)
    outputs = llm.generate(PROMPTS[:2], params)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert {size for size, _ in captured} == {1}


@pytest.mark.parametrize("num_blocks", [6, 8, 10, 12])
def test_graphs_change_no_token_where_a_chunk_of_one_token_asks_for_no_logits(num_blocks, captured, shapes_unchecked):
    """Preempted samples compute their last common token in the same step as the only token of another prompt."""
    draw = random.Random(2)
    prompt = [draw.randrange(VOCAB) for _ in range(12)]
    prompts = [prompt[: draw.choice([1, 5, 9])] for _ in range(12)]  # of whole blocks and one token
    params = [SamplingParams(max_tokens=6, n=draw.randrange(1, 3), seed=i, ignore_eos=True) for i in range(12)]
    model, choices = ExactModel(), []
    for graphs in (False, True):
        llm = LLM(model, num_blocks=num_blocks, block_size=4)
        llm.runner._graphs = DecodeGraphs(llm.runner) if graphs else None
        outputs = llm.generate(prompts, params, progress=False)
        choices.append([sorted(choice.token_ids for choice in output.choices) for output in outputs])
        assert llm.scheduler.num_preemptions > 0
    assert choices[0] == choices[1]
