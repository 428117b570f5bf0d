"""The contract of all attention functions under torch's transforms: each cell is right, or a refusal with a remedy.

`cell(name, axis)` calls one function of `attention_functions` under one transform. As a script, this file prints the
whole table and its counts:

    python tests/attention_transforms.py
"""

import copy
import io
import pickle
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))  # as a script; tests/cudascope hides the package

import torch
from attention_functions import BLOCK_SIZE, FUNCTIONS
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pagewise.naive_attention import attention
from pagewise.paged_blocks.cache import from_vllm_layout, to_vllm_layout

H, HKV, D, B = 4, 2, 32, 2
NAMES = [name for name in FUNCTIONS if name != "decode shared triton"]  # not public


def device_of(name):
    """Where the function takes tensors: Triton's kernels run on the GPU if there is one."""
    return "cuda" if "triton" in name and torch.cuda.is_available() else "cpu"


class Call(NamedTuple):
    """A public function, its tensors, and the oracle of the same tensors."""

    function: object
    tensors: list[Tensor]  # q, k and v or the caches, and then tensors of integers
    oracle: object

    @property
    def floats(self):
        return self.tensors[:3]

    def of_floats(self, function):
        """The function of q, k and v alone."""
        return lambda q, k, v: function(q, k, v, *self.tensors[3:])


