"""Ring attention, all-to-all attention and decode over 1 to 4 processes: exact, and without a process that waits."""

import subprocess
import sys
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from covering import covering_or_all
from distributed_cases import (
    Case,
    DecodeCase,
    events_of,
    owned,
    refusal,
    run_case,
    run_cases,
    run_decode,
    run_late,
    run_torchs_ring,
    sent_in,
    sent_in_decode,
)

from conftest import assert_as_accurate_as_naive
from pagewise.distributed import (
    Processes,
    all_to_all_attention,
    decode_attention,
    merge_over_processes,
    ring,
    ring_attention,
    shard_sequence,
    unshard_sequence,
)
from pagewise.distributed.counted import all_to_all_bytes, decode_bytes, ring_bytes, visible_pairs
from pagewise.flash_attention import flash_attention
from pagewise.naive_attention import attention
from pagewise.tools.work import count_work

COUNTS = [1, 2, 3, 4]


@pytest.fixture(scope="module")
def pools():
    """{n: a group of n processes}, started once for all tests here."""
    found = {count: Processes(count, timeout=60.0) for count in COUNTS}
    yield found
    for pool in found.values():
        pool.close()


def whole(shares, dim, length, order):
    """The whole tensor from the share of each process."""
    out = shares[0].new_full((*shares[0].shape[:dim], length, *shares[0].shape[dim + 1 :]), torch.nan)
    for rank, share in enumerate(shares):
        out.index_copy_(dim, owned(length, len(shares), rank, order), share)
    return out


def expected(case, dtype):
    """(out, lse, dq, dk, dv) of naive attention in a dtype. A row that sees no key has lse −∞ and no gradient."""
    tensors, d_lse = case.inputs()
    *qkv, d_out = (x.to(dtype) for x in tensors)
    qkv = [x.requires_grad_() for x in qkv]
    out, lse = attention(*qkv, causal=case.causal, scale=case.scale, return_lse=True)
    results, gradients = ((out,), (d_out,)) if case.order is None else ((out, lse), (d_out, d_lse.to(lse.dtype)))
    gradients = torch.autograd.grad(results, qkv, gradients)
    return [x.detach() for x in (*results, *gradients)]


def assert_right(cases, by_rank):
    for i, case in enumerate(cases):
        exact, naive = expected(case, torch.float64), expected(case, case.dtype)
        names = ("out", "dq", "dk", "dv") if case.order is None else ("out", "lse", "dq", "dk", "dv")
        for name, right, near, *shares in zip(names, exact, naive, *(results[i] for results in by_rank), strict=True):
            got = whole(shares, 2, case.S if name in ("dk", "dv") else case.T, case.order)
            if name == "lse":
                hidden = right == -torch.inf
                assert got[hidden].eq(-torch.inf).all(), (case, name)
                got, right, near = (x.masked_fill(hidden, 0.0) for x in (got, right, near))
            try:
                if case.dtype == torch.float64:
                    torch.testing.assert_close(got, right, rtol=1e-11, atol=1e-12)
                else:
                    assert_as_accurate_as_naive(got, right, near, factor=3.0 if name.startswith("d") else 2.0)
            except AssertionError as error:
                raise AssertionError(f"{name} of {case}: {error}") from None


