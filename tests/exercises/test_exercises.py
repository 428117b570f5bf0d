"""Every exercise: the solution passes, each natural mistake gets its own hint, zeros fail, and the task says enough."""

import ast
import copy
import inspect
import linecache
import random
from pathlib import Path

import pytest
import torch
from covering import one_in_three
from torch import Tensor

from cudascope import CudaKernel
from pagewise.distributed import pieces
from pagewise.distributed.counted import Sizes, all_to_all_bytes, decode_bytes, ring_bytes
from pagewise.distributed.ring import blocks
from pagewise.distributed.sequence import positions
from pagewise.engine import LLM, SamplingParams
from pagewise.engine.batch import Batch
from pagewise.engine.request import Chunk, Request, Sequence
from pagewise.engine.sampling import Row, sample
from pagewise.exercises import check, mistakes, progress, show, solutions
from pagewise.exercises.checkers import BY_NAME, LESSONS
from pagewise.exercises.exercise import Verdict
from pagewise.exercises.triton import triton_kernel
from pagewise.experiments import decode_schedules
from pagewise.flash_decoding import equal_ranges
from pagewise.models import tiny_model
from pagewise.naive_attention import attention
from pagewise.paged_attention import paged_attention
from pagewise.paged_blocks import BlockManager, BlockPool
from pagewise.tools.roofline import GPUS, H200, AttentionCost

CUDA = ["warp_sum", "coalesced_scores", "paged_decode", "block_max"]
TRITON = ["one_pass_kernel", "merge_kernel"]
PROCESSES = ["pass_on"]  # their answers run in processes, and an answer that fails ends them
PYTHON = [name for name in check.names() if name not in CUDA + TRITON + PROCESSES]


def judge(name: str, theirs: object) -> Verdict:
    verdict = getattr(check, name)(theirs)
    assert isinstance(verdict, Verdict)
    assert verdict.message.startswith("Right: " if verdict.right else "Not yet: ")
    return verdict


def kernel_with(name: str, body: str) -> object:
    """The exercise's kernel, its parameters as in the stub, with another body."""
    end = ") {" if name in CUDA else "):\n"
    head = BY_NAME[name].stub[: BY_NAME[name].stub.index(end) + len(end)]
    return f"{head}\n{body}\n}}" if name in CUDA else triton_kernel(f"{head}    {body}\n")


def last_function(source: str) -> object:
    namespace = {}
    exec(source, namespace)
    return [value for value in namespace.values() if inspect.isfunction(value)][-1]


# ------------------------------------------------------------------------------------------------ right and wrong


def test_there_are_at_least_three_exercises_per_lesson_and_three_mistakes_per_exercise():
    assert all(len(exercises) >= 3 for exercises in LESSONS.values())
    assert all(len(mistakes[name]) >= 3 for name in check.names())


@pytest.mark.parametrize("name", check.names())
def test_the_solution_is_right(name):
    """A function runs with the imports of its stub alone."""
    shown = BY_NAME[name].solution
    assert judge(name, last_function(shown) if name in PYTHON else solutions[name]).right


@pytest.mark.parametrize("name", check.names())
def test_a_natural_mistake_gets_its_own_hint(name):
    hints = [hint for _, hint in mistakes[name].values()]
    for i, (title, (theirs, hint)) in one_in_three([*enumerate(mistakes[name].items())], check.names().index(name)):
        verdict = judge(name, built_together(name, i, theirs) if name in CUDA else theirs)
        assert not verdict.right, title
        assert [other for other in hints if other in verdict.hint] == [hint], title
        assert hint == check.hint(name)


def built_together(name: str, number: int, source: str) -> CudaKernel:
    """A mistake whose source is named by a path, so that the compiler translates the file of all mistakes once."""
    path, function = BY_NAME[name].wrong_answers()[0].source, f"{name}_{number}"
    assert source.replace(f" {name}(", f" {function}(") in Path(path).read_text()
    kernel = CudaKernel(path, function)
    kernel.source = kernel.source._replace(text=path, folder=None)
    return kernel


def zeros_like(value: object) -> object:
    if isinstance(value, Tensor):
        return torch.zeros_like(value)
    if isinstance(value, tuple):
        return tuple(map(zeros_like, value))
    return 0 if value is None else type(value)(0)


