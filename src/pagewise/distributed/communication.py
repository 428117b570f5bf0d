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
        remedy = "start the program with torchrun and call torch.distributed.init_process_group()"
        raise RuntimeError(f"there is no group of processes: {remedy}, or use pagewise.distributed.Processes")
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):  # new_group gives an int to a process outside the group
        said = "None or a torch.distributed.ProcessGroup that this process belongs to"
        raise TypeError(f"group must be {said}, got {group!r}")
    return group


@unseen_by_compiler
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
    try:
        check_flag("check", True if check is None else check)
        mine: dict[str, Any] | Exception = {"function": function, **describe()}
    except Exception as error:  # it may have no memory for the result
        mine = error
    everyone: list[Any] = [None] * group.size()
    try:
        with torch._C._DisableFuncTorch():  # torch.func, which would wrap the tensors of this exchange
            dist.all_gather_object(everyone, str(mine) if isinstance(mine, Exception) else mine, group)
    except RuntimeError as error:
        who = f"process {' and '.join(absent)}" if (absent := _absent(group)) else "another process"
        said = f"{who} has ended, or did not call it within the time limit of the group"
        raise RuntimeError(f"{function}: {said}") from error
    if isinstance(mine, Exception):
        raise mine
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
    if out.grad_fn is not None and check is not False:  # None: the gradients are not replaced
        out.grad_fn.register_prehook(lambda _: compare(f"the backward of {function}", group, dict) and None)


def refuse_options(function: str, **options: object) -> None:
    """Raise ValueError, which names the remedy, if an option is given that the function does not have."""
    for name in [name for name, value in options.items() if value is not None]:
        raise ValueError(f"{function} has no {name}: leave it out, or use all_to_all_attention")


def described_options(q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions) -> dict[str, Any]:
    """Check the arguments of attention over processes, and return the description of them for `compare`."""
    if isinstance(q, Tensor) and q.dim() == 3:
        remedy = "give whole sequences to each process, and call flash_attention_varlen there"
        raise ValueError(f"q must be [B, H, T, D], and packed sequences are [total_q, H, D]: {remedy}")
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
    """Start to send `outgoing` to process r + 1 and to fill `incoming` from process r − 1. Both are contiguous.

    Return a function that waits for both transfers and returns `incoming`. Before that call, `outgoing` must not be
    written and `incoming` must not be read.
    """
    _count(name, outgoing.nbytes)
    sent, received = [0] * group.size(), [0] * group.size()
    sent[(group.rank() + 1) % group.size()], received[group.rank() - 1] = outgoing.nbytes, incoming.nbytes
    # torch's ring uses the same collective. Its batch_isend_irecv knows only groups that torch.distributed registered
    work = dist.all_to_all_single(as_bytes(incoming), as_bytes(outgoing), received, sent, group, async_op=True)

    def wait() -> Tensor:
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


def all_to_all(pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]], group: Any, name: str) -> Sequence[Tensor]:
    """Exchange tensors: with n processes, each n-th part of `pieces` is for one process, in the order of the ranks.

    Return the pieces from all processes, in the same order. They have the dtype of `pieces`, and these shapes. The
    gradients travel back, and all of them do if one does: the processes need not want those of the same tensors.
    """
    return _AllToAll.apply(group, name, shapes, *pieces)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, name, shapes, *pieces):
        ctx.exchange = group, f"gradient of {name}", [piece.shape for piece in pieces]
        dtype, number = pieces[0].dtype, len(pieces) // group.size()  # of the pieces for each process
        sizes = [torch.Size(shape).numel() * dtype.itemsize for shape in shapes]
        received = [sum(sizes[i : i + number]) for i in range(0, len(sizes), number)]
        sent = [sum(piece.nbytes for piece in pieces[i : i + number]) for i in range(0, len(pieces), number)]
        _count(name, sum(sent) - sent[group.rank()])
        incoming = torch.empty(sum(sizes), dtype=torch.uint8, device=pieces[0].device)
        dist.all_to_all_single(incoming, torch.cat([*map(as_bytes, pieces)]), received, sent, group)
        return tuple(part.view(dtype).view(shape) for part, shape in zip(incoming.split(sizes), shapes, strict=True))

    @staticmethod
    def backward(ctx, *gradients):
        return None, None, None, *_AllToAll.apply(*ctx.exchange, *gradients)


def all_reduce(x: Tensor, group: Any, name: str) -> Tensor:
    """Replace x by the sum of the x of all processes, and return it.

    The count is that of a ring: each process sums one n-th of x (n − 1 transfers of x.nbytes / n), and then the parts
    travel around the ring again.
    """
    count = group.size()
    _count(name, 2 * (count - 1) * x.nbytes // count)
    dist.all_reduce(x, group=group)
    return x
