"""The promises that all attention functions share, on every backend and with keys in any kind of memory.

The tests of a function itself have its sizes, its options and its backends. Here is what all functions have in common.
"""

import subprocess
import sys

import pytest
import torch
from attention_functions import FUNCTIONS
from attention_transforms import AXES, COMPILES, NAMES, cell
from covering import is_full
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import ROOT, assert_as_accurate_as_naive, assert_results
from pagewise.flash_decoding_plus_plus import flat_gemm
from pagewise.naive_attention import attention
from pagewise.online_softmax import online_softmax

# numpy's, where Triton is interpreted
pytestmark = pytest.mark.filterwarnings("ignore:overflow|invalid value|All-NaN slice:RuntimeWarning")
H, HKV, D = 4, 2, 32
INF = torch.inf
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KERNELS = {name for name, each in FUNCTIONS.items() if name.endswith("triton") or each.cuda}


each_function = pytest.mark.parametrize("name", FUNCTIONS)


def cases(sizes):
    """Each function with all sizes that it takes. Dtypes take turns, but each one is another build of a CUDA kernel."""
    for name, each in FUNCTIONS.items():
        for number, (T, S, causal) in enumerate(size for size in sizes if each.takes(*size)):
            yield name, T, S, causal, DTYPES[0 if each.cuda else number % 3]