# Every pair of lengths, mask and order, and with PAGEWISE_FULL=1 every combination.
LENGTHS = [(16, 16), (13, 13), (1, 1), (3, 3), (5, 17), (17, 5), (40, 41), (0, 4), (4, 0)]
KINDS = covering_or_all({"lengths": LENGTHS, "causal": [False, True], "order": ["zigzag", "contiguous", "striped"]})


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
def test_ring_attention_and_its_gradients_match_attention(count, pools):
    cases = [Case(*lengths, causal=causal, order=order) for lengths, causal, order in map(dict.values, KINDS)]
    cases += [Case(9, 9, H, Hkv, True, scale=-0.3) for H, Hkv in ((1, 1), (8, 1), (3, 3))]
    cases += [Case(300, 300, causal=True, B=1)]  # several tiles of flash_attention
    assert_right(cases, pools[count].run(run_cases, cases))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_ring_attention_is_as_accurate_as_attention(dtype, pools):
    cases = [Case(33, 33, causal=causal, dtype=dtype, D=32) for causal in (False, True)]
    cases += [Case(7, 90, dtype=dtype, D=32, growth=growth) for growth in (1.0, 3.0)]
    assert_right(cases, pools[3].run(run_cases, cases))


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
def test_all_to_all_attention_and_its_gradients_match_attention(count, pools):
    heads = [(count, count), (4 * count, 2 * count), (2 * count, count)]
    cases = [
        Case(T, S, H, Hkv, causal, None) for T, S in LENGTHS for causal in (False, True) for H, Hkv in heads[T % 3 :]
    ]
    assert_right(cases, pools[count].run(run_cases, cases))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_to_all_attention_gives_the_bits_of_flash_attention(dtype, pools):
    case = Case(33, 33, 6, 3, True, None, dtype, D=32, scale=0.5)
    (*qkv, d_out), _ = case.inputs()
    qkv = [x.requires_grad_() for x in qkv]
    out = flash_attention(*qkv, causal=True, scale=0.5)
    by_rank = pools[3].run(run_case, case)
    for right, *shares in zip((out.detach(), *torch.autograd.grad(out, qkv, d_out)), *by_rank, strict=True):
        assert whole(shares, 2, 33, None).equal(right)


@pytest.mark.parametrize("count", COUNTS)
def test_decode_over_all_keys_matches_attention_with_the_same_bits_everywhere(count, pools):
    lens = [((7, 0, 3), (1, 0, 40), (0, 0, 9), (5, 0, 0)), ((0, 0, 0),) * 4, ((300, 2, 1), (0, 0, 0)) * 2]
    cases = [DecodeCase(each[:count], T) for each in lens for T in (1, 3)]
    cases += [DecodeCase(lens[0][:count], H=H, Hkv=Hkv, dtype=torch.bfloat16) for H, Hkv in ((4, 4), (8, 1))]
    by_rank = pools[count].run(run_decode, cases)
    for i, case in enumerate(cases):
        out, lse = by_rank[0][i]
        for results in by_rank:
            assert results[i][0].equal(out)
            assert results[i][1].equal(lse)
        q, keys = case.inputs()
        for b in range(len(q)):
            k, v = (
                torch.cat(
                    [pair[which][b, None, :, : each[b]] for pair, each in zip(keys, case.seq_lens, strict=True)], 2
                )
                for which in (0, 1)
            )
            exact, exact_lse = attention(*(x.double() for x in (q[b, None], k, v)), return_lse=True)
            naive = attention(q[b, None], k, v)
            if case.dtype == torch.float64:
                torch.testing.assert_close((out[b, None], lse[b, None]), (exact, exact_lse), rtol=1e-11, atol=1e-12)
            else:
                assert_as_accurate_as_naive(out[b, None], exact, naive)
                torch.testing.assert_close(lse[b, None].double(), exact_lse, rtol=1e-5, atol=0)


def test_the_default_scale_may_be_written_out_in_a_process(pools):
    def either(function):
        q = torch.arange(2 * 3 * 4.0).view(1, 2, 3, 4)
        return function(q, q, q, group=None, scale=None if dist.get_rank() else 4**-0.5)

    for function in (ring_attention, decode_attention):
        first, second = pools[2].run(either, function)
        assert first.isfinite().all()
        assert second.isfinite().all()