def call_of(name, S=48, T=None, *, copies=0):
    """The call of a function over S keys, in blocks that are all used. With `copies`, a batch of as many for vmap."""
    each = FUNCTIONS[name]
    T = T or (1 if each.one_query else 3)
    generator, device = torch.Generator().manual_seed(S), device_of(name)

    def random(*size):
        return torch.randn(*((copies,) if copies else ()), *size, generator=generator).to(device)

    attend = each.attend
    if name.startswith(("paged", "varlen")):
        public, options = attend.args[0], dict(attend.keywords)
        vllm, packed = options.pop("vllm", False), options.pop("packed", False)
        M = -(-S // BLOCK_SIZE)
        tables = torch.randperm(B * M, generator=generator).view(B, M).int().to(device)
        lens = torch.full((B,), S, dtype=torch.int32, device=device)
        ends = [torch.arange(B + 1, dtype=torch.int32, device=device) * T] if packed else []
        q, k, v = (random(n, h, D) for n, h in ((B * T, H), (B * M * BLOCK_SIZE, HKV), (B * M * BLOCK_SIZE, HKV)))
        k, v = (x.unflatten(-3, (B * M, BLOCK_SIZE)) for x in (k, v))
        if vllm:
            k, v = torch.func.vmap(to_vllm_layout)(k, v) if copies else to_vllm_layout(k, v)

        def oracle(q, k, v, *_):
            k, v = (x.double() for x in (from_vllm_layout(k, v) if vllm else (k, v)))
            k, v = (x[tables.long()].flatten(1, 2)[:, :S].transpose(1, 2) for x in (k, v))
            return (
                attention(q.double().view(B, T, H, D).transpose(1, 2), k, v, causal=True).transpose(1, 2).flatten(0, 1)
            )

        return Call(lambda *tensors: public(*tensors, **options), [q, k, v, tables, lens, *ends], oracle)
    q, k, v = random(B, H, T, D), random(B, HKV, S, D), random(B, HKV, S, D)
    return Call(lambda q, k, v: attend(q, k, v, causal=True), [q, k, v], _oracle)


def _oracle(q, k, v):
    return attention(q.double(), k.double(), v.double(), causal=True)


def assert_close(found, right):
    torch.testing.assert_close(found.double(), right.double(), rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------ axes


def in_autocast(call, dtype):
    plain = call.function(*call.tensors)
    with torch.autocast(call.tensors[0].device.type, dtype=dtype):
        found = call.function(*call.tensors)
    assert found.dtype == plain.dtype
    assert found.equal(plain)


def backward_in_autocast(call):
    def gradients(enabled):
        leaves = [x.clone().requires_grad_() for x in call.floats]
        with torch.autocast(call.tensors[0].device.type, dtype=torch.bfloat16, enabled=enabled):
            out = call.of_floats(call.function)(*leaves)
            return torch.autograd.grad(out.square().sum(), leaves)

    for found, right in zip(gradients(True), gradients(False), strict=True):
        assert found.equal(right)


def backward(call, around=lambda function: function):
    leaves = [x.clone().requires_grad_() for x in call.floats]
    found = torch.autograd.grad(around(call.of_floats(call.function))(*leaves).square().sum(), leaves)
    doubles = [x.double().requires_grad_() for x in call.floats]
    for one, right in zip(found, torch.autograd.grad(call.oracle(*doubles).square().sum(), doubles), strict=True):
        assert_close(one, right)


def checkpointed(call):
    backward(call, lambda function: lambda *floats: checkpoint(function, *floats, use_reentrant=False))


def vectorised_jacobian(call):
    def small(q):
        return call.of_floats(call.function)(q, *call.tensors[1:3]).flatten()[:3]

    found = torch.autograd.functional.jacobian(small, call.tensors[0], vectorize=True)
    right = torch.autograd.functional.jacobian(
        lambda q: call.oracle(q, *(x.double() for x in call.tensors[1:3])).flatten()[:3], call.tensors[0].double()
    )
    assert_close(found, right)


def jvp(call):
    _, found = torch.func.jvp(call.of_floats(call.function), tuple(call.floats), tuple(call.floats))
    doubles = tuple(x.double() for x in call.floats)
    assert_close(found, torch.func.jvp(call.oracle, doubles, doubles)[1])


def jvp_of_vmap(call):
    """Forward mode outside of vmap: the tensors that the function gets do not show a tangent at once."""
    stacked = tuple(x[None] for x in call.floats)
    _, found = torch.func.jvp(torch.func.vmap(call.of_floats(call.function)), stacked, stacked)
    doubles = tuple(x.double() for x in call.floats)
    assert_close(found[0], torch.func.jvp(call.oracle, doubles, doubles)[1])


def dual_tensors(call):
    with torch.autograd.forward_ad.dual_level():
        duals = [torch.autograd.forward_ad.make_dual(x, x) for x in call.floats]
        out = call.of_floats(call.function)(*duals)
        found = torch.autograd.forward_ad.unpack_dual(out).tangent
    doubles = tuple(x.double() for x in call.floats)
    assert found is not None, "the tangent is missing"
    assert_close(found, torch.func.jvp(call.oracle, doubles, doubles)[1])


def func_grad(call):
    found = torch.func.grad(lambda v: call.of_floats(call.function)(*call.tensors[:2], v).square().sum())(
        call.tensors[2]
    )
    doubles = [x.double() for x in call.floats]
    assert_close(found, torch.func.grad(lambda v: call.oracle(*doubles[:2], v).square().sum())(doubles[2]))


def grad_of_vmap(call):
    stacked = [x[None] for x in call.floats]
    mapped = torch.func.vmap(call.of_floats(call.function))
    found = torch.func.grad(lambda v: mapped(*stacked[:2], v).square().sum())(stacked[2])
    doubles = [x.double() for x in call.floats]
    assert_close(found[0], torch.func.grad(lambda v: call.oracle(*doubles[:2], v).square().sum())(doubles[2]))


def vmap(call, batch):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")
        found = torch.func.vmap(batch.of_floats(batch.function))(*batch.floats)
    for i in range(len(found)):
        assert_close(found[i], batch.oracle(*(x[i] for x in batch.floats)))


def vmap_of_one(call):
    """One of q, k and v in a batch."""
    q, k, v = call.floats
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")
        found = torch.func.vmap(call.of_floats(call.function), (None, None, 0))(q, k, torch.stack((v, 2 * v)))
    right = call.oracle(q, k, v)
    assert_close(found, torch.stack((right, 2 * right)))


def fake(call):
    from torch._subclasses.fake_tensor import FakeTensorMode

    real = call.function(*call.tensors)
    with FakeTensorMode() as mode:
        found = call.function(*map(mode.from_tensor, call.tensors))
        assert (found.shape, found.dtype, found.stride()) == (real.shape, real.dtype, real.stride())
    assert call.function(*call.tensors).equal(real)


def traced(call, mode, other):
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(call.function, tracing_mode=mode)(*call.tensors)
    assert call.function(*call.tensors).equal(graph(*call.tensors))
    assert_close(graph(*other.tensors), other.oracle(*other.tensors))


def exported(call, other):
    class Module(torch.nn.Module):
        def forward(self, tensors):
            return call.function(*tensors)

    sizes = [{} for _ in call.tensors]
    if len(call.tensors) == 3:
        keys = torch.export.Dim("keys", min=2, max=1000)
        sizes[1] = sizes[2] = {2: keys}
    else:
        sizes[3] = {1: torch.export.Dim("blocks", min=2, max=1000)}
        sizes[1] = sizes[2] = {0: torch.export.Dim("pool", min=2, max=1000)}
    program = torch.export.export(Module(), (call.tensors,), dynamic_shapes=(sizes,))
    assert_close(program.module()(other.tensors), other.oracle(*other.tensors))


def compiled(call, calls, *, fullgraph):
    """The tensors of several lengths give at most two graphs for each piece that torch.compile makes."""
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    function = torch.compile(lambda *tensors: call.function(*tensors), backend=count, dynamic=True, fullgraph=fullgraph)
    pieces = 0
    for i, each in enumerate(calls):
        assert_close(function(*each.tensors), each.oracle(*each.tensors))
        pieces = pieces or len(graphs)
        assert len(graphs) <= 2 * pieces, f"{len(graphs)} graphs for {i + 1} lengths, {pieces} for the first"


def copied(call, name):
    """The function as an argument of a partial: copies and pickles call the same."""
    attend = FUNCTIONS[name].attend
    for twin in (copy.deepcopy(attend), pickle.load(io.BytesIO(pickle.dumps(attend)))):
        q, k, v = (torch.ones(1, *size, D, device=device_of(name)) for size in ((H, 1), (HKV, 5), (HKV, 5)))
        assert twin(q, k, v).equal(attend(q, k, v))


AXES = {
    "bfloat16 autocast": lambda name: in_autocast(call_of(name), torch.bfloat16),
    "float16 autocast": lambda name: in_autocast(call_of(name), torch.float16),
    "backward in autocast": lambda name: backward_in_autocast(call_of(name)),
    "backward": lambda name: backward(call_of(name)),
    "checkpoint": lambda name: checkpointed(call_of(name)),
    "vectorised jacobian": lambda name: vectorised_jacobian(call_of(name)),
    "jvp": lambda name: jvp(call_of(name)),
    "jvp of vmap": lambda name: jvp_of_vmap(call_of(name)),
    "dual tensors": lambda name: dual_tensors(call_of(name)),
    "torch.func.grad": lambda name: func_grad(call_of(name)),
    "grad of vmap": lambda name: grad_of_vmap(call_of(name)),
    "vmap": lambda name: vmap(call_of(name), call_of(name, copies=2)),
    "vmap of v": lambda name: vmap_of_one(call_of(name)),
    "fake tensors": lambda name: fake(call_of(name)),
    "make_fx": lambda name: traced(call_of(name), "real", call_of(name)),
    "make_fx, fake": lambda name: traced(call_of(name), "fake", call_of(name)),
    "make_fx, symbolic": lambda name: traced(call_of(name), "symbolic", call_of(name, 96)),
    "copies": lambda name: copied(call_of(name), name),
    "export": lambda name: exported(call_of(name), call_of(name, 96)),
    "compile": lambda name: compiled(call_of(name), [call_of(name, S) for S in LENGTHS], fullgraph=False),
    "compile, fullgraph": lambda name: compiled(call_of(name), [call_of(name, S) for S in LENGTHS], fullgraph=True),
}
LENGTHS = (80, 112, 144, 176)  # no size of a tensor is equal to another, because torch.compile would guard that
COMPILES = ("export", "compile", "compile, fullgraph")  # without jaxtyping's checks, which torch.compile cannot trace


def cell(name, axis):
    """Return "right" or "refused". Other errors of the call are raised."""
    try:
        AXES[axis](name)
    except AssertionError:
        raise
    except Exception as error:
        if not is_refusal(error, name):
            raise
        return "refused"
    return "right"


PUBLIC = {
    "naive": "attention", "online": "online_attention", "FlashAttention": "flash_attention_1",
    "FlashAttention-2": "flash_attention_2", "flash": "flash_attention", "decode": "flash_decoding",
    "paged": "paged", "varlen": "paged_attention_varlen", "unified": "unified_max_attention",
    "lazy": "lazy_rescale_attention",
}  # fmt: skip


def is_refusal(error, name):
    """Whether an error names the function, or its backend, and a remedy."""
    text, public = str(error), PUBLIC[name.split()[0]]
    return (public in text or 'backend="' in text) and any(word in text for word in ("use ", "takes it", "pass "))


def main():
    counts, warned = Counter(), warnings.catch_warnings()
    with warned:
        warnings.simplefilter("ignore")
        print(f"{'':22}" + "  ".join(AXES))
        for name in NAMES:
            states = []
            for axis in AXES:
                try:
                    states.append(cell(name, axis))
                except Exception as error:
                    states.append("WRONG" if isinstance(error, AssertionError) else "ERROR")
                    if "-v" in sys.argv:
                        print(f"    {name}, {axis}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            counts.update(states)
            print(f"{name:22}" + "  ".join(f"{s:{len(a)}}" for s, a in zip(states, AXES, strict=True)), flush=True)
    print(", ".join(f"{count} {state}" for state, count in counts.most_common()))


if __name__ == "__main__":
    main()