def random_qkv(T, S, *, B=2, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(T + 3 * S)
    sizes = ((B, H, T, D), (B, HKV, S, D), (B, HKV, S, D))
    return [torch.randn(size, generator=generator).to(device, dtype) for size in sizes]


def oracle(q, k, v, **options):
    """(out, lse) in float64, and in the dtype of q."""
    exact = attention(q.double(), k.double(), v.double(), **options, return_lse=True)
    return exact, attention(q, k, v, **options, return_lse=True)


def assert_right(name, found, q, k, v, **options):
    exact, naive = oracle(q, k, v, **options)
    if FUNCTIONS[name].has_lse:
        assert_results(found, exact, naive)
    else:
        assert_as_accurate_as_naive(found[0], exact[0], naive[0])
        assert (found[0][exact[1] == -INF] == 0).all()


# T, S, causal: a query sees no key where T > S and the mask is causal
SIZES = [(1, 1, False), (5, 67, True), (7, 3, True), (1, 130, False)]


@pytest.mark.parametrize(("name", "T", "S", "causal", "dtype"), list(cases(SIZES)))
def test_is_attention_and_changes_nothing_else(name, T, S, causal, dtype, kernel_device, canaries):
    """A second call, without lse, gives the same bits. Neither an input nor memory around a result is written."""
    inputs = random_qkv(T, S, dtype=dtype, device=kernel_device)
    before = [x.clone() for x in inputs]
    attend = FUNCTIONS[name].attend
    out, lse = attend(*inputs, causal=causal, return_lse=True)
    assert_right(name, (out, lse), *inputs, causal=causal)
    alone = attend(*inputs, causal=causal)
    assert isinstance(alone, torch.Tensor)
    if name == "varlen torch":  # it takes another way without lse
        assert_as_accurate_as_naive(alone, *(x[0] for x in oracle(*inputs, causal=causal)))
    else:
        assert alone.equal(out)
    assert all(x.equal(old) for x, old in zip(inputs, before, strict=True)), "an input was written"
    assert out.untyped_storage().data_ptr() not in {x.untyped_storage().data_ptr() for x in inputs}
    canaries()


@each_function
def test_a_scale_may_have_any_sign_and_size(name, kernel_device):
    """With scores of ±10⁵ one key has nearly all the weight. In a single row, luck in rounding would decide.

    T is below, equal to and above S, and lse is asked for or not: each may be another way through the function.
    """
    function, kernel = FUNCTIONS[name], name in KERNELS
    for T, S, scales in ((1, 40, (-0.7, 0.0, None)), (3, 3, (-0.3, 0.0)), (3, 18, (-0.3,)), (5, 3, (0.0,))):
        causal = T > 1
        if not function.takes(T, S, causal) or (kernel and T == 5):
            continue
        q, k, v = random_qkv(T, S, B=4 if T == 1 else 1, device=kernel_device)
        largest = 1e5 / (q.view(len(q), HKV, -1, D) @ k.mT).abs().max().item()
        for scale in (largest if scale is None else scale for scale in scales[: 1 if kernel and T > 1 else None]):
            out, lse = function.attend(q, k, v, scale=scale, causal=causal, return_lse=True)
            assert_right(name, (out, lse), q, k, v, scale=scale, causal=causal)
            if not kernel:  # a kernel computes lse anyway
                alone = function.attend(q, k, v, scale=scale, causal=causal)
                torch.testing.assert_close(alone, out, rtol=1e-4, atol=1e-5)


@each_function
def test_autocast_does_not_round_scores(name, kernel_device):
    """Scores of ±360 000 do not fit float16, and bfloat16 has no digits for their difference."""
    q = torch.full((1, H, 1, D), 300.0, device=kernel_device)
    k = torch.tensor([300.0, 299.9, -300.0], device=kernel_device)[:, None].expand(1, HKV, 3, D) / D
    v = torch.tensor([1.0, 2.0, 3.0], device=kernel_device)[:, None].expand(1, HKV, 3, D).contiguous()
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast(kernel_device.type, dtype=dtype):
            out, lse = FUNCTIONS[name].attend(q, k, v, scale=4.0, return_lse=True)
        assert out.dtype == torch.float32
        assert out.equal(torch.ones_like(out))
        assert lse is None or lse.dtype == torch.float32
        assert lse is None or (lse / 360_000 - 1).abs().max() < 1e-6


@each_function
def test_scores_may_be_far_below_any_stand_in_for_minus_infinity(name, kernel_device):
    q, k, v = random_qkv(1, 40, device=kernel_device)
    q, k = q.abs(), -k.abs()
    found = FUNCTIONS[name].attend(q, k, v, scale=1e6, return_lse=True)
    assert_right(name, found, q, k, v, scale=1e6)


@each_function
@pytest.mark.parametrize(("B", "T", "S"), [(2, 1, 0), (0, 1, 5), (2, 0, 5), (0, 0, 0), (2, 4, 0)])
def test_nothing_to_see(name, B, T, S, kernel_device):
    """Without keys out is 0 and lse is −∞, and so are all gradients."""
    function = FUNCTIONS[name]
    q, k, v = (x.requires_grad_(function.differentiable) for x in random_qkv(T, S, B=B, device=kernel_device))
    if not function.takes(T, S, causal=False):
        return
    out, lse = function.attend(q, k, v, return_lse=True)
    assert out.equal(torch.zeros_like(q))
    assert not function.has_lse or lse.equal(torch.full((B, H, T), -INF, device=kernel_device))
    if function.differentiable and name != "online":  # without keys, its result depends on no input
        for gradient, x in zip(torch.autograd.grad(out.sum(), (q, k, v)), (q, k, v), strict=True):
            assert gradient.equal(torch.zeros_like(x))


def beside_nan(x, dim):
    """x with as many elements again after it in this dimension, all of which are NaN."""
    return torch.cat((x, torch.full_like(x, torch.nan)), dim).narrow(dim, 0, x.shape[dim])


def every_second(x):
    return torch.stack((x, torch.full_like(x, torch.nan)), 3).flatten(2, 3)[:, :, ::2]


LAYOUTS = {  # of q, k and v
    "tokens first": [lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)] * 3,
    "fused, every second, one for all": [
        lambda x: beside_nan(x, 1), every_second, lambda x: x[:, :1].expand_as(x),
    ],
    "wide rows, one for all, fused": [
        lambda x: beside_nan(x, 3), lambda x: x[:, :1].expand_as(x), lambda x: beside_nan(x, 1),
    ],
    "transposed": [lambda x: x.mT.contiguous().mT] * 3,
}  # fmt: skip
# Other kernels read the strides in the same way, and those in Triton refuse q whose last dimension is not contiguous.
IN_EVERY_LAYOUT = ["naive", "online", "FlashAttention", "FlashAttention-2", "flash torch", "flash triton", "flash cuda"]


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, layout) for layout in LAYOUTS for name in FUNCTIONS if "every second" in layout or name in IN_EVERY_LAYOUT],
)
def test_inputs_may_have_any_strides(name, layout, kernel_device):
    """The gradient of a sum has strides of 0."""
    function, T = FUNCTIONS[name], 1 if FUNCTIONS[name].one_query else 3
    results = []
    qkv = random_qkv(T, 33, device=kernel_device)
    inputs = [lay(x) for lay, x in zip(LAYOUTS[layout], qkv, strict=True)]
    for strided in (inputs, [x.clone(memory_format=torch.contiguous_format) for x in inputs]):
        strided = [x.detach().requires_grad_(function.differentiable) for x in strided]
        found = function.attend(*strided, causal=True, return_lse=True)
        found += torch.autograd.grad(found[0].sum(), strided) if function.differentiable else ()
        results.append([x for x in found if x is not None])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


