"""Shares of a sequence: every token has exactly one owner, and gathering undoes sharing, in the gradient too."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from distributed_cases import owned, refusal

from pagewise.distributed import Processes, pieces, shard_sequence, unshard_sequence
from pagewise.distributed.sequence import share_lengths

ORDERS = ["zigzag", "contiguous", "striped"]


@pytest.fixture(scope="module")
def three():
    with Processes(3, timeout=60.0) as processes:
        yield processes


@pytest.mark.parametrize("order", ORDERS)
def test_every_token_has_one_owner_and_lengths_differ_by_little(order):
    for count in (1, 2, 3, 5):
        for length in range(4 * count + 2):
            of_each = [[i for part in pieces(length, count, rank, order) for i in part] for rank in range(count)]
            assert sorted(i for of_rank in of_each for i in of_rank) == list(range(length))
            for rank, of_rank in enumerate(of_each):
                assert of_rank == owned(length, count, rank, order).tolist()
            lengths = share_lengths(length, count, order)
            assert lengths == list(map(len, of_each))
            assert max(lengths) - min(lengths) <= (2 if order == "zigzag" else 1)


def test_zigzag_takes_one_piece_from_each_end():
    assert pieces(16, 2, 0) == [range(0, 4), range(12, 16)]
    assert pieces(16, 2, 1) == [range(4, 8), range(8, 12)]
    assert pieces(16, 2, 1, "contiguous") == [range(8, 16)]


@pytest.mark.slow
def test_gathering_undoes_sharing_in_any_dimension_and_dtype(three):
    def there_and_back():
        for order in ORDERS:
            for length in (0, 1, 5, 12, 13):
                for dim, dtype in (
                    (0, torch.int64),
                    (1, torch.bfloat16),
                    (-1, torch.float64),
                    (2, torch.bool),
                    (0, torch.int16),
                ):
                    shape = [2, 3, 4]
                    shape[dim] = length
                    x = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
                    share = shard_sequence(x, None, dim=dim, order=order)
                    assert share.equal(x.index_select(dim, owned(length, 3, dist.get_rank(), order)))
                    assert unshard_sequence(share, None, dim=dim, order=order).equal(x)

    three.run(there_and_back)


@pytest.mark.parametrize("order", ORDERS)
def test_the_gradient_of_a_share_is_that_of_the_losses_of_all_processes(order, three):
    def gradients():
        whole = torch.arange(14.0, dtype=torch.float64).view(2, 7).requires_grad_()
        share = shard_sequence(whole, None, dim=1, order=order)
        share.retain_grad()
        weights = torch.arange(14.0, dtype=torch.float64).view(2, 7) + 100 * dist.get_rank()
        (unshard_sequence(share**2, None, dim=1, order=order) * weights).sum().backward()
        return share.grad, whole.grad

    every = torch.arange(14.0, dtype=torch.float64).view(2, 7)
    right = 2 * every * (3 * every + 300)
    for rank, (of_share, of_whole) in enumerate(three.run(gradients)):
        mine = owned(7, 3, rank, order)
        assert of_share.equal(right[:, mine])
        assert of_whole.index_select(1, mine).equal(of_share)
        assert of_whole.sum() == of_share.sum()  # the other tokens have no gradient here


def test_float8_shares_can_be_gathered(three):
    def there_and_back():
        x = torch.arange(7.0).to(torch.float8_e4m3fn)
        return unshard_sequence(x[owned(7, 3, dist.get_rank(), "zigzag")], None, dim=0).float()

    assert all(out.equal(torch.arange(7.0)) for out in three.run(there_and_back))


def test_a_penalty_on_a_gradient_has_the_gradient_of_one_process(three):
    """Σ of the losses of all processes: each adds the squared gradient of its own share."""
    weights = torch.arange(7.0, dtype=torch.float64)

    def second():
        share = shard_sequence(torch.arange(7.0, dtype=torch.float64), None, dim=0).requires_grad_()
        loss = (weights * unshard_sequence(share, None, dim=0) ** 3).sum()
        (gradient,) = torch.autograd.grad(loss, share, create_graph=True)
        (gradient**2).sum().backward()
        return unshard_sequence(share.grad, None, dim=0)

    x = torch.arange(7.0, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(3 * (weights * x**3).sum(), x, create_graph=True)  # three equal losses
    (gradient**2).sum().backward()
    for found in three.run(second):
        torch.testing.assert_close(found, x.grad)


def test_wrong_arguments_are_refused_in_every_process(three):
    x = torch.zeros(2, 6)

    def call(wrong, rank):
        share, options = wrong(rank)
        unshard_sequence(share, None, **options)

    def refusals():
        return [refusal(partial(call, wrong)) for wrong, *_ in cases]

    cases = [
        (lambda rank: (x, {"dim": 2}), "dim must be from -2 to 1 for share of shape [2, 6], got 2", None),
        (lambda rank: (x, {"dim": 1.0}), "dim must be an int, got float", None),
        (lambda rank: ([1], {"dim": 0}), "share must be a torch.Tensor, got list", None),
        (
            lambda rank: (x, {"dim": 1, "order": "random"}),
            'order must be "zigzag", "contiguous" or "striped", got',
            None,
        ),
        (lambda rank: (x[:, rank:], {"dim": 1}), "gives: [5, 5, 5] tokens of 15, got [6, 5, 4]", None),
        (lambda rank: (x[: 2 - rank % 2], {"dim": 1}), "the other dimensions of share must be the same", None),
        (lambda rank: (x.to([x, x.double()][rank % 2].dtype), {"dim": 1}), "the dtype of share must be the same", None),
        (lambda rank: (x if rank else x.tolist(), {"dim": 1}), "share must be a torch.Tensor", "process 0 refuses"),
    ]
    for i, found in enumerate(three.run(refusals)):
        for (_, of_zero, of_others), (error, message) in zip(cases, found, strict=True):
            assert issubclass(error, ValueError | TypeError)
            assert ((of_others if i else None) or of_zero) in message


def test_pieces_refuses_wrong_numbers(shapes_unchecked):
    for arguments, message in [
        ((6, 2, 2, "zigzag"), "rank must be below count = 2, got 2"),
        ((-1, 2, 0, "zigzag"), "length must be at least 0, got -1"),
        ((6, 0, 0, "zigzag"), "count must be at least 1, got 0"),
        ((6, 2, 0, "ring"), 'order must be "zigzag", "contiguous" or "striped"'),
    ]:
        with pytest.raises(ValueError, match=message):
            pieces(*arguments)
