"""Functions for the processes of tests/distributed. The processes import this module, but not pytest."""

import contextlib
from typing import NamedTuple

import torch
import torch.distributed as dist

from pagewise.distributed import all_to_all_attention, count_bytes, decode_attention, ring, ring_attention
from pagewise.distributed.counted import Sizes


class Case(NamedTuple):
    """One call for a whole sequence. `order` None: all-to-all."""

    T: int
    S: int
    H: int = 4
    Hkv: int = 2
    causal: bool = False
    order: str | None = "zigzag"
    dtype: torch.dtype = torch.float64
    B: int = 2
    D: int = 8
    scale: float | None = None
    growth: float = 1.0  # of the queries
    lse_gradient: bool = True

    def inputs(self):
        """q, k, v, d_out and d_lse of the whole sequence: the same in every process."""
        generator = torch.Generator().manual_seed(self.T + 100 * self.S)
        queries, keys = (self.B, self.H, self.T, self.D), (self.B, self.Hkv, self.S, self.D)
        q, k, v, d_out = (
            torch.randn(size, generator=generator, dtype=torch.float64) for size in (queries, keys, keys, queries)
        )
        # large, or dq would be the rounding of 0 where a query sees one key
        d_lse = 8 * torch.randn(queries[:3], generator=generator, dtype=torch.float64)
        return [x.to(self.dtype) for x in (self.growth * q, k, v, d_out)], d_lse * self.lse_gradient

    @property
    def sizes(self):
        return Sizes(self.B, self.H, self.Hkv, self.T, self.S, self.D, self.dtype.itemsize)


def owned(length, count, rank, order):
    """The positions of a share, computed another way than by the package."""
    if order == "zigzag":
        parts = torch.arange(length).tensor_split(2 * count)
        return torch.cat((parts[rank], parts[-1 - rank]))
    if order == "striped":
        return torch.arange(length)[rank::count]
    return torch.arange(length).tensor_split(count)[rank]


def run_cases(cases, *, group=None):
    """Forward and backward of each case: this process's share of (out, lse, dq, dk, dv)."""
    return [run_case(case, group) for case in cases]


def run_case(case, group=None):
    rank, count = dist.get_rank(group), dist.get_world_size(group)
    (q, k, v, d_out), d_lse = case.inputs()
    of_queries, of_keys = (owned(length, count, rank, case.order) for length in (case.T, case.S))
    q, k, v = (x[:, :, at].requires_grad_() for x, at in ((q, of_queries), (k, of_keys), (v, of_keys)))
    d_out, d_lse = d_out[:, :, of_queries], d_lse[:, :, of_queries]
    if case.order is None:
        out = all_to_all_attention(q, k, v, group=group, causal=case.causal, scale=case.scale)
        results, gradients = (out,), (d_out,)
    else:
        options = {"causal": case.causal, "scale": case.scale, "order": case.order}
        results = out, lse = ring_attention(q, k, v, group=group, return_lse=True, **options)
        gradients = d_out, d_lse.to(lse.dtype)
    gradients = torch.autograd.grad(results, (q, k, v), gradients)
    return [x.detach() for x in (*results, *gradients)]


class DecodeCase(NamedTuple):
    """Decode over `seq_lens[rank][b]` keys in each process, in tensors of the longest length + 1."""

    seq_lens: tuple[tuple[int, ...], ...]
    T: int = 1
    H: int = 4
    Hkv: int = 2
    D: int = 8
    dtype: torch.dtype = torch.float64

    def inputs(self):
        """q, and k and v of each process; NaN where there is no key."""
        generator = torch.Generator().manual_seed(sum(map(sum, self.seq_lens)))
        B = len(self.seq_lens[0])
        q = torch.randn(B, self.H, self.T, self.D, generator=generator, dtype=torch.float64).to(self.dtype)
        keys = []
        for lens in self.seq_lens:
            pair = torch.randn(2, B, self.Hkv, max(lens) + 1, self.D, generator=generator, dtype=torch.float64)
            for b, length in enumerate(lens):
                pair[:, b, :, length:] = torch.nan
            keys.append(pair.to(self.dtype))
        return q, keys