@each_function
def test_what_is_not_a_number_stays_in_its_row(name, kernel_device):
    """NaN in a query reaches only that row of out. NaN in a value reaches only that column of its KV head."""
    q, k, v = random_qkv(1, 37, device=kernel_device)
    attend = FUNCTIONS[name].attend
    right = attend(q, k, v)
    q[1, 3, 0, 3] = torch.nan
    out = attend(q, k, v)
    assert out[1, 3].isnan().all()
    out[1, 3] = right[1, 3]
    assert out.equal(right)
    q[1, 3, 0, 3] = 0
    v[0, 1, 9, 4] = torch.nan
    right[1, 3] = attend(q, k, v)[1, 3]
    right[0, H // HKV :, :, 4] = torch.nan
    torch.testing.assert_close(attend(q, k, v), right, rtol=1e-5, atol=1e-6, equal_nan=True)


@each_function
def test_products_of_minus_infinity_are_left_out(name, kernel_device):
    """A product that overflows to −∞ weighs nothing beside others, and alone it gives 0 and −∞."""
    q, k, v = random_qkv(1, 50, device=kernel_device)
    q[..., 0], k[..., 0] = 1e20, -1e20
    k[0, :, 40:, 0] = 0
    attend = FUNCTIONS[name].attend
    out, lse = attend(q, k, v, return_lse=True)
    torch.testing.assert_close(out[:1], attention(q[:1], k[:1, :, 40:], v[:1, :, 40:]), rtol=1e-4, atol=1e-5)
    assert out[1].equal(torch.zeros_like(out[1]))
    assert lse is None or (lse[1] == -INF).all()


# A length is checked where the check is free or asked for. The kernels do not trust an unchecked length.
UNCHECKED = ["decode triton", "decode split triton", "decode shared triton", "paged triton", "paged split triton",
             "paged v1", "paged v2", "paged grouped", "varlen triton"]  # fmt: skip


@pytest.mark.parametrize("name", UNCHECKED)
def test_an_impossible_length_gives_nan_and_spoils_no_other(name, kernel_device):
    q, k, v = random_qkv(1, 200, B=5, device=kernel_device)
    options = {"check": False, "return_lse": True} | ({"max_seq_len": 200} if FUNCTIONS[name].cuda else {})

    def attend(*lens):
        seq_lens = torch.tensor(lens, dtype=torch.int32, device=kernel_device)
        return FUNCTIONS[name].attend(q, k, v, seq_lens=seq_lens, **options)

    for found, right in zip(attend(-1, 1, 90, 10**6, 200), attend(200, 1, 90, 3, 200), strict=True):
        assert found[[0, 3]].isnan().all()
        torch.testing.assert_close(found[[1, 2, 4]], right[[1, 2, 4]], rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------ gradients


each_differentiable = pytest.mark.parametrize("name", [name for name, each in FUNCTIONS.items() if each.differentiable])


@each_differentiable
def test_a_loss_of_lse_alone_and_a_second_derivative(name, kernel_device):
    """Naive and online attention consist of torch's own operations. The others are differentiable once."""
    q, k, v = (x.requires_grad_() for x in random_qkv(9, 13, device=kernel_device))
    (dq,) = torch.autograd.grad(FUNCTIONS[name].attend(q, k, v, return_lse=True)[1].sum(), q, create_graph=True)
    (right,) = torch.autograd.grad(attention(q, k, v, return_lse=True)[1].sum(), q)
    torch.testing.assert_close(dq, right, rtol=1e-4, atol=1e-5)
    if name not in ("naive", "online"):
        with pytest.raises(RuntimeError, match=r"differentiable once.*naive_attention"):
            dq.sum().backward()


@each_differentiable
def test_a_row_that_sees_nothing_has_no_gradient(name, kernel_device):
    """The backward of FlashAttention gives none even if the gradient of its lse, which is −∞, is not a number."""
    q, k, v = (x.requires_grad_() for x in random_qkv(9, 5, device=kernel_device))
    out, lse = FUNCTIONS[name].attend(q, k, v, causal=True, return_lse=True)
    sees = lse > -INF
    assert not sees[:, :, :4].any()
    of_nothing = 0.0 if name in ("naive", "online") else torch.nan
    weights = torch.where(sees, lse.detach().cos(), of_nothing)
    gradients = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), weights))
    expected = attention(q, k, v, causal=True, return_lse=True)
    loss = expected[0].sum() + (torch.where(sees, expected[1] * weights, 0.0)).sum()
    for got, right in zip(gradients, torch.autograd.grad(loss, (q, k, v)), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=2e-5)
    assert (gradients[0][:, :, :4] == 0).all()


