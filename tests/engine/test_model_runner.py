"""A step as one value, and decode steps on the fixed buffers of a CUDA graph."""

import random
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from exact_model import VOCAB, ExactModel

from pagewise.engine import LLM, SamplingParams
from pagewise.engine.config import EngineConfig
from pagewise.engine.model_runner import DecodeGraphs
from pagewise.models import tiny_model

MODEL, _ = tiny_model()
PROMPTS = [[1, 2, 3], [4] * 9, [5, 6], [7, 8, 9, 10, 11], [12] * 6]


def engine(**options):
    return LLM(MODEL, num_blocks=40, block_size=4, **options)


def batches_of(llm):
    """The batches of every step from now on."""
    seen, step = [], llm.runner.step
    llm.runner.step = lambda batch: (seen.append(batch), step(batch))[1]
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

    def __init__(self, runner, static, note):
        self.runner, self.static, self.note = runner, static, note
        self.logits = runner.step(static).clone()

    def replay(self):
        self.note(len(self.static.seq_lens))
        with mock.patch.object(self.runner, "_graphs", None):
            self.logits.copy_(self.runner.step(self.static))


class Captured(list):
    """The (size, width) of each captured graph, and the sizes of those that were `replayed`."""

    def __init__(self):
        super().__init__()
        self.replayed = []


@pytest.fixture(name="captured")
def captured_graphs(monkeypatch):
    """Return which graphs were captured, and which were replayed."""
    found = Captured()

    def capture(graphs, runner, static):
        graph = Replayed(weakref.proxy(runner), static, found.replayed.append)
        found.append(tuple(static.block_tables.shape))
        return graph, graph.logits

    monkeypatch.setattr(DecodeGraphs, "_capture", capture)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("num_prompts", [1, 2, 3, 4, 5])
def test_decode_steps_on_fixed_buffers_give_the_same_tokens(num_prompts, captured):
    params = [SamplingParams(max_tokens=n, temperature=0) for n in (12, 3, 7, 5, 9)][:num_prompts]
    expected = engine().generate(PROMPTS[:num_prompts], params)
    llm = engine()
    llm.runner._graphs = DecodeGraphs(llm.runner, llm.config)
    before = captured.copy()
    outputs = llm.generate(PROMPTS[:num_prompts], params)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert captured == before  # nothing is captured while requests wait for their tokens
    sizes = {1: {1}, 2: {1, 2}, 3: {1, 2, 4}, 4: {1, 2, 4}, 5: {1, 2, 4, 8}}[num_prompts]
    assert set(captured.replayed) == sizes
    k = llm.memory.cache.k[0].flatten(0, 1)
    assert (k[llm.memory.num_blocks * 4 - 1] == 0).all()  # rows that are left over write nowhere


@pytest.mark.slow
@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (2, [2, 1]), (3, [4, 2, 1]), (8, [8, 4, 2, 1]), (9, [16, 8, 4, 2, 1])]
)
def test_graphs_for_all_sizes_are_captured_at_the_start_the_largest_first(most, sizes, captured):
    llm = engine(max_num_seqs=most, max_model_len=30)
    llm.runner._graphs = DecodeGraphs(llm.runner, llm.config)
    assert captured == [(size, 8) for size in sizes]  # 8 blocks of 4 tokens
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    expected = engine().generate(PROMPTS * 2, params)
    assert [o.token_ids for o in llm.generate(PROMPTS * 2, params)] == [o.token_ids for o in expected]
    assert max(captured.replayed) == sizes[0]


def test_a_step_with_a_piece_of_a_prompt_is_not_replayed(captured):
    params = SamplingParams(max_tokens=4, temperature=0)
    expected = engine().generate(PROMPTS[:2], params)
    llm = engine(max_num_batched_tokens=4)  # the second prompt is read while the first sequence decodes
    llm.runner._graphs = DecodeGraphs(llm.runner, llm.config)
    outputs = llm.generate(PROMPTS[:2], params)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert set(captured.replayed) == {1}


@pytest.mark.slow
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
        llm.runner._graphs = DecodeGraphs(llm.runner, llm.config) if graphs else None
        outputs = llm.generate(prompts, params, progress=False)
        choices.append([sorted(choice.token_ids for choice in output.choices) for output in outputs])
        assert llm.scheduler.num_preemptions > 0
    assert choices[0] == choices[1]


# ------------------------------------------------------------------------------------------------ memory of a GPU


@pytest.fixture(name="gpu")
def numbers_of_a_gpu(monkeypatch):
    """torch.cuda's numbers: 5000 bytes are allocated, an earlier peak was higher, and 10⁶ of 10⁷ bytes are free."""
    numbers = SimpleNamespace(peak=10**6, kept=0)

    def reset(device):
        numbers.peak = 5000

    def let_go():
        numbers.kept = 0

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: numbers.peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "empty_cache", let_go)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**6 - numbers.kept, 10**7))
    return numbers


class Taking(ExactModel):
    """The exact model on a GPU, where a token takes 10 bytes and a draw 1000. `on` says where its weight is."""

    def __init__(self, numbers):
        super().__init__()
        self.numbers, self.on, self.seen = numbers, [torch.device("cuda", 0)], []

    def parameters(self):
        device = self.on.pop() if self.on else torch.device("cpu")  # where the test can compute
        return iter([SimpleNamespace(device=device)])

    def forward(self, token_ids, positions, attend, *, logits_for=None):
        self.seen.append((token_ids.shape[1], positions.max().item(), len(logits_for)))
        self.numbers.peak += 10 * token_ids.shape[1] + 1000 * len(logits_for)
        self.numbers.kept = self.numbers.peak
        return super().forward(token_ids, positions, attend, logits_for=logits_for)


@pytest.mark.parametrize(
    ("options", "step"),
    [
        ({}, (2048, 64)),
        ({"max_num_batched_tokens": 300}, (300, 64)),
        ({"max_num_seqs": 2}, (256, 2)),  # the context has 128 tokens
        ({"max_num_batched_tokens": 40}, (40, 40)),
    ],
    ids=str,
)
def test_a_gpu_gives_the_blocks_what_the_largest_step_leaves(options, step, gpu, shapes_unchecked):
    model, (num_tokens, num_seqs) = Taking(gpu), step
    num_blocks = EngineConfig(**options)._num_blocks_for(128, 2000, model)
    assert model.seen == [(num_tokens, min(127, num_tokens - 1), num_seqs)]
    left = (9 * 10**5 - 10 * num_tokens - 1000 * num_seqs) // 2000
    assert num_blocks == min(left, options.get("max_num_seqs", 64) * 8)


def test_a_gpu_without_memory_for_a_block_beside_a_step_is_refused(gpu, shapes_unchecked):
    with pytest.raises(ValueError, match="no memory for a block of 900000 bytes: give num_blocks"):
        EngineConfig()._num_blocks_for(128, 900_000, Taking(gpu))


def test_a_given_number_of_blocks_needs_no_measurement(gpu):
    model = Taking(gpu)
    assert EngineConfig(num_blocks=3)._num_blocks_for(128, 2000, model) == 3
    assert model.seen == []
