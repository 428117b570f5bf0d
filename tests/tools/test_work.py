"""Counting work: every expected number here is worked out by hand from shapes (float32: 4 bytes an element)."""

import pytest
import torch
from torch import ones
from torch.nn.functional import embedding, linear

from pagewise import online_softmax  # noqa: F401  brings its custom op
from pagewise.flash_decoding_plus_plus import flat_gemm
from pagewise.naive_attention import attention
from pagewise.paged_attention import paged_attention
from pagewise.paged_blocks.write import write_kv_cache
from pagewise.tools import work as work_tools
from pagewise.tools.work import Work, count_work, load, on_chip, store, trace_moves


def made(read, written, *, matmul=0, other=0, held=None):
    """Return the work of an operation in bytes and operations. Unless told, it holds what it wrote."""
    return Work(matmul, other, read, written, written if held is None else held)


def write(buffer, rows, new):
    buffer[rows] = new


PICKED, NONE = torch.tensor([7, 0, 7]), torch.zeros(2, 6, dtype=torch.int64)
# An operation, the sizes of its operands, and its work.
OPERATIONS = {
    "a matrix product": (torch.matmul, [(3, 5), (5, 7)], made(4 * (15 + 35), 4 * 21, matmul=2 * 3 * 5 * 7)),
    "a batched matrix product": (torch.matmul, [(2, 3, 5), (2, 5, 7)], made(4 * 2 * 50, 4 * 2 * 21, matmul=2 * 210)),
    "a linear layer reads its bias": (linear, [(3, 5), (7, 5), (7,)], made(4 * (15 + 35 + 7), 4 * 21, matmul=210)),
    "one operation per element": (torch.add, [(10,), (10,)], made(80, 40, other=10)),
    "a broadcast counts its result": (torch.mul, [(10, 1), (1, 20)], made(120, 800, other=200)),
    "exp and tanh are like any other": (lambda x: torch.tanh(torch.exp(x)), [(10,)], made(80, 80, other=20)),
    "a reduction counts what it reads": (lambda x: x.sum(dim=-1), [(10, 6)], made(240, 40, other=60)),
    "two results: values, int64 indices": (lambda x: x.max(dim=-1), [(10, 6)], made(240, 40 + 80, other=60)),
    "a reshape that must copy": (lambda x: x.T.reshape(60), [(10, 6)], made(240, 240)),
    "an expanded tensor is read once": (
        lambda row, x: row.expand(100, 6) + x, [(6,), (100, 6)], made(4 * 6 + 4 * 600, 2400, other=600)
    ),
    "a conversion does no arithmetic": (torch.Tensor.half, [(10,)], made(40, 20)),
    "index reads rows and indices": (lambda x: x[PICKED], [(1000, 6)], made(72 + 24, 72)),
    "index_select reads rows and indices": (lambda x: x.index_select(0, PICKED), [(1000, 6)], made(72 + 24, 72)),
    "embedding reads rows and indices": (lambda x: embedding(PICKED, x), [(1000, 6)], made(72 + 24, 72)),
    "gather reads an element per index": (lambda x: x.gather(0, NONE), [(1000, 6)], made(48 + 96, 48)),
    "a copy writes its slice": (lambda x, new: write(x, slice(5, 7), new), [(1000, 6), (2, 6)], made(48, 48, held=0)),
    "a broadcast copy writes every element": (torch.Tensor.copy_, [(10, 6), (6,)], made(24, 240, held=0)),
    "a fill reads nothing": (torch.Tensor.zero_, [(10, 6)], made(0, 240, held=0)),
    "an update reads what it overwrites": (torch.Tensor.add_, [(10,), (10,)], made(80, 40, other=10, held=0)),
    "a scattered write": (lambda x, new: write(x, PICKED, new), [(1000, 6), (3, 6)], made(72 + 24, 72, held=0)),
    "a row written to many": (lambda x, new: write(x, PICKED, new), [(1000, 6), (6,)], made(24 + 24, 72, held=0)),
    "a concatenation does no arithmetic": (lambda *both: torch.cat(both), [(10, 6), (2, 6)], made(288, 288)),
    "unwritten memory is held": (lambda: torch.empty(10), [], made(0, 0, held=40)),
    "new zeros are written": (lambda: torch.zeros(10), [], made(0, 40)),
    # A tensor that is made after a model reads nothing of it.
    "zeros_like": (torch.zeros_like, [(10,)], made(0, 40)),
    "ones_like": (torch.ones_like, [(10,)], made(0, 40)),
    "full_like": (lambda x: torch.full_like(x, 3.0), [(10,)], made(0, 40)),
    "new_zeros": (lambda x: x.new_zeros(10), [(10,)], made(0, 40)),
    "new_ones": (lambda x: x.new_ones(10), [(10,)], made(0, 40)),
    "new_full": (lambda x: x.new_full((10,), 3.0), [(10,)], made(0, 40)),
}  # fmt: skip