# ------------------------------------------------------------------------------------------ ops


def copy_of(x):
    """Return x without NaN, because opcheck compares inputs before and after."""
    return x.detach().nan_to_num().requires_grad_(x.requires_grad)


class Calls(TorchDispatchMode):
    """The calls of this package's ops: (op, copies of its arguments)."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "pagewise":
            self.seen.append((op, [copy_of(x) if isinstance(x, torch.Tensor) else x for x in args]))
        return op(*args, **(kwargs or {}))


SLOPES = {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0] * (H // 4))}
SHAPED = SLOPES | {"window": 9, "softcap": 2.0}
DROPPED = SHAPED | {"causal": True, "dropout_p": 0.2, "dropout_seed": 5}
MASKED = DROPPED | {"attn_mask": torch.arange(60).view(3, 20) % 5 > 0}
OPS = [  # a function, options, and the op that it calls with them
    ("flash torch", MASKED, "flash_attention"),
    ("flash triton", MASKED, "flash_attention"),
    ("flash packed torch", DROPPED, "flash_attention"),
    ("flash packed triton", {}, "flash_attention"),
    ("flash cuda", {"causal": True}, "flash_attention_cuda"),
    ("decode split triton", {}, "decode_attention"),
    ("decode shared triton", SHAPED | {"causal": True}, "decode_attention"),
    ("paged triton", {}, "decode_attention"),
    ("paged split triton", SHAPED, "decode_attention"),
    ("paged v1", {}, "paged_attention_cuda"),
    ("paged v2", SLOPES, "paged_attention_cuda"),
    ("paged grouped", SLOPES, "paged_attention_cuda"),
    ("varlen triton", {}, "decode_attention"),
    ("varlen triton", SHAPED | {"num_splits": 2}, "decode_attention"),
    ("unified triton", {"causal": True}, "unified_max_attention"),
    ("lazy triton", {"causal": True}, "lazy_rescale_attention"),
]
# A call without options gives the same op fewer tensors.
OPS = [each for each in OPS if each[1] or is_full()]


def opcheck(calls, op):
    """Check the op in the one call that was seen."""
    ((called, arguments),) = calls.seen
    assert called.name() == f"pagewise::{op}"
    torch.library.opcheck(called, arguments)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options", "op"), OPS)
def test_op_is_registered_soundly(name, options, op, kernel_device):
    function = FUNCTIONS[name]
    options = {key: x.to(kernel_device) if isinstance(x, torch.Tensor) else x for key, x in options.items()}
    qkv = random_qkv(1 if function.one_query else 3, 20, device=kernel_device)
    with Calls() as calls:
        function.attend(*(x.requires_grad_(function.differentiable) for x in qkv), **options)
    opcheck(calls, op)


OTHER_OPS = {
    "online_softmax": lambda x: online_softmax(x.mT, 4, backend="triton"),
    "flat_gemm": lambda x: flat_gemm(x.detach(), x.detach()),
}
OTHER_INPUTS = [(1, torch.float16), (11, torch.float16), (11, torch.float32)]


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "dtype"), OTHER_INPUTS if is_full() else OTHER_INPUTS[::2])
@pytest.mark.parametrize("op", OTHER_OPS)
def test_other_op_is_registered_soundly(op, rows, dtype, kernel_device):
    x = random_qkv(rows, 20, dtype=dtype, device=kernel_device)[0][0, 0].requires_grad_()
    with Calls() as calls:
        OTHER_OPS[op](x)
    opcheck(calls, op)


# ------------------------------------------------------------------------------------------ transforms

# Cells of `attention_transforms` that are refused. All others are right.
PAPERS = {"FlashAttention", "FlashAttention-2"}
FLASH = {"flash torch", "flash triton", "flash packed torch", "flash packed triton", *PAPERS}
READ_VALUES = {"paged torch", "paged split torch", "varlen torch"}
LOOPS = {*READ_VALUES, "online", "decode split torch", "decode sized torch", "unified torch", "lazy torch"}
WITHOUT_BACKWARD = (KERNELS - FLASH - {"decode shared triton"}) | {"unified torch"}
REFUSES = {
    **dict.fromkeys(("backward in autocast", "backward", "checkpoint"), WITHOUT_BACKWARD),
    "vectorised jacobian": WITHOUT_BACKWARD,
    **dict.fromkeys(("jvp", "jvp of vmap", "dual tensors"), WITHOUT_BACKWARD | FLASH),
    **dict.fromkeys(("torch.func.grad", "grad of vmap"), WITHOUT_BACKWARD | FLASH),
    **dict.fromkeys(("fake tensors", "make_fx", "make_fx, fake"), READ_VALUES),
    **dict.fromkeys(("make_fx, symbolic", "export", "compile, fullgraph"), LOOPS),
}
CELLS = [(name, axis) for axis in AXES for name in NAMES]
# Functions that differ in how they meet a transform. Their siblings, such as other splits, are for the full run.
DIFFERENT = {"naive", "online", "FlashAttention", "flash torch", "flash triton", "decode sized torch", "paged torch",
             "decode split triton", "paged v2", "varlen torch", "varlen triton", "unified torch", "unified triton",
             "lazy torch"}  # fmt: skip


def is_quick(name, axis):
    """A refusal takes no time. Of the others, those that compile a graph or run an interpreted kernel are a few."""
    return is_full() or name in REFUSES.get(axis, ()) or (name in DIFFERENT and (axis in EVERYWHERE or name in PLAIN))


PLAIN = {name for name in NAMES if name not in KERNELS}
EVERYWHERE = ("bfloat16 autocast", "backward in autocast", "vmap of v", "fake tensors", "copies")


@pytest.mark.parametrize(("name", "axis"), [cell for cell in CELLS if cell[1] not in COMPILES and is_quick(*cell)])
@pytest.mark.usefixtures("shapes_unchecked")
def test_a_transform_is_right_or_refused_with_a_remedy(name, axis):
    assert cell(name, axis) == ("refused" if name in REFUSES.get(axis, ()) else "right")


# ------------------------------------------------------------------------------------------ torch.compile

GRAPHS = {  # functions whose graphs differ most
    "compile": ("online",),
    "compile, fullgraph": ("FlashAttention", "unified triton"),
    "export": ("flash packed triton", "decode sized triton"),
}


COMPILED = """
import sys
import torch
import pagewise
from pagewise.flash_attention import flash_attention, flash_attention_varlen
from pagewise.flash_decoding import flash_decoding
from pagewise.paged_attention import paged_attention
from pagewise.paged_attention_varlen import paged_attention_varlen