@pytest.mark.parametrize("name", PYTHON)
def test_a_function_that_returns_zeros_fails(name):
    def zeros(*args, **kwargs):
        return zeros_like(solutions[name](*args, **kwargs))

    def zeros_and_nothing_else(*args, **kwargs):
        return zeros(*copy.deepcopy(args), **kwargs)

    # these change their arguments, as they shall, and return wrong things; the last returns nothing anyhow
    if name != "find_the_leak":
        assert not judge(name, zeros).right
    assert not judge(name, zeros_and_nothing_else).right


ZEROS = {
    "warp_sum": "if (threadIdx.x == 0) sums[blockIdx.x] = 0;",
    "block_max": "if (threadIdx.x == 0) maxima[blockIdx.x] = 0;",
    "coalesced_scores": "if (threadIdx.x < length) scores[threadIdx.x] = 0;",
    "paged_decode": "out[blockIdx.x * 32 + threadIdx.x] = m_out[blockIdx.x] = l_out[blockIdx.x] = 0;",
    "one_pass_kernel": "tl.store(out_ptr + tl.program_id(0), 0.0)",
    "merge_kernel": "tl.store(out_ptr + tl.program_id(0) * D + tl.arange(0, D), tl.zeros([D], tl.float32))",
}


@pytest.mark.parametrize("name", CUDA + TRITON)
def test_a_kernel_that_writes_zeros_fails(name):
    verdict = judge(name, kernel_with(name, ZEROS[name]))
    assert not verdict.right
    assert "must be" in verdict.message


# ------------------------------------------------------------------------------------------------ what the reader sees


@pytest.mark.parametrize("name", check.names())
def test_a_checker_called_with_nothing_prints_the_task(name, capsys):
    assert getattr(check, name)() is None
    assert capsys.readouterr().out == BY_NAME[name].stub + "\n"


@pytest.mark.parametrize("name", check.names())
def test_the_stub_runs_as_it_stands_and_is_not_yet_right(name):
    to_answer = str if name in CUDA else triton_kernel if name in TRITON else last_function
    verdict = judge(name, to_answer(BY_NAME[name].stub))
    assert not verdict.right
    assert "compile" not in verdict.message


@pytest.mark.parametrize("name", PYTHON)
def test_signature_and_task_of_a_function_are_typed_and_short(name):
    (function,) = (node for node in ast.parse(BY_NAME[name].stub).body if isinstance(node, ast.FunctionDef))
    assert function.body[0].end_lineno - function.lineno + 1 <= 12
    assert function.returns is not None
    assert all(argument.annotation is not None for argument in function.args.args)
    assert ast.get_docstring(function)


@pytest.mark.parametrize(("name", "language"), [("causal_mask", "python"), ("warp_sum", "cpp")])
def test_a_solution_is_shown_as_a_folded_block_of_code(name, language):
    block = f"```{language}\n{BY_NAME[name].solution}\n```"
    assert show(name)._repr_markdown_() == f"<details><summary>A solution</summary>\n\n{block}\n\n</details>"
    assert repr(show(name)) == BY_NAME[name].solution


def test_several_solutions_are_shown_as_one_fold_each_with_its_name():
    both = show("causal_mask", "warp_sum")
    first, second, _ = both._repr_markdown_().split("</details>")
    assert "<summary>A solution of causal_mask</summary>\n\n```python" in first
    assert "<summary>A solution of warp_sum</summary>\n\n```cpp" in second
    assert repr(both) == BY_NAME["causal_mask"].solution + "\n\n\n" + BY_NAME["warp_sum"].solution


@pytest.mark.parametrize("names", [(), ("causal_mask", "casual_mask")])
def test_a_solution_that_cannot_be_shown_is_refused_with_the_names_that_can(names):
    with pytest.raises(ValueError, match=r"casual_mask|at least one name.*causal_mask"):
        show(*names)


def test_a_verdict_shows_itself_counts_as_right_and_is_the_same_every_time():
    wrong = judge("causal_mask", mistakes["causal_mask"]["top left"][0])
    assert repr(wrong) == wrong.message == judge("causal_mask", mistakes["causal_mask"]["top left"][0]).message
    assert wrong._repr_markdown_().startswith("**Not yet:** the smallest case that fails\n\n    case     causal_mask(")
    assert not wrong
    right = judge("causal_mask", solutions["causal_mask"])
    assert right
    assert right._repr_markdown_().startswith("**Right:** ")