@pytest.mark.parametrize(("operation", "sizes", "expected"), OPERATIONS.values(), ids=OPERATIONS)
def test_the_work_of_an_operation(operation, sizes, expected):
    operands = [ones(*size) for size in sizes]
    assert count_work(lambda: operation(*operands)) == expected


VIEWS = [
    lambda x: x.T,
    lambda x: (x[1:3], x[:, 2]),
    lambda x: x.reshape(60),
    lambda x: x[None].expand(100, -1, -1),
    lambda x: x.unflatten(0, (2, 5)).transpose(1, 2),
    lambda x: (x.contiguous(), x.to(torch.float32), x.detach()),
    lambda x: (x.split(2), x.unbind()),
]


@pytest.mark.parametrize("view", VIEWS)
def test_view_is_free(view):
    x = ones(10, 6)
    assert count_work(lambda: view(x)) == Work()


def test_16_bit_elements_are_two_bytes():
    a = ones(10, dtype=torch.bfloat16)
    assert count_work(lambda: a + a) == made(40, 20, other=10)


# ------------------------------------------------------------------------------------------------ on chip


# An operation, its operands, and its work: `load` and `store` alone move bytes.
ON_CHIP = {
    "operations compute": (
        lambda a, b: torch.exp(a @ b), [ones(3, 5), ones(5, 7)], Work(matmul_flops=2 * 3 * 5 * 7, other_flops=21)
    ),
    "a part is loaded and another stored": (
        lambda x, out: store(out[2:5], load(x[2:5]) + 1), [ones(10, 6), ones(10, 6)],
        Work(other_flops=18, bytes_read=72, bytes_written=72),
    ),
    "bytes are those of the dtype in main memory": (
        lambda x, out: store(out, load(x).float() + 1), [ones(10).half(), ones(10).half()],
        Work(other_flops=10, bytes_read=20, bytes_written=20),
    ),
    "an expanded tensor is loaded once": (lambda row: load(row.expand(100, 6)), [ones(6)], Work(bytes_read=24)),
    "a broadcast stores every element": (store, [ones(10, 6), ones(6)], Work(bytes_written=240)),
}  # fmt: skip


@pytest.mark.parametrize(("operation", "operands", "expected"), ON_CHIP.values(), ids=ON_CHIP)
def test_the_work_of_an_operation_on_chip(operation, operands, expected):
    assert count_work(lambda: on_chip()(operation)(*operands)) == expected


def test_what_is_made_before_and_after_is_held_and_moved_as_ever():
    x = ones(10)

    def run():
        before = x + 1
        with on_chip():
            tile = load(before) + 1
        return tile + 1

    assert count_work(run) == Work(other_flops=30, bytes_read=120, bytes_written=80, peak_bytes=80)


def test_on_chip_ends_with_an_error_and_nests():
    x = ones(10)

    def run():
        with on_chip():
            with pytest.raises(ZeroDivisionError), on_chip():
                raise ZeroDivisionError
            x + 1
        x + 1

    assert count_work(run) == Work(other_flops=20, bytes_read=40, bytes_written=40, peak_bytes=40)