device = "cuda" if torch.cuda.is_available() else "cpu"

def assert_compiles(function, *inputs, grad=False):
    results = []
    for call in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        leaves = [x.clone().requires_grad_() if grad and isinstance(x, torch.Tensor) else x for x in inputs]
        torch.manual_seed(3)
        value = call(*leaves)
        gradients = torch.autograd.grad(value, [x for x in leaves if isinstance(x, torch.Tensor)]) if grad else ()
        results.append((*(value if isinstance(value, tuple) else (value,)), *gradients))
    torch.testing.assert_close(*results)

q, k, v = (torch.randn(1, n, 20, 16, device=device) for n in (4, 2, 2))
sums = torch.tensor([0, 5, 20], dtype=torch.int32, device=device)
options = {"causal": True, "window": 7, "softcap": 2.0, "alibi_slopes": torch.rand(4, device=device), "dropout_p": 0.2}
mask = torch.rand(20, 20, device=device) < 0.8

def dense(q, k, v, backend, seed):
    more = {"attn_mask": mask, "dropout_seed": seed, "return_lse": True, "backend": backend}
    out, lse = flash_attention(q * 2, k, v, **options, **more)
    return (out * 3).sum() + torch.where(lse.isinf(), 0.0, lse).sum()

def packed(q, k, v, backend):
    rows = (x[0].transpose(0, 1) for x in (q, k, v))
    return flash_attention_varlen(*rows, sums, sums, **options, dropout_seed=5, backend=backend).square().sum()

of_every_backend = sys.argv[1:] == ["full"]
if of_every_backend:
    assert_compiles(dense, q, k, v, "torch", 5, grad=True)
    assert_compiles(packed, q, k, v, "triton", grad=True)
assert_compiles(dense, q, k, v, "triton", None, grad=True)
assert_compiles(packed, q, k, v, "torch", grad=True)

