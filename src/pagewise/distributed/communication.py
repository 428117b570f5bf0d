"""Everything that travels between the processes of a group, and the count of its bytes (lesson 10).

A process waits for the others, so all must make the same calls in the same order. Therefore a function first lets all
processes `compare` their arguments.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pagewise.options import ScoreOptions
from pagewise.tools.checks import check_flag, check_qkv
from pagewise.tools.transforms import check_derivative, check_values, unseen_by_compiler, wants_gradient

Group = dist.ProcessGroup | None  # None: all processes
GRACE = 1.0  # seconds that processes have to say that they wait in vain


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
    """Return the group itself. None: all processes. Raise RuntimeError or TypeError if there is no such group."""
    if group is None and not dist.is_initialized():
        raise RuntimeError(
            "there is no group of processes: start the program with torchrun and call "
            "torch.distributed.init_process_group(), or use pagewise.distributed.Processes"
        )
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):  # new_group gives an int to a process outside the group
        raise TypeError(
            f"group must be None or a torch.distributed.ProcessGroup that this process belongs to, got {group!r}"
        )
    return group


def compare(
    function: str,
    group: dist.ProcessGroup,
    describe: Callable[[], dict[str, Any]],
    *,
    may_differ: Sequence[str] = (),
    check: bool | None = None,
) -> list[dict[str, Any]]:
    """Return `describe()` of every process, by rank, after all have compared these values and the function's name.

    Values that `may_differ` names may be others in other processes. With check=False nothing is compared, and the
    description of this process stands for those of the others.

    Raises:
        ValueError, TypeError: in every process, if a value differs or `describe()` raised an exception in a process.
        RuntimeError: a process has ended, or it made no such call within the time limit of the group.
    """
    if check is False:
        return [describe()] * group.size()
    return _compared(function, group, describe, may_differ, check)


@unseen_by_compiler
def _compared(function, group, describe, may_differ, check):
    refusal = None
    try:
        check_flag("check", True if check is None else check)
        mine: dict[str, Any] | str = {"function": function, **describe()}
    except Exception as error:  # it may have no memory for the result
        mine, refusal = str(error), error
    everyone: list[Any] = [None] * group.size()
    try:
        with torch._C._DisableFuncTorch():  # torch.func, which would wrap the tensors of this exchange
            dist.all_gather_object(everyone, mine, group)
    except RuntimeError as error:
        who = f"process {' and '.join(absent)}" if (absent := _absent(group)) else "another process"
        raise RuntimeError(
            f"{function}: {who} has ended, or did not call it within the time limit of the group"
        ) from error
    if refusal is not None:
        raise refusal
    for rank, theirs in enumerate(everyone):
        if isinstance(theirs, str):
            raise ValueError(f"process {rank} refuses its arguments: {theirs}")
    for name in mine:  # the function comes first, so what follows has the same names everywhere
        values = [theirs[name] for theirs in everyone]
        if name not in may_differ and any(value != values[0] for value in values):
            shown = ", ".join(map(str, values))
            raise ValueError(f"{name} must be the same in every process, got {shown} in the order of the ranks")
    return everyone


def _absent(group: dist.ProcessGroup) -> list[str]:
    """Return the processes that do not wait in vain, as this one does. The store tells, but it may stand still, too."""
    store, waiting, end = group.get_group_store(), set(), time.monotonic() + GRACE

    def ask() -> None:
        with suppress(RuntimeError):  # the store is gone
            store.set(f"{group.rank()} waits in vain", "")
            while len(waiting) < group.size() - 1 and time.monotonic() < end:
                waiting.update(rank for rank in range(group.size()) if store.check([f"{rank} waits in vain"]))
                time.sleep(0.01)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(GRACE)
    return [str(rank) for rank in range(group.size()) if rank not in waiting] if waiting else []


def compare_backward(function: str, group: dist.ProcessGroup, out: Tensor, check: bool | None) -> None:
    """Let the processes compare that they begin the backward pass of `function`, whose result is `out`."""

    def compare_first(_: object) -> None:
        compare(f"the backward of {function}", group, dict)

    if out.grad_fn is not None and check is not False:
        out.grad_fn.register_prehook(compare_first)


def refuse_options(function: str, **options: object) -> None:
    """Raise ValueError, which names the remedy, if an option is given that the function does not have."""
    for name in [name for name, value in options.items() if value is not None]:
        raise ValueError(f"{function} has no {name}: leave it out, or use all_to_all_attention")


def described_options(q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions) -> dict[str, Any]:
    """Check the arguments of attention over processes, and return the description of them for `compare`."""
    if isinstance(q, Tensor) and q.dim() == 3:
        raise ValueError(
            "q must be [B, H, T, D], and packed sequences are [total_q, H, D]: give whole sequences to each process, "
            "and call flash_attention_varlen there"
        )
    check_qkv(q, k, v)
    if any(x.layout != torch.strided for x in (q, k, v)):
        raise ValueError("q, k and v must be dense tensors: convert them with .to_dense()")
    name, remedy = "attention over processes", "naive_attention.attention"
    check_values(name, remedy=remedy, q=q, k=k, v=v)
    check_derivative(name, q, k, v, has=("backward",), remedy=remedy)
    options = options.checked(q, k.shape[2])
    (B, H, T, D), (_, Hkv, S, _) = q.shape, k.shape
    slopes = None if options.alibi_slopes is None else options.alibi_slopes.tolist()
    sizes = {"B": B, "H": H, "Hkv": Hkv, "D": D, "T": T, "S": S, "the dtype": q.dtype}
    scores = options._replace(scale=options.scale_for(D), alibi_slopes=slopes)._asdict()
    return {**sizes, "the need for a gradient": wants_gradient(q, k, v), **scores}


def send_to_next(outgoing: Tensor, incoming: Tensor, group: dist.ProcessGroup, name: str) -> Callable[[], Tensor]:
    """Start to send `outgoing` to process r + 1 and to fill `incoming` from process r − 1.

    Return a function that waits for both transfers and returns `incoming`. Before that call, `outgoing` must not be
    written and `incoming` must not be read.
    """
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
    _count(name, (group.size() - 1) * x.nbytes)
    gathered = torch.empty(group.size(), *x.shape, dtype=x.dtype, device=x.device)
    dist.all_gather([*map(as_bytes, gathered)], as_bytes(x), group)
    return gathered


def as_bytes(x: Tensor) -> Tensor:
    """Return the numbers of x as bytes, because gloo lacks some dtypes. A contiguous x is not copied."""
    return x.contiguous().view(-1).view(torch.uint8)


def all_to_all(group: Any, **exchanges: tuple[Sequence[Tensor], Sequence[Sequence[int]]]) -> list[Sequence[Tensor]]:
    """Send pieces[r] to process r, for all r, in each of several exchanges (pieces, shapes of the pieces that arrive).

    Return the pieces from each process, for each exchange. The gradients travel back, and all of them do if one does:
    the processes need not want the gradients of the same tensors.
    """
    count, pieces = group.size(), [piece for outgoing, _ in exchanges.values() for piece in outgoing]
    arrived = _AllToAll.apply(group, {name: shapes for name, (_, shapes) in exchanges.items()}, *pieces)
    return [arrived[start : start + count] for start in range(0, len(arrived), count)]


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, exchanges, *pieces):
        ctx.group, ctx.back, arrived = group, {}, []
        for i, (name, shapes) in enumerate(exchanges.items()):
            outgoing = pieces[i * group.size() : (i + 1) * group.size()]
            ctx.back[f"gradient of {name}"] = [piece.shape for piece in outgoing]
            sent = [piece.nbytes for piece in outgoing]
            received = [torch.Size(shape).numel() * outgoing[0].itemsize for shape in shapes]
            _count(name, sum(sent) - sent[group.rank()])
            incoming = torch.empty(sum(received), dtype=torch.uint8, device=outgoing[0].device)
            dist.all_to_all_single(incoming, torch.cat([*map(as_bytes, outgoing)]), received, sent, group)
            parts = zip(incoming.split(received), shapes, strict=True)
            arrived += [part.view(outgoing[0].dtype).view(shape) for part, shape in parts]
        return tuple(arrived)

    @staticmethod
    def backward(ctx, *gradients):
        return None, None, *_AllToAll.apply(ctx.group, ctx.back, *gradients)


def all_reduce(x: Tensor, group: Any, name: str) -> Tensor:
    """Replace x by the sum of the x of all processes, and return it.

    The count is that of a ring: each process sums one n-th of x (n − 1 transfers of x.nbytes / n), and then the parts
    travel around the ring again.
    """
    count = group.size()
    _count(name, 2 * (count - 1) * x.nbytes // count)
    dist.all_reduce(x, group=group)
    return x