def test_keys_in_pages_are_merged_too(pools):
    def merged():
        from pagewise.paged_attention import paged_attention

        rank = dist.get_rank()
        generator = torch.Generator().manual_seed(5)
        q = torch.randn(2, 4, 8, generator=generator)
        caches = torch.randn(3, 2, 6, 4, 2, 8, generator=generator)  # of 3 processes: k and v, 6 blocks of 4 slots
        tables = torch.tensor([[[3, 1], [0, 5]], [[2, 2], [4, 0]], [[1, 0], [3, 5]]], dtype=torch.int32)
        lens = torch.tensor([[5, 0], [8, 0], [3, 1]], dtype=torch.int32)
        local = paged_attention(q, *caches[rank], tables[rank], lens[rank], return_lse=True)
        right = []
        for b in range(2):
            keys = [caches[r, :, tables[r, b]].flatten(1, 2)[:, : lens[r, b]] for r in range(3)]
            k, v = torch.cat(keys, dim=1).transpose(1, 2)[:, None].double()
            right.append(attention(q[b, None, :, None].double(), k, v)[0, :, 0])
        return merge_over_processes(*local, group=None)[0], torch.stack(right)

    for out, right in pools[3].run(merged):
        torch.testing.assert_close(out.double(), right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("causal", "order"), [(False, "contiguous"), (True, "contiguous"), (True, "zigzag")])
def test_torchs_own_context_parallelism_gives_the_same(causal, order, pools):
    case = Case(24, 24, 4, 4, causal, order, lse_gradient=False)
    ours, theirs = (pools[3].run(run, case) for run in (run_case, run_torchs_ring))
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


# ------------------------------------------------------------------------------------------------ what travels


@pytest.mark.slow
def test_transfers_are_waited_for_before_their_buffers_are_used(pools):
    cases = [Case(11, 14, causal=causal, order=order) for causal in (False, True) for order in ("zigzag", "contiguous")]
    for count in (2, 3):
        assert_right(cases, pools[count].run(run_late, cases))


def test_the_next_keys_travel_while_a_block_is_computed(pools):
    for events in pools[3].run(events_of, Case(12, 12)):
        assert events == ["start", 4 * 4, "wait"] * 2 + [4 * 4]


