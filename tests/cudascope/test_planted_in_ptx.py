"""Mistakes planted in PTX: what `check` finds, and that second arguments are not taken in. See planting.py.

planted_in_ptx.py does the same to every barrier, wait and fence of the course's kernels.
"""

from functools import partial

import numpy as np
import pytest
import test_ptx_kernel as entries
import test_triton_compiled as kernels
import torch
from planting import MARK, meetings, mistake, outcome, planted, removals, wrong_operands
from replay import unordered
from second_arguments import Paths
from triton_helpers import product

from cudascope import PtxKernel, check, observe, triton_compiled


def verdicts(run, mistakes, chosen, seed=None):
    """The outcome of each mistake that `chosen` holds for, by its name, its instruction and its number."""
    with mistake(0), check(ignore=("same value",), schedule=seed):
        expected = run()
    numbers = {number: each for number, each in enumerate(mistakes, 1) if chosen(each)}
    outcomes = {number: outcome(number, run, expected, seed) for number in numbers}
    return {(numbers[n].name, numbers[n].instruction, n): each for n, each in outcomes.items()}


def planting():
    """An `edit` for triton_compiled. It keeps the text and the mistakes."""

    def edit(ptx):
        edit.ptx, edit.mistakes[:] = ptx, removals(ptx) + wrong_operands(ptx)
        return planted(ptx, edit.mistakes)

    edit.mistakes = []
    return edit


def replayed(run, ptx):
    """A function of a marked instruction of `ptx`: how many accesses of `run` are unordered without the instruction."""
    with mistake(MARK), observe() as trace:
        run()
    return partial(unordered, trace, [each.instruction for each in meetings(ptx)])


@pytest.fixture(scope="module")
def with_roles():
    """A product in which one group of warps copies and two groups multiply: its launch, its mistakes and its text."""
    edit = planting()

    def run():
        with triton_compiled("sm_90", edit=edit):
            result, expected = product(True, M=64)
        run.is_right = torch.allclose(result, expected, atol=2e-2, rtol=2e-3)
        return [result.view(torch.int16).numpy()]

    with mistake(0), check(stop=False, ignore=("same value",)) as run.report:
        run()
    return run, edit


@pytest.mark.slow
def test_a_product_with_roles_for_warps_is_right_and_has_no_findings(with_roles):
    run, _ = with_roles
    assert run.is_right
    assert not run.report.findings


@pytest.mark.slow
def test_every_wait_for_an_mbarrier_is_needed(with_roles):
    run, edit = with_roles
    seen = verdicts(run, edit.mistakes, lambda each: "try_wait" in each.instruction and each.name == "removed")
    assert [each.seen for each in seen.values()] == ["found"] * 4
    assert {each.findings[0].rule for each in seen.values()} == {"race"}


@pytest.mark.slow
def test_a_barrier_before_an_arrival_for_all_warps_is_needed_and_another_is_not(with_roles):
    run, edit = with_roles
    lines = edit.ptx.split("\n")
    marked = meetings(edit.ptx)
    arrivals = [each.line(edit.ptx) for each in marked if "mbarrier.arrive.shared" in each.instruction]
    before = [max(i for i, line in enumerate(lines[: at - 1], 1) if "bar.sync" in line) for at in arrivals]
    seen = verdicts(run, edit.mistakes, lambda each: each.name == "removed" and each.line(edit.ptx) in before)
    assert [each.seen for each in seen.values()] == ["found"] * 2
    number = [each.line(edit.ptx) in before for each in marked].index(True)
    unedited, *without = map(replayed(run, edit.ptx), (None, number, number - 2))
    assert [each > unedited for each in without] == [True, False]


@pytest.mark.slow
def test_operands_of_an_asynchronous_copy_are_found(with_roles):
    run, edit = with_roles
    seen = verdicts(run, edit.mistakes, lambda each: each.name.startswith("expects") or "parity" in each.name)
    assert [each.seen for each in seen.values()] == ["found"] * 6