q, k, v = (torch.randn(2, h, n, 16, device=device) for h, n in ((4, 2), (2, 70), (2, 70)))
lens = torch.tensor([70, 5], dtype=torch.int32, device=device)
caches = torch.randn(2, 8, 16, 2, 16, device=device)
tables = torch.randint(8, (2, 5), dtype=torch.int32, device=device)
ends = torch.arange(3, dtype=torch.int32, device=device)

def decode(q, k, v, lens):
    options = {"num_splits": 2, "window": 30, "return_lse": True, "backend": "triton"}
    results = flash_decoding(q * 2, k, v, seq_lens=lens, causal=True, **options)
    results += paged_attention(q[:, :, 0], caches[0], caches[1], tables, lens, **options)
    return results + paged_attention_varlen(q[:, :, 0], caches[0], caches[1], tables, lens, ends, **options)

assert_compiles(decode, q, k, v, lens)
print("equal")
"""


ASKED = [(name, axis) for axis in COMPILES for name in (NAMES if is_full() else GRAPHS[axis])]


@pytest.fixture(scope="module")
def compiled():
    """Run COMPILED and then the cells of ASKED, in a process of their own. Return what it prints and its errors.

    torch.compile does not see through the shape checks of the tests.
    """
    cells = f"""
import warnings
warnings.resetwarnings()
sys.path.insert(0, "tests")
from attention_transforms import cell
print([cell(*each) for each in {ASKED}])
"""
    of_triton_3_6 = "ignore:Conversion of an array with ndim:DeprecationWarning"  # its interpreter, of numpy
    command = [sys.executable, "-W", "error", "-W", of_triton_3_6, "-c", COMPILED + cells, *["full"] * is_full()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.splitlines(), done.stderr[-2000:]


@pytest.mark.slow
def test_compiles_without_a_break(compiled):
    """By default nothing looks at lengths and tables under torch.compile, also on the CPU."""
    lines, errors = compiled
    assert lines[:1] == ["equal"], errors


@pytest.mark.slow
def test_one_graph_serves_all_lengths(compiled):
    lines, errors = compiled
    assert lines[1:] == [str(["refused" if name in REFUSES.get(axis, ()) else "right" for name, axis in ASKED])], errors


# ------------------------------------------------------------------------------------------ refusals

Q, K = torch.zeros(2, 4, 3, 8), torch.zeros(2, 2, 5, 8)
REFUSED = {
    "q of rank 3": ({"q": Q[0]}, ValueError, "q must have 4 dimensions"),
    "no tensor": ({"q": [1.0]}, TypeError, "q must be a torch.Tensor.* got list"),
    "dtype of q": ({"q": Q.double()}, TypeError, "k must have the dtype of q: float64, got float32"),
    "integers": ({"q": Q.int()}, TypeError, "q must be .*int32"),
    "device": ({"k": K.to("meta")}, ValueError, "k must have the device of q"),
    "keys and values": ({"v": K[:, :, 1:]}, ValueError, "v must be .*5, 8.*got .*4, 8"),
    "heads": ({"q": Q[:, :3]}, ValueError, "H must be a multiple of Hkv"),
    "scale": ({"scale": torch.nan}, ValueError, "scale must be"),
    "causal": ({"causal": 1}, TypeError, "causal must be True or False"),
    "backend": ({"backend": "numpy"}, ValueError, "backend must be"),
    "window alone": ({"window": 2}, ValueError, "window = 2 needs causal=True"),
    "window": ({"window": 0, "causal": True}, ValueError, "window must be at least 1"),
    "softcap": ({"softcap": -1.0}, ValueError, "softcap must be"),
    "slopes": ({"alibi_slopes": torch.ones(2)}, ValueError, "alibi_slopes must be"),
}
WITHOUT_BACKEND = ["naive", "online", "FlashAttention", "FlashAttention-2"]
WITHOUT_OPTIONS = ["lazy torch", "unified torch"]
DENSE = [*WITHOUT_BACKEND, "flash torch", "decode torch", *WITHOUT_OPTIONS]
WITHOUT = dict.fromkeys(("window alone", "window", "softcap", "slopes"), tuple(WITHOUT_OPTIONS))
WITHOUT["backend"] = tuple(WITHOUT_BACKEND)


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for case in REFUSED for name in DENSE if name not in WITHOUT.get(case, ())]
)
def test_bad_input_is_refused_by_name(name, case, shapes_unchecked):
    change, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        FUNCTIONS[name].attend(**({"q": Q, "k": K, "v": K} | change))
