"""Everything that travels between the processes of a group, and the count of its bytes (lesson 10).

    send to the next    process r sends a tensor to process r + 1 and receives one from process r − 1 (a ring)
    all_gather          every process receives the tensor of every process
    all_to_all          every process sends another piece of its tensor to every process
    all_reduce          every process receives the sum of the tensors of all processes

All processes of a group must make the same calls in the same order, because a process waits for the others. Therefore a
function first lets all processes compare their arguments (`compare`). Arguments that do not fit raise an exception in
every process, and no process waits for a process that has given up. A process that calls another function, or none, is
named after the time limit of the group: `timeout` of torch.distributed.init_process_group.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from pagewise.options import ScoreOptions
from pagewise.tools.checks import check_flag, check_qkv
from pagewise.tools.transforms import check_derivative, has_values, unseen_by_compiler, wants_gradient

Group = dist.ProcessGroup | None  # None: all processes


class Sent(NamedTuple):
    """One transfer: its name, and the bytes that this process sent to other processes."""

    name: str
    bytes: int


_counting: list[list[Sent]] = []


@contextmanager
def count_bytes() -> Iterator[list[Sent]]:
    """Return a list that grows by one `Sent` for each transfer of this process inside the `with` block."""
    sent: list[Sent] = []
    _counting.append(sent)
    try:
        yield sent
    finally:
        _counting[:] = [other for other in _counting if other is not sent]


def _count(name: str, num_bytes: int) -> None:
    for sent in _counting:
        sent.append(Sent(name, num_bytes))


def group_of(group: Group) -> dist.ProcessGroup:
    """Return the group itself. None means all processes.

    Raises:
        RuntimeError, TypeError: no group was started, or `group` is not a group that this process belongs to.
    """
    if isinstance(group, dist.ProcessGroup):
        return group
    if group is not None:  # new_group gives an int to a process outside the group
        raise TypeError(
            f"group must be None or a torch.distributed.ProcessGroup that this process belongs to, got {group!r}"
        )
    if not dist.is_initialized():
        raise RuntimeError(
            "there is no group of processes: start the program with torchrun and call "
            "torch.distributed.init_process_group(), or use pagewise.distributed.Processes"
        )
    return dist.group.WORLD


def rank_and_size(group: Group) -> tuple[int, int]:
    """Return the rank of this process in the group, and the number of processes. Raise as `group_of`."""
    group = group_of(group)
    return group.rank(), group.size()


_calls: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()  # of `compare`, for each group


@unseen_by_compiler
def compare(
    function: str,
    group: Group,
    describe: Callable[[], dict[str, Any]],
    *,
    may_differ: Sequence[str] = (),
    check: bool = True,
) -> list[dict[str, Any]]:
    """Return `describe()` of every process, by rank, after every process has compared them.

    Args:
        function: the name of the function that all processes call.
        may_differ: the names of values that may be others in other processes.
        check: False: nothing is compared, and the description of this process stands for those of the others.

    Raises:
        ValueError, TypeError: `describe()` raised an exception in this process or in another process, another process
            calls another function, or a value that is not named in `may_differ` is not the same in all processes.
            Every process raises an exception.
        RuntimeError: a process has ended, or it made no such call within the time limit of the group.
    """
    group = group_of(group)
    if not check:
        return [describe()] * group.size()
    try:
        mine: dict[str, Any] | str = {"function": function, **describe()}
        refusal = None
    except (TypeError, ValueError) as error:
        mine, refusal = str(error), error
    everyone: list[Any] = [None] * group.size()
    _note_call(group)
    try:
        with torch._C._DisableFuncTorch():  # torch.func, which would wrap the tensors of this exchange
            dist.all_gather_object(everyone, mine, group)
    except RuntimeError as error:
        raise RuntimeError(f"{function}: {_absent(group)}") from error
    if refusal is not None:
        raise refusal
    for rank, theirs in enumerate(everyone):
        if isinstance(theirs, str):
            raise ValueError(f"process {rank} refuses its arguments: {theirs}")
    for name in mine:  # the function comes first, so what follows has the same names everywhere
        values = [theirs[name] for theirs in everyone]
        if name not in may_differ and any(value != values[0] for value in values):
            shown = ", ".join(f"{value}" for value in values)
            raise ValueError(f"{name} must be the same in every process, got {shown} in the order of the ranks")
    return everyone


def _note_call(group: dist.ProcessGroup) -> None:
    """Let the other processes know that this one compares, for the case that they wait for it in vain."""
    _calls[group] = _calls.get(group, 0) + 1
    group.get_group_store().set(f"compares/{group.rank()}", str(_calls[group]))


def _absent(group: dist.ProcessGroup) -> str:
    """Return a sentence that names the processes without a call of `compare` that fits this process's last one."""
    store, absent = group.get_group_store(), []
    for rank in range(group.size()):
        key = f"compares/{rank}"
        if not store.check([key]) or int(store.get(key)) < _calls[group]:
            absent.append(str(rank))
    who = f"process {' and '.join(absent)}" if absent else "another process"
    return f"{who} has ended, or did not call it within the time limit of the group"


