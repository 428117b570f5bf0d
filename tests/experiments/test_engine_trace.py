"""The trace of an engine: the work of each step, the running and waiting requests, the owners of blocks."""

import pytest

from pagewise.engine import LLM, SamplingParams
from pagewise.experiments.engine_trace import Watch, operations, watch
from pagewise.models import tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model()[0]


def greedy(*lengths, **options):
    return [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True, **options) for n in lengths]


def test_a_static_batch_lets_nobody_in_before_all_have_ended_and_a_continuous_one_does(model):
    prompts, answers = [[65 + i] * (3 + i) for i in range(5)], [3, 8, 2, 4, 3]
    moments = {}
    for scheduler in ("static", "continuous"):
        llm = LLM(model, num_blocks=64, max_num_seqs=3, scheduler=scheduler)
        moments[scheduler], outputs = watch(llm, prompts, greedy(*answers))
        assert [len(output.token_ids) for output in outputs] == answers
    assert [m.running for m in moments["static"]] == [[0, 1, 2]] * 2 + [[0, 1]] + [[1]] * 5 + [[3, 4]] * 3 + [[3]]
    assert moments["continuous"][2].computed == {0: ("decode", 1), 1: ("decode", 1), 3: ("prompt", 6)}
    assert moments["continuous"][2].waiting == [4]
    assert len(moments["continuous"]) == 8


def test_who_is_preempted_computes_its_tokens_again(model):
    llm = LLM(model, num_blocks=4, block_size=4, prefix_cache=False)
    moments, outputs = watch(llm, [[65] * 4, [66] * 4], greedy(8, 8))
    (step,) = (i for i, moment in enumerate(moments) if moment.preempted)
    assert moments[step].preempted == moments[step].waiting == [1]
    again = next(moment for moment in moments[step:] if 1 in moment.computed)
    written = len([moment for moment in moments[:step] if 1 in moment.computed])
    assert again.computed[1] == ("again", 4 + written)
    assert [len(output.token_ids) for output in outputs] == [8, 8]


def test_shared_blocks_are_counted_once_and_apart(model):
    llm = LLM(model, num_blocks=32, block_size=4)
    sampling = SamplingParams(max_tokens=3, n=3, seed=0, ignore_eos=True)
    moments, _ = watch(llm, [[65] * 10], [sampling])
    assert [moment.blocks for moment in moments] == [{0: 3}, {0: 3, -1: 2}, {0: 3, -1: 2}]


def test_each_step_is_kept_as_the_value_that_the_model_was_given(model):
    llm = LLM(model, num_blocks=8, block_size=4)
    with Watch(llm) as seen:
        llm.generate([[65] * 6], greedy(2), progress=False)
    assert [batch.seq_lens.tolist() for batch in seen.batches] == [[6], [7]]
    assert [batch.slots.tolist() for batch in seen.batches] == [[0, 1, 2, 3, 4, 5], [6]]


def test_afterwards_the_engine_is_as_it_was(model):
    llm = LLM(model, num_blocks=8)
    with Watch(llm) as seen:
        pass
    llm.generate([[65] * 6], greedy(2), progress=False)
    assert seen.moments == []


@pytest.mark.parametrize(
    ("attention", "written", "built"), [("dense", ("copy_", 2 * 4 * 3), 4 * 3), ("paged", ("index_put_", 2 * 4), 0)]
)
def test_operations_are_counted_in_the_innermost_span(attention, written, built):
    llm = LLM(tiny_model(device="cpu")[0], attention=attention, num_blocks=64)  # 4 layers
    for i in range(3):
        llm.add_request([65 + i] * (5 + i), *greedy(4))
    llm.step()
    seen = operations(llm)
    operation, times = written
    assert seen.times["cache write", operation] == times
    assert seen.times["build batch", "copy_"] == built
    config = llm.model.config
    row = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert seen.nbytes["build batch", "copy_"] == (0 if attention == "paged" else (6 + 7 + 8) * row)