@pytest.mark.slow
def test_equal_inputs_give_equal_bits(pools):
    cases = [Case(50, 50, causal=True, dtype=torch.float32), Case(50, 50, 8, 4, True, None, torch.float32)]
    first, second = (pools[4].run(run_cases, cases) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def total(sent):
    return sum(each.bytes for each in sent)


@pytest.mark.parametrize("count", COUNTS)
def test_the_bytes_that_travel_are_those_of_the_formulas(count, pools):
    for order in ("zigzag", "contiguous"):
        case = Case(13, 18, order=order, dtype=torch.bfloat16)
        for rank, (forward, backward) in enumerate(pools[count].run(sent_in, case)):
            assert total(forward) == ring_bytes(case.sizes, count, rank, order)
            assert total(backward) == ring_bytes(case.sizes, count, rank, order, backward=True)
            keys, gradients = "keys and values", "gradients of keys and values"
            assert [each.name for each in forward] == [keys] * (count - 1)
            assert [each.name for each in backward] == [keys, gradients] * (count - 1) + [gradients] * (count > 1)
    case = Case(13, 18, 4 * count, 2 * count, order=None, dtype=torch.float32)
    for rank, (forward, backward) in enumerate(pools[count].run(sent_in, case)):
        assert total(forward) == all_to_all_bytes(case.sizes, count, rank)
        assert total(backward) == all_to_all_bytes(case.sizes, count, rank, backward=True)
        assert [each.name for each in forward] == ["q, k and v", "out"]
        assert [each.name for each in backward] == ["gradient of out", "gradient of q, k and v"]
    case = DecodeCase(((3, 9),) * count, T=2, dtype=torch.float16)
    sizes = Case(2, 9, case.H, case.Hkv, dtype=torch.float16).sizes
    for sent in pools[count].run(sent_in_decode, case):
        assert [tuple(each) for each in sent] == [("out and lse", decode_bytes(sizes, count))]


def pairs_by_step(events):
    """The pairs that a process computes in each step. A step ends with a wait for the next keys."""
    pairs = [0]
    for event in events:
        if event == "wait":
            pairs.append(0)
        elif event != "start":
            pairs[-1] += event
    return pairs


def test_each_visible_pair_is_computed_once_and_no_other(pools):
    for T, S, causal in ((12, 12, True), (13, 13, True), (5, 17, True), (17, 5, True), (9, 4, False)):
        for order in ("zigzag", "contiguous"):
            case = Case(T, S, causal=causal, order=order)
            table = visible_pairs(T, S, 3, causal=causal, order=order)
            assert [pairs_by_step(events) for events in pools[3].run(events_of, case)] == table
            assert sum(map(sum, table)) == (int(torch.ones(T, S).tril(S - T).sum()) if causal else T * S)


def test_zigzag_shares_have_equal_work_and_contiguous_shares_do_not():
    n, piece = 4, 6
    T = 2 * n * piece
    zigzag, contiguous = (visible_pairs(T, T, n, order=order) for order in ("zigzag", "contiguous"))
    diagonal = 2 * piece * (2 * piece + 1) // 2
    assert zigzag == [[diagonal] + [2 * piece * piece] * (n - 1)] * n
    assert contiguous == [[diagonal] + [4 * piece * piece] * rank + [0] * (n - 1 - rank) for rank in range(n)]


# ------------------------------------------------------------------------------------------------ groups and refusals


def test_a_group_may_be_a_part_of_the_processes(pools):
    case = Case(9, 9, causal=True)

    def in_part():
        group = dist.new_group([0, 2])
        if dist.get_rank() == 1:
            q = torch.zeros(1, 1, 1, 8)
            return refusal(lambda rank: ring_attention(q, q, q, group=group))
        results = run_case(case, group)
        return (refusal(lambda rank: None), results)[1]

    first, outside, last = pools[3].run(in_part)
    assert_right([case], [[first], [last]])
    assert outside[0] is TypeError
    assert "group must be None or a torch.distributed.ProcessGroup that this process belongs to" in outside[1]


def test_without_a_group_the_message_says_how_to_start_processes():
    q = torch.zeros(1, 1, 1, 8)
    for call in (ring_attention, all_to_all_attention, decode_attention):
        with pytest.raises(RuntimeError, match=r"start the program with torchrun.* or use pagewise\.distributed"):
            call(q, q, q, group=None)


def test_one_process_needs_no_other_program(tmp_path):
    """In the process of the tests, where annotations of shapes are checked."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        for case in (Case(9, 9, causal=True), Case(9, 9, causal=True, order=None)):
            assert_right([case], [[run_case(case)]])
        ((out, _),) = run_decode([DecodeCase(((3, 4),))])
        assert out.isfinite().all()
        x = torch.arange(6.0, requires_grad=True)
        unshard_sequence(shard_sequence(x, None, dim=0), None, dim=0).sum().backward()
        assert x.grad.equal(torch.ones(6))
    finally:
        dist.destroy_process_group()


def zeros(*shape, **options):
    return torch.zeros(shape, **options)


def call_of(function, rank, *, of_one=None, **of_all):
    """Call with zeros, with other arguments in all processes (`of_all`) and in process 1 (`of_one`)."""
    if function is merge_over_processes:
        arguments = {"out": zeros(1, 2, 1, 8), "lse": zeros(1, 2, 1), "group": None}
    else:
        arguments = {"q": zeros(1, 2, 3, 8), "k": zeros(1, 2, 3, 8), "v": zeros(1, 2, 3, 8), "group": None}
    function(**arguments | of_all | (of_one or {} if rank == 1 else {}))


OTHER_HEADS = {name: zeros(1, 4, 3, 8) for name in "qkv"}
WIDE = {name: zeros(1, 2, 3, 8, dtype=torch.float64) for name in "qkv"}
GRADIENT = {"q": zeros(1, 2, 3, 8, requires_grad=True)}
LONG_Q, LONG_KEYS = {"q": zeros(1, 2, 5, 8)}, {"k": zeros(1, 2, 5, 8), "v": zeros(1, 2, 5, 8)}
PACKED = {name: zeros(3, 2, 8) for name in "qkv"}
ONE_HEAD = {name: zeros(1, 1, 3, 8) for name in "kv"}
SPARSE = {"k": zeros(1, 2, 3, 8).to_sparse()}
TOO_MANY = {"seq_lens": torch.tensor([4], dtype=torch.int32)}
SHARES = 'the shares that shard_sequence(..., order="zigzag")'
REFUSALS = [  # a function, its wrong arguments, the error of process 0 and of process 1
    (ring_attention, {"order": "zag"}, 'order must be "zigzag", "contiguous" or "striped", got \'zag\'', None),
    (ring_attention, {"k": zeros(1, 2, 3, 9)}, "k must be", None),
    (ring_attention, {"of_one": {"k": None}}, "process 1 refuses its arguments: k must be a torch.Tensor", "k must be"),
    (ring_attention, {"of_one": SPARSE}, "process 1 refuses its arguments: q, k and v must be", "be dense"),
    (all_to_all_attention, {"of_one": SPARSE}, "process 1 refuses its arguments: q, k and v must", "be dense"),
    (ring_attention, {"of_one": OTHER_HEADS}, "H must be the same in every process, got 2, 4 in the order", None),
    (ring_attention, {"of_one": WIDE}, "dtype must be the same in every process, got torch.float32, torch.fl", None),
    (ring_attention, {"of_one": {"causal": True}}, "causal must be the same in every process, got False, True", None),
    (ring_attention, {"of_one": {"order": "contiguous"}}, "order must be the same in every process", None),
    (ring_attention, {"of_one": {"scale": 0.5}}, "scale must be the same in every process", None),
    (ring_attention, {"of_one": GRADIENT}, "the need for a gradient must be the same in every process", None),
    (ring_attention, {"of_one": LONG_Q}, f"q must hold {SHARES} gives: [4, 4] tokens of 8, got [3, 5]", None),
    (ring_attention, {"of_one": LONG_KEYS}, f"k and v must hold {SHARES} gives: [4, 4] tokens", None),
    (ring_attention, {"window": 3}, "ring_attention has no window: leave it out, or use all_to_all_attention", None),
    (ring_attention, {"alibi_slopes": zeros(2)}, "ring_attention has no alibi_slopes: leave it out, or use all_", None),
    (ring_attention, PACKED, "give whole sequences to each process, and call flash_attention_varlen there", None),
    (all_to_all_attention, PACKED, "give whole sequences to each process, and call flash_attention_varlen", None),
    (ring_attention, {"check": 1}, "check must be True or False, got int", None),
    (ring_attention, {"of_one": {"softcap": 1.0}}, "softcap must be the same in every process, got 0.0, 1.0", None),
    (all_to_all_attention, {"window": 3}, "window = 3 needs causal=True", None),
    (all_to_all_attention, {"of_one": {"alibi_slopes": zeros(2)}}, "alibi_slopes must be the same in every", None),
    (all_to_all_attention, {"k": zeros(1, 1, 3, 8), "v": zeros(1, 1, 3, 8)}, "use ring_attention", None),
    (all_to_all_attention, {"of_one": {"causal": 1}}, "process 1 refuses its arguments: causal", "causal must be True"),
    (all_to_all_attention, {"of_one": {"q": zeros(1, 2, 9, 8)}}, "[6, 6] tokens of 12, got [3, 9]", None),
    (decode_attention, {"window": 3}, "decode_attention has no window: leave it out, or use all_to_all", None),
    (decode_attention, {"of_one": ONE_HEAD}, "Hkv must be the same in every process, got 2, 1", None),
    (decode_attention, GRADIENT, "decode over processes has no backward: use ring_attention", None),
    (decode_attention, {"of_one": {"q": zeros(1, 2, 1, 8)}}, "the shape of q must be the same in every process", None),
    (decode_attention, {"of_one": {"q": 1 + zeros(1, 2, 3, 8)}}, "q must be the same in every process, got CRC ", None),
    (decode_attention, {"of_one": TOO_MANY}, "process 1 refuses its arguments: seq_lens must be", "seq_lens must"),
    (merge_over_processes, {"lse": zeros(1, 2)}, "lse must be", None),
    (merge_over_processes, {"of_one": {"out": 3}}, "process 1 refuses its arguments: out must be", "out must be"),
]


def test_arguments_that_do_not_fit_are_refused_in_every_process_and_no_process_waits(pools):
    def refusals():
        return [refusal(partial(call_of, function, **wrong)) for function, wrong, *_ in REFUSALS]

    zero, one = pools[2].run(refusals)
    for (function, wrong, of_zero, of_one), (error, message), (error_of_one, message_of_one) in zip(
        REFUSALS, zero, one, strict=True
    ):
        assert issubclass(error, ValueError | TypeError), (function, wrong)
        assert issubclass(error_of_one, ValueError | TypeError), (function, wrong)
        assert of_zero in message
        assert (of_one or of_zero) in message_of_one
        assert of_one is None or "refuses its arguments" not in message_of_one  # its own error


def test_an_error_of_one_process_before_the_exchange_is_heard_by_every_process(pools):
    def fails(rank):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(torch.Tensor, "numpy", lambda x: [][0])
            call_of(decode_attention, rank)

    zero, one = pools[2].run(refusal, fails)
    assert zero == (ValueError, "process 1 refuses its arguments: list index out of range")
    assert one[0] is IndexError


FUNCTIONS = [ring_attention, all_to_all_attention, decode_attention, merge_over_processes, unshard_sequence]


def test_two_processes_that_call_different_functions_hear_of_both(pools):
    def call_either(first, second, rank):
        function = (first, second)[rank]
        if function is unshard_sequence:
            unshard_sequence(torch.zeros(1, 2, 3, 8), None, dim=2)
        else:
            call_of(function, rank)

    def refusals():
        pairs = [(a, b) for a in FUNCTIONS for b in FUNCTIONS if a is not b]
        return [(a.__name__, b.__name__, *refusal(partial(call_either, a, b))) for a, b in pairs]

    for found in pools[2].run(refusals):
        for first, second, error, message in found:
            assert error is ValueError
            assert (
                message
                == f"function must be the same in every process, got {first}, {second} in the order of the ranks"
            )


def test_a_process_that_calls_nothing_is_named_after_the_time_limit_of_the_group(pools):
    """In the forward, and in the backward of a loss that does not use the share of process 2."""

    def forward(group):
        if dist.get_rank() != 2:
            ring_attention(*torch.zeros(3, 1, 1, 2, 8), group=group)

    def backward(function, group):
        q = torch.zeros(1, 3, 2, 8, requires_grad=True)
        out = function(q, q, q, group=group)
        if dist.get_rank() != 2:
            out.sum().backward()

    def told(call):
        try:
            call(dist.new_group(timeout=timedelta(seconds=1)))
        except RuntimeError as error:
            return str(error)

    names = {"ring_attention": forward}
    names |= {f"the backward of {f.__name__}": partial(backward, f) for f in (ring_attention, all_to_all_attention)}
    for name, call in names.items():
        *found, silent = pools[3].run(told, call)
        said = f"{name}: process 2 has ended, or did not call it within the time limit of the group"
        assert found == [said, said]
        assert silent is None


def test_a_process_that_leaves_between_two_transfers_makes_no_other_wait_for_ever(pools):
    """Before the first transfer, in the middle, and before the last one, of the forward and the backward."""

    def attend(function, group):
        q, k, v = (torch.ones(1, 3, 2, 8, requires_grad=function is not decode_attention) for _ in range(3))
        how = {"dim": 2} if function is unshard_sequence else {"k": k, "v": v}
        out = function(q, group=group, **how)
        if out.requires_grad:
            out.sum().backward()

    def transfers(function, group, leave_before=None):
        """Count the transfers of a call. Process 1 leaves before one of them."""
        number = 0

        def counted(transfer):
            def call(*args, **options):
                nonlocal number
                number += 1
                if number == leave_before and dist.get_rank() == 1:
                    raise EOFError
                return transfer(*args, **options)

            return call

        with pytest.MonkeyPatch.context() as patch:
            for name in ("all_gather_object", "all_gather", "all_to_all_single"):
                patch.setattr(dist, name, counted(getattr(dist, name)))
            patch.setattr(ring, "send_to_next", counted(ring.send_to_next))
            attend(function, group)
        return number

    def errors(function):
        count, found = transfers(function, None), []
        for leave_before in sorted({1, count // 2, count}):
            try:
                transfers(function, dist.new_group(timeout=timedelta(seconds=0.5)), leave_before)
            except Exception as error:
                found.append(type(error))
        return found

    for function in (ring_attention, all_to_all_attention, decode_attention, unshard_sequence):
        first, second, third = pools[3].run(errors, function)
        assert {*first, *third} == {RuntimeError}, function
        assert {*second} == {EOFError}, function
        assert len(first) == len(second) == len(third) > 1


@pytest.mark.parametrize("leaves", ["of one process", "in the backward"])
@pytest.mark.parametrize("function", [ring_attention, all_to_all_attention], ids=lambda function: function.__name__)
def test_processes_may_want_the_gradients_of_different_tensors(function, leaves, pools):
    """Process 0 that of q, process 1 that of k, and process 2 that of v."""
    case = Case(9, 9, 3, 3, causal=True, order="zigzag" if function is ring_attention else None)

    def gradient():
        rank = dist.get_rank()
        tensors = [x[:, :, owned(9, 3, rank, case.order)] for x in case.inputs()[0]]
        for x in tensors[:3] if leaves == "in the backward" else [tensors[rank]]:
            x.requires_grad_()
        out = function(*tensors[:3], group=None, causal=True)
        return torch.autograd.grad(out, tensors[rank], tensors[3])[0]

    (q, k, v, d_out), _ = case.inputs()
    qkv = [x.requires_grad_() for x in (q, k, v)]
    right = torch.autograd.grad(attention(*qkv, causal=True), qkv, d_out)
    for rank, found in enumerate(pools[3].run(gradient)):
        of_rank = right[rank][:, :, owned(9, 3, rank, case.order)]
        torch.testing.assert_close(found, of_rank, rtol=1e-11, atol=1e-12)


KEEPER = """
import os, signal, socket, time
from datetime import timedelta
import torch
import torch.distributed as dist
from pagewise.distributed import unshard_sequence

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
for trouble in (signal.SIGKILL, signal.SIGSTOP):
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    processes = []
    for rank in range(2):
        processes.append(os.fork())
        if processes[-1] == 0:
            dist.init_process_group("gloo", address, rank=rank, world_size=2, timeout=timedelta(seconds=1))
            unshard_sequence(torch.ones(1), None, dim=0)
            if rank == 0:
                os.kill(os.getpid(), trouble)
            time.sleep(0.2)
            try:
                unshard_sequence(torch.ones(1), None, dim=0)
            except RuntimeError as error:
                print(error, flush=True)
            os._exit(0)
    os.waitpid(processes[1], 0)
    os.kill(processes[0], signal.SIGKILL)
    os.waitpid(processes[0], 0)
"""


@pytest.mark.slow
def test_the_process_that_keeps_the_store_may_end_or_stand_still():
    """Without torchrun, process 0 keeps the store of torch.distributed."""
    done = subprocess.run([sys.executable, "-c", KEEPER], capture_output=True, text=True, timeout=60)
    said = "unshard_sequence: another process has ended, or did not call it within the time limit of the group"
    assert done.stdout.splitlines() == [said, said], done.stderr


def as_it_is(graph, inputs):
    """A backend of torch.compile, as "eager". By name, each process would import all backends, in a second."""
    return graph


def test_torch_compile_leaves_these_functions_out_of_its_graphs(pools):
    case = Case(9, 9, 3, 3, causal=True, dtype=torch.float32)

    def compiled(function):
        q, k, v = (x[:, :, owned(9, 3, dist.get_rank(), "contiguous")] for x in case.inputs()[0][:3])
        how = {"order": "contiguous"} if function is ring_attention else {}

        def call(q, k, v):
            out = function(2 * q, k, v, group=None, causal=True, **how)
            return unshard_sequence(out, None, dim=2, order="contiguous") + 1

        return torch.compile(call, backend=as_it_is)(q, k, v), call(q, k, v)

    for function in (ring_attention, all_to_all_attention):
        for found, right in pools[3].run(compiled, function):
            assert found.equal(right)


def test_unchecked_decode_is_one_graph(pools):
    def both_ways():
        q, k = torch.arange(2 * 3 * 8.0).view(1, 2, 3, 8).sin(), torch.arange(2 * 5 * 8.0).view(1, 2, 5, 8).cos()

        def call(q, k):
            return decode_attention(q + 1, k, k, group=None, check=False) * 2

        return torch.compile(call, backend=as_it_is, fullgraph=True)(q, k), call(q, k)

    for found, right in pools[2].run(both_ways):
        torch.testing.assert_close(found, right)


def test_transforms_without_numbers_are_refused_in_words(pools):
    def refusals():
        q = torch.ones(1, 1, 2, 4)
        calls = [
            lambda rank: torch.func.grad(lambda q: ring_attention(q, q, q, group=None).sum())(q),
            lambda rank: torch.func.jvp(lambda q: ring_attention(q, q, q, group=None), (q,), (q,)),
            lambda rank: torch.func.vmap(lambda q: ring_attention(q, q, q, group=None))(q[None]),
        ]
        return [refusal(call) for call in calls]

    (found,) = pools[1].run(refusals)
    assert [error for error, _ in found] == [ValueError] * 3
    assert all("attention over processes" in message for _, message in found)


@pytest.mark.parametrize("function", [ring_attention, all_to_all_attention], ids=lambda function: function.__name__)
def test_options_of_scores_are_those_of_the_whole_sequence(function, pools):
    (q, k, v, _), _ = Case(13, 13, 6, 3).inputs()
    options = {"softcap": 1.5}
    if function is all_to_all_attention:
        options |= {"window": 4, "alibi_slopes": torch.arange(6.0) / 5}

    def run():
        order = "contiguous"
        shares = (shard_sequence(x, None, dim=2, order=order) for x in (q, k, v))
        how = {"order": order} if function is ring_attention else {}
        return unshard_sequence(function(*shares, group=None, causal=True, **how, **options), None, dim=2, order=order)

    for out in pools[3].run(run):
        torch.testing.assert_close(out, attention(q, k, v, causal=True, **options), rtol=1e-11, atol=1e-12)


def test_unchecked_calls_exchange_no_arguments_and_give_the_same(pools):
    case = Case(12, 12, 3, 3, causal=True)

    def attend(function, **options):
        order = {"order": "contiguous"} if function is ring_attention else {}
        q, k, v = (x[:, :, owned(12, 3, dist.get_rank(), None)].requires_grad_() for x in case.inputs()[0][:3])
        share = function(q, k, v, group=None, causal=True, **order, **options)
        out = unshard_sequence(share, None, dim=2, order="contiguous", **options)
        return [*torch.autograd.grad((out**2).sum(), (q, k, v)), out.detach()]

    def unchecked(function):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_gather_object", None)
            return attend(function, check=False)

    for function in (ring_attention, all_to_all_attention):
        found, right = (pools[3].run(call, function) for call in (unchecked, attend))
        torch.testing.assert_close(found, right, rtol=0, atol=0)


def test_a_process_holds_two_shares_of_keys_besides_its_own(pools):
    """And q, out and what one block needs: peak memory does not depend on the number of processes."""

    def peak(share):
        q, k, v = torch.randn(3, 1, 4, share, 32)
        return count_work(lambda: ring_attention(q, k, v, group=None)).peak_bytes / k.nbytes

    of_two, of_four = (max(pools[count].run(peak, 256)) for count in (2, 4))
    assert of_four == of_two
    assert of_four < 7.5  # two pairs of k and v; out, out of the block, and their product; lse


def test_a_second_derivative_is_refused(pools):
    def twice():
        q = torch.ones(1, 1, 2, 4, requires_grad=True)
        (gradient,) = torch.autograd.grad((ring_attention(q, q, q, group=None) ** 2).sum(), q, create_graph=True)
        gradient.sum().backward()

    (found,) = pools[1].run(refusal, lambda rank: twice())
    assert found[0] is RuntimeError
    assert "differentiate twice" in found[1]