def test_a_stub_gets_no_hint_until_the_reader_asks_or_writes():
    text, cell = BY_NAME["merge"].stub, "<cell>"
    linecache.cache[cell] = (len(text), None, text.splitlines(keepends=True), cell)
    names = {}
    exec(compile(text, cell, "exec"), names)
    verdict = judge("merge", names["merge"])
    assert verdict.hint
    assert verdict.hint not in verdict.message
    assert verdict.message.endswith('`check.hint("merge")` gives a hint.')
    assert check.hint("merge") == verdict.hint
    theirs = mistakes["merge"]["normalised"]
    assert judge("merge", theirs[0]).message.endswith(theirs[1])
    assert check.hint("merge") == theirs[1]
    with pytest.raises(AttributeError, match="no exercise 'mergee'"):
        check.hint("mergee")


def test_solutions_and_mistakes_are_mappings():
    assert set(solutions) == set(mistakes) == set(check.names())
    assert len(solutions) == len(mistakes) == len(check.names())
    assert "merge" in solutions
    assert "softmax" not in solutions
    assert solutions.get("softmax") is None
    with pytest.raises(KeyError):
        solutions["softmax"]


def test_progress_names_what_is_solved_and_is_kept_in_the_folder_of_a_reader(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress, "_session", set())
    judge("causal_mask", solutions["causal_mask"])
    judge("merge", lambda a, b: None)
    *lines, last = repr(check.progress()).splitlines()
    assert [line.split("   ")[0] for line in lines] == [f"lesson {i:2}" for i in range(1, 11)]
    assert "✓ causal_mask" in lines[0]
    assert sum(line.count("✓") + line.count("·") for line in lines) == len(check.names())
    assert last.startswith("The list counts the exercises in depth, too.")
    assert list(tmp_path.iterdir()) == []
    names = {f"Lesson {number}": [each.name for each in exercises] for number, exercises in LESSONS.items()}
    (tmp_path / "progress.md").write_text(progress.listed(names, done=set()))
    for name in names["Lesson 3"]:
        judge(name, solutions[name])
    monkeypatch.setattr(progress, "_session", set())  # as after a restart
    lines = repr(check.progress()).splitlines()
    assert [line.count("✓") for line in lines] == [0, 0, 4, 0, 0, 0, 0, 0, 0, 0]
    assert "## ✓ Lesson 3\n" in (tmp_path / "progress.md").read_text()
    assert repr(check.progress(3)) == lines[2]


@pytest.mark.parametrize("lesson", [0, 11, "3"])
def test_progress_refuses_a_lesson_that_does_not_exist(lesson):
    with pytest.raises(ValueError, match="there are lessons 1 to 10"):
        check.progress(lesson)


def test_an_unknown_exercise_names_those_there_are():
    with pytest.raises(AttributeError, match="no exercise 'softmax': there are causal_mask, grouped_attention"):
        check.softmax  # noqa: B018
    assert set(check.names()) <= set(dir(check))


def test_lesson_1_bounds_the_time_as_the_package_does():
    for gpu in GPUS:
        for B, H, Hkv, T, S, D in [(1, 32, 8, 1, 4096, 128), (3, 12, 12, 1024, 1024, 64), (8, 16, 1, 7, 300, 80)]:
            cost = AttentionCost(B, H, Hkv, T, S, D)
            least = 1e6 * gpu.seconds(cost.flops, cost.bytes_moved)
            assert solutions["least_time"]((B, H, Hkv, T, S, D), gpu) == pytest.approx(least)


def test_lesson_7_teaches_the_packages_own_rules():
    for tiles in ([4], [1, 5], [3, 1, 8], [2, 0, 4], [7, 7, 7]):
        for n in (1, 2, 3, 4):
            theirs = [solutions["pieces_of_program"](p, n, tiles) for p in range(n)]
            assert theirs == [[piece[:3] for piece in pieces] for pieces in equal_ranges(tiles, n, start=0)]
    in_flight, latency = decode_schedules.IN_FLIGHT, 1e6 * decode_schedules.LATENCY
    needed = (round(1e-6 * H200.bandwidth), latency, in_flight, 1024)
    assert solutions["enough_splits"](1, *needed) == decode_schedules.SATURATING