def refuse_options(function: str, remedy: str, **options: object) -> None:
    """Raise ValueError, which names the remedy, if an option is given that the function does not have."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{function} has no {name}: leave it out, or use {remedy}")


def described_options(q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions, check: bool | None) -> dict[str, Any]:
    """Check the arguments of attention over processes, and return the description of them for `compare`."""
    check_qkv(q, k, v)
    if check is not None:
        check_flag("check", check)
    if not has_values(q, k, v):
        raise ValueError(
            "attention over processes sends numbers, which a traced, fake or batched tensor does not have: call it "
            "outside of torch.func.vmap, torch.export and fake tensors"
        )
    check_derivative("attention over processes", q, k, v, has=("backward",), remedy="naive_attention.attention")
    options = options.checked(q, k.shape[2])
    (B, H, T, D), (_, Hkv, S, _) = q.shape, k.shape
    slopes = None if options.alibi_slopes is None else options.alibi_slopes.tolist()
    return {
        **{"B": B, "H": H, "Hkv": Hkv, "D": D, "T": T, "S": S, "the dtype": q.dtype},
        "the need for a gradient": wants_gradient(q, k, v),
        **{"causal": options.causal, "scale": options.scale_for(D), "window": options.window},
        **{"softcap": options.softcap, "alibi_slopes": slopes},
    }


def send_to_next(outgoing: Tensor, incoming: Tensor, group: Group, name: str) -> Callable[[], Tensor]:
    """Start to send `outgoing` to process r + 1 and to fill `incoming` from process r − 1.

    Returns:
        a function that waits for both transfers and returns `incoming`. Before that call, `outgoing` must not be
        written and `incoming` must not be read.
    """
    group = group_of(group)
    rank, count = group.rank(), group.size()
    _count(name, outgoing.nbytes)
    # torch's batch_isend_irecv does the same, but only for groups that torch.distributed has registered
    if outgoing.is_cuda:
        group._start_coalescing(outgoing.device)
    works = [group.send([outgoing], (rank + 1) % count, 0), group.recv([incoming], (rank - 1) % count, 0)]
    if outgoing.is_cuda:
        works = [group._end_coalescing(outgoing.device)]

    def wait() -> Tensor:
        for work in works:
            work.wait()
        return incoming

    return wait


def all_gather(x: Tensor, group: Any, name: str) -> Tensor:
    """Return the x of all processes, [n, *x.shape] by rank. The shape must be the same everywhere, in any dtype."""
    group = group_of(group) if group is None else group
    _count(name, (group.size() - 1) * x.nbytes)
    gathered = torch.empty(group.size(), *x.shape, dtype=x.dtype, device=x.device)
    mine, *of_each = (each.contiguous().view(-1).view(torch.uint8) for each in (x, *gathered))  # gloo lacks some dtypes
    dist.all_gather(of_each, mine, group)
    return gathered


def all_to_all(pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]], group: Group, name: str) -> list[Tensor]:
    """Send pieces[r] to process r, for all r, and return the piece from every process.

    Args:
        shapes: the shape of the piece that comes from each process.
    """
    rank, _ = rank_and_size(group)
    outgoing = torch.cat([piece.reshape(-1) for piece in pieces])
    _count(name, outgoing.nbytes - pieces[rank].nbytes)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    incoming = outgoing.new_empty(sum(sizes))
    dist.all_to_all_single(incoming, outgoing, sizes, [piece.numel() for piece in pieces], group)
    return [part.view(tuple(shape)) for part, shape in zip(incoming.split(sizes), shapes, strict=True)]


def all_reduce(x: Tensor, group: Any, name: str) -> Tensor:
    """Replace x by the sum of the x of all processes, and return it. The count is that of the ring algorithm.

    `group` may also be a backend such as ProcessGroupGloo, which needs no call of init_process_group.

    In a ring, each process first sums one n-th of x (n − 1 transfers of x.nbytes / n), and then the parts travel around
    the ring again.
    """
    count = group.size()
    _count(name, 2 * (count - 1) * x.nbytes // count)
    dist.all_reduce(x, group=group)
    return x