def test_without_a_count_nothing_but_the_store_happens():
    x, out = ones(3), torch.zeros(3)
    with on_chip():
        assert load(x) is x
        store(out, x)
    assert out.tolist() == [1.0, 1.0, 1.0]


def test_every_count_that_runs_is_told():
    x, inner = ones(10), []

    def run():
        inner.append(count_work(tile))

    def tile():
        with on_chip():
            return load(x) + 1

    assert count_work(run) == inner[0] == Work(other_flops=10, bytes_read=40)


# ------------------------------------------------------------------------------------------------ memory held


def test_peak_is_what_is_held_at_once_and_not_the_sum():
    x = ones(10)

    def four_in_turn():
        y = x + 1
        for _ in range(3):
            y = y + 1  # old and new at once, the one before is gone
        return y

    assert count_work(four_in_turn).peak_bytes == 2 * 40


# A run, and the bytes that it holds at its peak. x is given.
PEAKS = {
    "all that is still held": (lambda x: (x + 1) + (x + 2), 3 * 40),
    "a large tensor that was freed": (lambda x: (x.expand(100, 10) + 1).sum() + 1, 100 * 40 + 4),
    "a list of results": (lambda x: [x + 1, x + 2], 2 * 40),
    "results in a dictionary": (lambda x: {"a": x + 1, "rest": ([x + 2],)}, 2 * 40),
    "a new tensor and its views": (lambda x: [y := x + 1, y[2:], y.view(2, 5), y.expand(7, 10)], 40),
    "the whole buffer of a view": (lambda x: ((x + 1)[:1], x + 2), 2 * 40),
}


@pytest.mark.parametrize(("run", "peak"), PEAKS.values(), ids=PEAKS)
def test_the_peak_counts(run, peak):
    x = ones(10)
    assert count_work(lambda: run(x)).peak_bytes == peak


def test_inputs_are_not_held_by_the_run():
    x = ones(1000)
    assert count_work(lambda: x[:10] + 1).peak_bytes == 40


# ------------------------------------------------------------------------------------------------ as a whole


def test_counts_add_up_over_a_run():
    a, b = ones(3, 5), ones(5, 7)
    work = count_work(lambda: torch.relu(a @ b))
    assert work == Work(210, 21, 4 * (50 + 21), 4 * (21 + 21), 2 * 4 * 21)
    assert (work.flops, work.bytes_moved) == (210 + 21, 4 * (50 + 21) + 4 * (21 + 21))


def test_count_is_the_same_every_time():
    q = torch.randn(1, 4, 5, 8)
    runs = {count_work(lambda: attention(q, q, q, causal=True)) for _ in range(3)}
    assert len(runs) == 1


def test_count_ends_with_the_run():
    x = ones(10)
    work = count_work(lambda: x + 1)
    x + 1
    assert work.other_flops == 10


def test_attention_multiplies_every_query_with_every_key_twice():
    q, k = torch.randn(1, 8, 5, 16), torch.randn(1, 2, 9, 16)
    assert count_work(lambda: attention(q, k, k)).matmul_flops == 4 * 8 * 5 * 9 * 16


def test_a_kernel_of_our_own_counts_what_it_says(monkeypatch, kernel_device):
    monkeypatch.setitem(work_tools._OWN, "pagewise::online_softmax", lambda x, tile: (1, 2, 3 * x.numel(), tile))
    x = ones(2, 8, device=kernel_device)
    work = count_work(lambda: torch.ops.pagewise.online_softmax(x, 4))
    assert (work.matmul_flops, work.other_flops, work.bytes_read, work.bytes_written) == (1, 2, 48, 4)
    assert work.peak_bytes == x.nbytes


def test_a_tensor_that_is_named_as_the_result_is_written_and_neither_read_nor_new():
    a, b, c = ones(10), ones(10), ones(10)
    assert count_work(lambda: torch.add(a, b, out=c)) == Work(other_flops=10, bytes_read=80, bytes_written=40)
    assert count_work(lambda: torch.max(a[None], dim=0, out=(b, c.long()))).bytes_read == 80  # c.long() reads c