def test_lesson_4_finds_the_prefixes_that_the_manager_finds():
    draw = random.Random(0)
    for _ in range(200):
        P, others = draw.choice((1, 2, 3)), [draw.choices((1, 2), k=draw.randint(1, 8)) for _ in range(3)]
        manager = BlockManager(64, P, prefix_cache=True)
        for i, tokens in enumerate(others):
            manager.allocate(i, tokens)
            manager.commit(i, len(tokens))
        prompt = draw.choices((1, 2), k=draw.randint(1, 8))
        assert solutions["cached_tokens"](prompt, others, P) == manager.allocate("prompt", prompt)


def test_lesson_4_reads_what_paged_attention_reads():
    draw = torch.Generator().manual_seed(0)
    q, table = torch.randn(8, generator=draw), [4, 1, 3, 0]
    k_cache, v_cache = torch.randn(2, 5, 4, 8, generator=draw)
    for length in (1, 4, 9, 16):
        ids = (torch.tensor([x], dtype=torch.int32) for x in (table, length))
        out = paged_attention(q[None, None], k_cache[:, :, None], v_cache[:, :, None], *ids, backend="torch")
        ours = solutions["attend_through_table"](q, k_cache, v_cache, table, length)
        torch.testing.assert_close(ours, out[0, 0])


# ------------------------------------------------------------------------------------------------ lesson 9's engine


@pytest.fixture(scope="module")
def model():
    return tiny_model()[0]


