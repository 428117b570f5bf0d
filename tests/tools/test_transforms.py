"""What torch's transforms want of a tensor: derivatives, values, graphs. Which function has what is in the contract."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from pagewise.flash_attention import flash_attention, flash_attention_2, flash_attention_varlen
from pagewise.flash_decoding import flash_decoding
from pagewise.flash_decoding_plus_plus import Dataflow, flat_gemm, gemv
from pagewise.flash_decoding_plus_plus.dataflow import device_label
from pagewise.naive_attention import attention
from pagewise.tools.products import linear, product
from pagewise.tools.transforms import derivative_of, has_values, outside_graphs

X = torch.arange(6.0).view(2, 3)
SLOPES = torch.tensor([0.5, 0.25])
ATTEND = {
    "naive": attention,
    "flash torch": flash_attention,
    "flash triton": lambda *qkv, **options: flash_attention(*qkv, **options, backend="triton"),
    "decode": lambda *qkv, **options: flash_decoding(*qkv, **options, backend="triton"),
    "FlashAttention-2": lambda *qkv, **options: flash_attention_2(*qkv, **options, tile_rows=2, tile_cols=3),
}


def seen(function, *inputs, transform):
    """What `function` returned inside the transform, where its argument is the transformed tensor."""
    found = []

    def call(x):
        found.append(function(x))
        return x.sum()

    transform(call, *inputs)
    return found[0]


TRANSFORMS = {
    "jvp": (lambda f, x: torch.func.jvp(f, (x,), (x,)), "forward mode"),
    "jvp of vmap": (lambda f, x: torch.func.jvp(torch.func.vmap(f), (x,), (x,)), "forward mode"),
    "vmap of jvp": (lambda f, x: torch.func.vmap(lambda y: torch.func.jvp(f, (y,), (y,)))(x), "forward mode"),
    "jacfwd": (lambda f, x: torch.func.jacfwd(f)(x), "forward mode"),
    "grad": (lambda f, x: torch.func.grad(f)(x), "torch.func"),
    "vjp": (lambda f, x: torch.func.vjp(f, x), "torch.func"),
    "grad of vmap": (lambda f, x: torch.func.grad(lambda y: torch.func.vmap(f)(y).sum())(x), "torch.func"),
    "vmap": (lambda f, x: torch.func.vmap(f)(x), None),
    "no_grad in grad": (lambda f, x: torch.func.grad(lambda y: torch.no_grad()(f)(y) + y.sum())(x), None),
    "requires_grad": (lambda f, x: f(x.clone().requires_grad_()), "backward"),
    "nothing": (lambda f, x: f(x), None),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_wanted_derivative_is_found(name):
    transform, wanted = TRANSFORMS[name]
    assert seen(derivative_of, X, transform=transform) == wanted
    assert seen(lambda x: derivative_of(None, torch.ones(1), x), X, transform=transform) == wanted


def test_a_dual_tensor_wants_forward_mode_and_its_tangent_can_be_batched():
    with forward_ad.dual_level():
        assert derivative_of(forward_ad.make_dual(X, X)) == "forward mode"
        assert derivative_of(X) is None
    a, b = X.double().requires_grad_(), torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        product, (a, b), check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    assert torch.autograd.gradgradcheck(product, (a, b))


@pytest.mark.parametrize("name", ["naive", "decode in torch"])
@pytest.mark.usefixtures("shapes_unchecked")
def test_second_derivatives_agree_in_every_order_of_modes(name):
    """Forward over forward, forward over reverse, and the reverse: of q alone, and of q and k."""
    call = attention if name == "naive" else lambda *qkv: flash_decoding(*qkv, backend="torch")
    q, k, v = (torch.randn(1, 1, n, 4, dtype=torch.float64) for n in (2, 3, 3))

    def loss(x):
        return call(x, k * x.sum(), v).square().sum()

    right = torch.func.hessian(loss)(q)
    torch.testing.assert_close(torch.func.jacfwd(torch.func.jacfwd(loss))(q), right)
    torch.testing.assert_close(torch.func.jacrev(torch.func.jacfwd(loss))(q), right)
    torch.testing.assert_close(torch.func.jacrev(torch.func.jacrev(loss))(q), right)
    x = torch.tensor([[3.0]], dtype=torch.float64)
    cube = torch.func.jacfwd(torch.func.jacfwd(lambda x: product(product(x, x), x).sum()))(x)
    assert cube.item() == 18


@pytest.mark.usefixtures("shapes_unchecked")
def test_a_derivative_of_slopes_is_right_or_refused():
    q, k, v = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    for name in ("flash torch", "flash triton", "FlashAttention-2"):
        with pytest.raises(ValueError, match=r"alibi_slopes must not require a gradient.*naive_attention"):
            torch.func.jvp(lambda slopes, name=name: ATTEND[name](q, k, v, alibi_slopes=slopes), (SLOPES,), (SLOPES,))
        with pytest.raises(ValueError, match="alibi_slopes must not require a gradient"):
            torch.func.vmap(lambda q, slopes, name=name: ATTEND[name](q, k, v, alibi_slopes=slopes))(
                q[None], SLOPES[None].clone().requires_grad_()
            )


def test_traced_fake_and_batched_tensors_have_no_values():
    assert has_values(X, None)
    assert not seen(has_values, X, transform=lambda f, x: torch.func.vmap(f)(x))
    with FakeTensorMode() as mode:
        inside = mode.from_tensor(X)
        assert not has_values(inside)
    assert not has_values(inside)
    assert has_values(X)
    compiled = torch.fx.experimental.proxy_tensor.make_fx(lambda x: x * has_values(x))(X)
    assert compiled(X).equal(torch.zeros_like(X))


@pytest.mark.parametrize("name", ATTEND)
@pytest.mark.usefixtures("shapes_unchecked")
def test_slopes_may_be_batched_or_fake(name):
    """Their numbers are looked at only where they have some."""
    q, k, v = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    several = torch.stack((SLOPES, 2 * SLOPES))
    if name != "FlashAttention-2":  # refused, because q, k and v are not in the batch
        found = torch.func.vmap(lambda slopes: ATTEND[name](q, k, v, alibi_slopes=slopes))(several)
        for out, slopes in zip(found, several, strict=True):
            torch.testing.assert_close(out, attention(q, k, v, alibi_slopes=slopes))
    with FakeTensorMode() as mode:
        out = ATTEND[name](*map(mode.from_tensor, (q, k, v)), alibi_slopes=mode.from_tensor(SLOPES))
    assert out.shape == q.shape
    with pytest.raises(ValueError, match="alibi_slopes must be finite"):
        ATTEND[name](q, k, v, alibi_slopes=SLOPES / 0)


def packed(x):
    sums = torch.tensor([0, 3], dtype=torch.int32)
    return flash_attention_varlen(x.view(3, 1, 2), x.view(3, 1, 2), x.view(3, 1, 2), sums, sums)


REFUSALS = {  # products, and functions that the contract knows under another shape
    "gemv": (lambda x: gemv(x[0], X), "gemv has no backward: use torch.nn.functional.linear, or torch.no_grad"),
    "flat_gemm": (lambda x: flat_gemm(x, X), "flat_gemm has no backward: use torch.nn.functional.linear"),
    "weights": (lambda x: flat_gemm(X, x), "flat_gemm has no backward"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_product_without_backward_says_so_at_once(name):
    call, message = REFUSALS[name]
    with pytest.raises(ValueError, match=message):
        call(X.clone().requires_grad_())
    with pytest.raises(ValueError, match="no derivative in forward mode"):
        torch.func.jvp(call, (X,), (X,))
    with torch.no_grad():
        assert call(X.clone().requires_grad_()).shape


@pytest.mark.usefixtures("shapes_unchecked")
def test_packed_sequences_refuse_forward_mode():
    with pytest.raises(ValueError, match=r"flash_attention_varlen has no derivative in forward mode.*naive_attention"):
        torch.func.jvp(packed, (X,), (X,))


def test_a_loop_stays_outside_of_graphs_with_its_own_words():
    @outside_graphs("doubled", remedy="2 * x")
    def doubled(x):
        """Add x to itself."""
        return x + x

    assert doubled.__doc__ == "Add x to itself."
    assert doubled(X).equal(2 * X)
    with pytest.raises(ValueError, match=r"the loops of doubled depend on lengths.*use 2 \* x"):
        torch.fx.experimental.proxy_tensor.make_fx(doubled, tracing_mode="symbolic")(X)


# ------------------------------------------------------------------------------------------------ products


@pytest.fixture
def reading_beyond_rows():
    """The products of a CPU with AMX, which read beyond rows."""
    import reads_beyond_rows

    with reads_beyond_rows.installed():
        yield


def between_nan(x):
    room = torch.full((*x.shape[:-1], x.shape[-1] + 3), torch.nan, dtype=x.dtype)
    room[..., : x.shape[-1]] = x
    return room[..., : x.shape[-1]]


@pytest.mark.usefixtures("reading_beyond_rows")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_memory_between_rows_does_not_reach_a_product(dtype):
    """NaN between rows, and a row of NaN, which is the memory after the row before it."""
    a, b = torch.randn(40, 33).to(dtype), torch.randn(33, 35).to(dtype)
    assert (between_nan(a) @ b).isnan().any(), "the stand-in does not read beyond rows"
    for one, other in ((between_nan(a), b), (a, between_nan(b)), (a, between_nan(b.mT).mT)):
        assert product(one, other).equal(product(a, b))
        assert linear(one, other.mT).equal(linear(a, b.mT))
    a[7] = torch.nan
    for found in (product(a, b), linear(a, b.mT)):
        assert found.isnan().any(dim=1).nonzero().tolist() == [[7]]
        assert found[7].isnan().all()


@pytest.mark.usefixtures("reading_beyond_rows")
@pytest.mark.parametrize("name", ["naive", "flash torch", "decode"])
def test_attention_in_16_bits_ignores_memory_between_rows(name):
    qkv = [torch.randn(1, 2, n, 20).to(torch.bfloat16) for n in (37, 41, 41)]
    right = ATTEND[name](*qkv)
    assert right.isfinite().all()
    assert ATTEND[name](*map(between_nan, qkv)).equal(right)


def test_the_number_of_rows_does_not_choose_the_dtype_under_autocast():
    flow = Dataflow(device_label(torch.device("cpu")), torch.float32, {(5, 7): (3, 9)})
    w = torch.randn(5, 7)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            for rows in (1, 4, 20):
                x = torch.randn(rows, 7)
                found = flow.linear(x, w)
                assert found.dtype == dtype
                assert found.equal(torch.nn.functional.linear(x, w))
    assert flow.linear(torch.randn(1, 7), w).dtype == torch.float32
