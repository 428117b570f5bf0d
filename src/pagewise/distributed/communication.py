"""Everything that travels between the processes of a group, and the count of its bytes (lesson 10).

    send to the next    process r sends a tensor to process r + 1 and receives one from process r − 1 (a ring)
    all_gather          every process receives the tensor of every process
    all_to_all          every process sends another piece of its tensor to every process
    all_reduce          every process receives the sum of the tensors of all processes

All processes of a group must make the same calls in the same order, because a process waits for the others. Therefore a
function first lets all processes compare their arguments (`compare`). Arguments that do not fit raise an exception in
every process, and no process waits for a process that has given up.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pagewise.options import ScoreOptions
from pagewise.tools.checks import check_qkv
from pagewise.tools.transforms import check_derivative, wants_gradient

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


def rank_and_size(group: Group) -> tuple[int, int]:
    """Return the rank of this process in the group, and the number of processes.

    Raises:
        RuntimeError, TypeError: no group was started, or `group` is not a group that this process belongs to.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "there is no group of processes: start the program with torchrun and call "
            "torch.distributed.init_process_group(), or use pagewise.distributed.Processes"
        )
    if not isinstance(group, dist.ProcessGroup | None):  # new_group gives an int to a process outside the group
        raise TypeError(
            f"group must be None or a torch.distributed.ProcessGroup that this process belongs to, got {group!r}"
        )
    return dist.get_rank(group), dist.get_world_size(group)


def compare(group: Group, describe: Callable[[], dict[str, Any]], may_differ: Sequence[str]) -> list[dict[str, Any]]:
    """Return `describe()` of every process, by rank, after every process has compared them.

    Raises:
        ValueError, TypeError: `describe()` raised an exception in this process or in another process, or a value that
            is not named in `may_differ` is not the same in all processes. Every process raises an exception.
    """
    try:
        mine: dict[str, Any] | str = describe()
        refusal = None
    except (TypeError, ValueError) as error:
        mine, refusal = str(error), error
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group)
    if refusal is not None:
        raise refusal
    for rank, theirs in enumerate(everyone):
        if isinstance(theirs, str):
            raise ValueError(f"process {rank} refuses its arguments: {theirs}")
    for name in mine:
        values = [theirs[name] for theirs in everyone]
        if name not in may_differ and any(value != values[0] for value in values):
            shown = ", ".join(f"{value}" for value in values)
            raise ValueError(f"{name} must be the same in every process, got {shown} in the order of the ranks")
    return everyone


def describe_qkv(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None) -> dict[str, Any]:
    """Check q, k, v, causal and scale, and return the description of them for `compare`."""
    check_qkv(q, k, v)
    check_derivative("attention over processes", q, k, v, has=("backward",), remedy="naive_attention.attention")
    options = ScoreOptions(scale, causal).checked(q, k.shape[2])
    (B, H, T, D), (_, Hkv, S, _) = q.shape, k.shape
    sizes = {"B": B, "H": H, "Hkv": Hkv, "D": D, "T": T, "S": S, "the dtype": q.dtype}
    needs = {"the need for a gradient": wants_gradient(q, k, v)}
    return sizes | needs | {"causal": causal, "scale": options.scale_for(D)}


def send_to_next(outgoing: Tensor, incoming: Tensor, group: Group, name: str) -> Callable[[], Tensor]:
    """Start to send `outgoing` to process r + 1 and to fill `incoming` from process r − 1.

    Returns:
        a function that waits for both transfers and returns `incoming`. Before that call, `outgoing` must not be
        written and `incoming` must not be read.
    """
    rank, count = rank_and_size(group)
    _count(name, outgoing.nbytes)
    transfers = [
        dist.P2POp(dist.isend, outgoing, group=group, group_peer=(rank + 1) % count),
        dist.P2POp(dist.irecv, incoming, group=group, group_peer=(rank - 1) % count),
    ]
    works = dist.batch_isend_irecv(transfers)

    def wait() -> Tensor:
        for work in works:
            work.wait()
        return incoming

    return wait


def all_gather(x: Tensor, group: Group, name: str) -> Tensor:
    """Return the x of all processes, [n, *x.shape] by rank. The shape must be the same everywhere."""
    _, count = rank_and_size(group)
    _count(name, (count - 1) * x.nbytes)
    gathered = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(count)]
    dist.all_gather(gathered, x.contiguous(), group)
    return torch.stack(gathered)


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