@pytest.mark.parametrize("what", ["a view", "a cache"])
def test_a_kernel_of_our_own_without_counts_is_refused(what, kernel_device):
    """A kernel reads a part of its operands, such as some blocks of a cache, so their sizes would be a wrong count."""
    x = torch.randn(2, 4, 16, device=kernel_device)
    cache, table, lens = x.new_ones(50, 16, 4, 16), x.new_zeros(2, 3).int(), x.new_ones(2).int()
    runs = {
        "a view": lambda: flat_gemm(x[0], x[1]),
        "a cache": lambda: paged_attention(x, cache, cache, table, lens, backend="triton"),
    }
    with pytest.raises(ValueError, match=r"work of the kernels of pagewise::(flat_gemm|decode_attention) is not known"):
        count_work(runs[what])


def test_a_kernel_is_refused_before_it_writes_and_in_a_trace(kernel_device):
    k_cache, v_cache = torch.zeros(2, 2, 8, 1, 16, device=kernel_device)
    k = v = torch.ones(1, 1, 16, device=kernel_device)
    slots = torch.tensor([3], device=kernel_device)
    for run in (count_work, trace_moves):
        with pytest.raises(ValueError, match="work of the kernels of pagewise::write_kv_cache is not known"):
            run(lambda: write_kv_cache(k_cache, v_cache, slots, k, v, backend="triton"))
    assert not k_cache.any()


@pytest.fixture
def library():
    with torch.library._scoped_library("pagewise_test", "FRAGMENT") as library:
        yield library


def of_the_user(library, schema, function):
    library.define(schema)
    name = schema.partition("(")[0]
    library.impl(name, function, "CompositeExplicitAutograd")
    return getattr(torch.ops.pagewise_test, name)


def test_every_tensor_of_a_users_operation_counts(library):
    """Also one in a list of lists or in a dict, and one that is read before it is changed."""
    x, many = ones(10), ones(100)
    add_to = of_the_user(library, "add_to(Tensor x, *, Tensor(a!) total) -> ()", lambda x, *, total: None)
    assert count_work(lambda: add_to(x, total=many)).bytes_read == 440
    scaled = of_the_user(
        library, "scaled(Tensor x, *, float by=1.0, Tensor(a!)? into=None) -> Tensor", lambda x, **_: x.clone()
    )
    assert count_work(lambda: scaled(x, by=2.0)).bytes_read == 40
    assert count_work(lambda: scaled(x, into=many)).bytes_read == 40
    first = of_the_user(library, "first(Tensor[][] lists) -> Tensor", lambda lists: lists[0][0].clone())
    assert count_work(lambda: first([[x, x], [many]])).bytes_read == 480
    of_dict = of_the_user(library, "of_dict(Dict(str, Tensor) all) -> Tensor", lambda all: all["x"].clone())
    assert count_work(lambda: of_dict({"x": x, "many": many})).bytes_read == 440


def test_a_trace_names_the_parts_that_move_in_their_order():
    x, out = torch.arange(6.0), torch.zeros(6)

    def run():
        with on_chip():
            for i in (0, 3):
                store(out[i : i + 3], 2 * load(x[i : i + 3]))
        return out

    result, moves = trace_moves(run)
    assert result is out
    assert [access for access, _ in moves] == ["read", "write"] * 2
    assert [(part.data_ptr() - x.data_ptr()) // 4 for access, part in moves if access == "read"] == [0, 3]
    assert all(len(part) == 3 for _, part in moves)
    assert count_work(run).bytes_moved == 48


def test_what_happens_inside_a_kernel_of_our_own_is_not_counted_again(monkeypatch):
    @torch.library.custom_op("pagewise_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        with on_chip():
            return load(x) * 2

    monkeypatch.setitem(work_tools._OWN, "pagewise_test::twice", lambda x: (1, 2, 3, 4))
    assert count_work(lambda: torch.ops.pagewise_test.twice(ones(10))).bytes_read == 3