def product_of(source, mistakes):
    """Return a function that launches the product of `source`, with mistakes planted, of two random matrices."""
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((64, 16)).astype(np.float16) for _ in range(2))
    kernel = PtxKernel(planted(source, mistakes))
    return lambda: [entries.multiplied(kernel, a, b)]


@pytest.mark.slow
def test_wrong_descriptors_give_another_result():
    """Without a swizzle, every field of a descriptor counts."""
    source = entries.product("f32.f16.f16", 64, 16)
    mistakes = wrong_operands(source)
    seen = verdicts(product_of(source, mistakes), mistakes, lambda each: "wrong" in each.name)
    names = {f"wrong {field} of {which}" for field in ("swizzle", "stride offset", "leading offset") for which in "AB"}
    assert {name for name, _, _ in seen} == names
    assert not any(each.is_right for each in seen.values())


@pytest.mark.slow
def test_what_goes_wrong_in_a_ring_of_copies_and_in_fragments_is_seen():
    edit = planting()

    def run():
        torch.manual_seed(0)
        return [kernels.matmul(edit=edit)[0].numpy()]

    seen = verdicts(run, edit.mistakes, lambda _: True)
    paths = Paths(edit.ptx)
    exchanged = [each.seen for (name, _, _), each in seen.items() if "lane" in name]
    assert exchanged == ["wrong result"] * 2, "of an ldmatrix and of an mma"
    survivors = [edit.mistakes[number - 1] for (_, _, number), each in seen.items() if each.seen == "survived"]
    commits = [each for each in survivors if "commit" in each.instruction]
    assert commits
    assert all(paths.joins_the_next_group(each.line(edit.ptx), "cp.async.") for each in commits)
    barriers = {i: each.start for i, each in enumerate(meetings(edit.ptx)) if each.instruction == "bar.sync 0"}
    count = replayed(run, edit.ptx)
    survived = [i for i, start in barriers.items() if start in {each.start for each in survivors}]
    assert len(commits) + len(survived) == len(survivors)
    assert [i for i in barriers if not count(i)] == survived, "the replay agrees with check"


TEXT = (
    entries.HEADER
    + """
.visible .entry waits(.param .u64 x)
{
    .reg .pred %p<2>;
    .reg .b32 %r<4>;
    .reg .b64 %rd<2>;
    bar.sync 0;
    ld.shared.b32 %r1, [%r2];
    bar.sync 0;
    add.s32 %r1, %r1, 1;
    bar.sync 0;
    st.shared.b32 [%r2], %r1;
    fence.proxy.async;
    @%p1 bra $SKIP;
    fence.proxy.async;
$SKIP:
    cp.async.bulk.commit_group;
    cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r2], 16;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
    bar.sync 0;
    ret;
}
"""
)


def test_second_arguments_hold_on_all_paths():
    def line(text, number=0):
        return [n for n, each in enumerate(TEXT.split("\n"), 1) if each.strip().startswith(text)][number]

    paths = Paths(TEXT)
    assert [paths.is_beside_a_barrier(line("bar.sync", i)) for i in range(4)] == [True, True, True, True]
    apart = Paths(TEXT.replace("add.s32 %r1, %r1, 1", "ld.shared.b32 %r3, [%r2+4]"))
    assert [apart.is_beside_a_barrier(line("bar.sync", i)) for i in range(4)] == [True, False, False, True]
    assert not paths.precedes_another_fence(line("fence", 0)), "a path leads round the second fence"
    straight = Paths(TEXT.replace("@%p1 bra $SKIP", "add.s32 %r1, %r1, 1"))
    assert straight.precedes_another_fence(line("fence", 0))
    assert not straight.precedes_another_fence(line("fence", 1))
    family = "cp.async.bulk."
    open_there = [paths.has_nothing_to_wait_for(line(f"{family}{each}"), family) for each in ("commit", "wait")]
    assert open_there == [True, False]
    assert not paths.has_nothing_to_wait_for(line(f"{family}commit", 1), family)
    waits_for_less = Paths(TEXT.replace("wait_group.read 0", "wait_group.read 1"))
    commit = line(f"{family}commit", 0)
    assert [each.joins_the_next_group(commit, family) for each in (paths, waits_for_less)] == [True, False]