def run_decode(cases):
    results = []
    for case in cases:
        q, keys = case.inputs()
        k, v = keys[dist.get_rank()]
        seq_lens = torch.tensor(case.seq_lens[dist.get_rank()], dtype=torch.int32)
        results.append(decode_attention(q, k, v, group=None, seq_lens=seq_lens, return_lse=True))
    return results


def sent_in(case):
    """The transfers of this process in the forward and in the backward of a case."""
    with count_bytes() as sent:
        mark = []
        original = torch.autograd.grad
        torch.autograd.grad = lambda *a: (mark.append(len(sent)), original(*a))[1]
        try:
            run_case(case)
        finally:
            torch.autograd.grad = original
    return sent[: mark[0]], sent[mark[0] :]


def sent_in_decode(case):
    with count_bytes() as sent:
        run_decode([case])
    return sent


@contextlib.contextmanager
def late_transfers():
    """Inside, a transfer starts only when the caller waits for it. A tensor that is read before holds NaN."""
    start = ring.send_to_next

    def later(outgoing, incoming, group, name):
        incoming.fill_(torch.nan)
        return lambda: start(outgoing, incoming, group, name)()

    ring.send_to_next = later
    try:
        yield
    finally:
        ring.send_to_next = start


def run_late(cases):
    with late_transfers():
        return run_cases(cases)


def refusal(call):
    """Call in every process. Return the error's type and message, and show that the processes can still communicate."""
    try:
        call(dist.get_rank())
        found = None
    except Exception as error:
        found = type(error), str(error)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert int(total) == dist.get_world_size()
    return found


def events_of(case):
    """Attention of a case: the starts of its transfers, the pairs of query and key of each block, and the waits."""
    events, send, attend = [], ring.send_to_next, ring.attend_to_block

    def noted_send(outgoing, incoming, group, name):
        events.append("start")
        wait = send(outgoing, incoming, group, name)
        return lambda: (events.append("wait"), wait())[1]

    def noted_attend(q, k, v, options):
        T, S = q.shape[2], k.shape[2]
        events.append(int(torch.ones(T, S).tril(S - T).sum()) if options.causal else T * S)
        return attend(q, k, v, options)

    ring.send_to_next, ring.attend_to_block = noted_send, noted_attend
    try:
        rank, count = dist.get_rank(), dist.get_world_size()
        (q, k, v, _), _ = case.inputs()
        of_queries, of_keys = (owned(length, count, rank, case.order) for length in (case.T, case.S))
        shares = q[:, :, of_queries], k[:, :, of_keys], v[:, :, of_keys]
        ring_attention(*shares, group=None, causal=case.causal, order=case.order)
    finally:
        ring.send_to_next, ring.attend_to_block = send, attend
    return events


def run_torchs_ring(case):
    """The same as `run_case`, by torch's own ring attention. Its shares are contiguous, or zigzag with causal."""
    from torch import ops
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

    rank, count = dist.get_rank(), dist.get_world_size()
    (q, k, v, d_out), _ = case.inputs()
    q, k, v, d_out = (x[:, :, owned(case.T, count, rank, case.order)] for x in (q, k, v, d_out))
    theirs._cp_options.enable_load_balance = case.order == "zigzag"
    theirs._cp_options.convert_to_f32 = False

    def backward(grad_out, query, key, value, out, logsumexp, *, is_causal, **_):
        results = grad_out, query, key, value, out, logsumexp
        return ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*results, 0.0, is_causal)

    forward = ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = theirs._templated_ring_attention(dist.group.WORLD, 2, forward, q, k, v, is_causal=case.causal)
    results = d_out, "grad_out", q, k, v, out, lse
    gradients = theirs._templated_ring_attention_backward(dist.group.WORLD, 2, backward, *results, case.causal)
    return [out, lse, *gradients[:3]]