@pytest.mark.parametrize(
    ("arrivals", "seats", "budget"),  # the tokens of the prompts that come before each step
    [([[5, 9], [4], [], [2, 30]], 3, 12), ([[40, 3], [1], [7]], 2, 8), ([[1] * 9], 9, 4)],
)
def test_lesson_9_schedules_as_the_engine_does(model, arrivals, seats, budget):
    llm = LLM(model, num_blocks=64, max_num_seqs=seats, max_num_batched_tokens=budget, prefix_cache=False)
    schedule, several = llm.scheduler.schedule, 0

    def left(requests):
        return [(str(r.id), len(r.live[0].tokens) - r.live[0].num_computed) for r in requests]

    def checked():
        nonlocal several
        ours = solutions["schedule_step"](left(llm.scheduler.running), left(llm.scheduler.waiting), seats, budget)
        chunks = schedule()
        assert ours == [(str(chunk.request.id), chunk.stop - chunk.start) for chunk in chunks]
        several += len(chunks) > 1
        return chunks

    llm.scheduler.schedule = checked
    while arrivals or llm.has_unfinished:
        for i, length in enumerate(arrivals.pop(0) if arrivals else []):
            llm.add_request([i + 1] * length, SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
        llm.step()
    assert several > 3


def test_lesson_9_preempts_whom_the_engine_preempts(model):
    llm = LLM(model, num_blocks=9, block_size=4, prefix_cache=False)
    manager, scheduler = llm.memory, llm.scheduler
    for i, length in enumerate((6, 8, 5, 7)):
        llm.add_request([i + 1] * length, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    seen = 0
    while llm.has_unfinished:
        running = []
        for request in scheduler.running:
            held = len(request.live[0].block_table)
            running.append((str(request.id), held, -(-len(request.live[0].tokens) // 4) - held))
        gone = solutions["preempted"](running, manager.num_free_blocks)
        llm.step()
        waiting = {str(request.id) for request in scheduler.waiting}
        assert {name for name, _, _ in running} & waiting == set(gone)
        seen += len(gone)
    assert seen >= 2


def test_lesson_9_builds_the_engines_batch():
    pool = BlockPool(16, 4)
    chunks = []
    for name, (length, start, stop) in {"A": (9, 8, 9), "B": (6, 0, 6), "C": (11, 2, 7)}.items():
        sequence = Sequence([ord(name)] * length)
        pool.resize(sequence, length)
        request = Request(sequence.tokens, SamplingParams(), None)
        chunks.append(Chunk(request, sequence, start, stop, int(stop == length)))
    batch = Batch.of(chunks, torch.device("cpu"), 4)
    tables = [chunk.sequence.block_table for chunk in chunks]
    theirs = solutions["step_inputs"]([(chunk.start, chunk.stop) for chunk in chunks], tables, 4)
    assert theirs == {name: getattr(batch, name).tolist() for name in theirs}


def test_lesson_9_ends_with_an_engine_that_gives_the_tokens_of_the_package(model):
    requests = [([10 * i + 1] * (6 + 2 * i), 10) for i in range(4)]
    small = LLM(model, num_blocks=12, block_size=4)
    computed = 0

    def forward(token_ids, tables, inputs):
        nonlocal computed
        computed += len(token_ids)
        numbers = {name: torch.tensor(inputs[name]) for name in ("positions", "slots", "seq_lens", "cu_seqlens_q")}
        padded = torch.tensor([(table * 12)[:12] for table in tables])
        last = numbers["cu_seqlens_q"][1:] - 1
        batch = Batch([], token_ids=torch.tensor(token_ids), logits_for=last, block_tables=padded.int(), **numbers)
        narrow = {name: numbers[name].int() for name in ("seq_lens", "cu_seqlens_q")}
        return small.runner.step(batch._replace(**narrow))

    mine = solutions["small_engine"](forward, requests, 12, 4, 4, 64)
    sampling = [SamplingParams(max_tokens=new, temperature=0, ignore_eos=True) for _, new in requests]
    outputs = LLM(model, num_blocks=64).generate([prompt for prompt, _ in requests], sampling)
    assert mine == [output.token_ids for output in outputs]
    assert computed > sum(len(prompt) + new - 1 for prompt, new in requests)  # a preempted request computes again


@pytest.mark.parametrize("kind", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.6}, {"top_k": 3, "top_p": 0.5}])
def test_lesson_9_draws_from_the_engines_distribution(kind):
    logits = torch.tensor([3.0, 10.0, 2.0, 5.0, 1.0]).log()
    p = solutions["token_probabilities"](logits, **{"temperature": 1.0, "top_k": 0, "top_p": 1.0} | kind)
    requests = [Request([0], SamplingParams(**kind), None, seed=seed) for seed in range(2000)]
    picks = sample(logits[None], [Row(0, request, request.live[0]) for request in requests])
    shares = torch.bincount(torch.tensor([pick.token for pick in picks]), minlength=5) / 2000
    assert (shares > 0).tolist() == (p > 0).tolist()
    torch.testing.assert_close(shares, p, atol=0.04, rtol=0)


# ------------------------------------------------------------------------------------------------ lesson 10's processes


def test_lesson_10_has_the_packages_zigzag_order():
    for n in (1, 2, 3, 5):
        theirs = [[position for piece in pieces(4 * n, n, r, "zigzag") for position in piece] for r in range(n)]
        assert solutions["zigzag_positions"](4 * n, n) == theirs


def test_lesson_10_counts_the_bytes_of_the_package():
    for n, S, H, Hkv, D in [(2, 8, 4, 2, 8), (4, 64, 8, 4, 32), (8, 64, 16, 8, 16)]:
        prompt, token = Sizes(1, H, Hkv, S, S, D, 2), Sizes(1, H, Hkv, 1, S, D, 2)
        sent = {
            "ring": ring_bytes(prompt, n, 1),
            "all-to-all": all_to_all_bytes(prompt, n, 1),
            "decode": decode_bytes(token, n),
        }
        assert solutions["sent_bytes"](n, S, H, Hkv, D) == sent


def test_lesson_10_computes_causal_attention_in_the_steps_of_the_packages_ring():
    q, k, v = torch.randn(3, 2, 24, 8, generator=torch.Generator().manual_seed(0))
    shares = solutions["zigzag_positions"](24, 3)
    out, lses = solutions["causal_ring"](q, k, v, shares)
    torch.testing.assert_close(out, attention(q[None], k[None], v[None], causal=True)[0])
    for step in range(3):
        for r in range(3):
            seen = lses[step, 0, shares[r]] > -torch.inf
            queries, keys = (positions(24, 3, rank, "zigzag") for rank in (r, (r - step) % 3))
            of_step = blocks(queries, keys, causal=True)
            assert int(seen.sum()) == sum(block.rows.stop - block.rows.start for block in of_step)
