"""Counting work: every expected number here is worked out by hand from shapes (float32: 4 bytes an element)."""

import pytest
import torch

from pagewise import online_softmax  # noqa: F401  brings its custom op
from pagewise.naive_attention import attention
from pagewise.tools import work as work_tools
from pagewise.tools.work import Work, count_work, load, on_chip, store, trace_moves


def ones(*size, dtype=torch.float32):
    return torch.ones(size, dtype=dtype)


def test_matrix_product():
    a, b = ones(3, 5), ones(5, 7)
    work = count_work(lambda: a @ b)
    assert work == Work(
        matmul_flops=2 * 3 * 5 * 7, bytes_read=4 * (15 + 35), bytes_written=4 * 21, peak_bytes=4 * 21
    )  # fmt: skip


def test_batched_matrix_product():
    a, b = ones(2, 3, 5), ones(2, 5, 7)
    work = count_work(lambda: a @ b)
    assert (work.matmul_flops, work.bytes_read, work.bytes_written) == (2 * 2 * 3 * 5 * 7, 4 * 2 * 50, 4 * 2 * 21)


def test_linear_layer_with_bias_reads_the_bias():
    x, layer = ones(3, 5), torch.nn.Linear(5, 7)
    work = count_work(lambda: layer(x))
    assert (work.matmul_flops, work.bytes_read, work.bytes_written) == (210, 4 * (15 + 35 + 7), 4 * 21)


def test_pointwise_operation_counts_one_per_element():
    a, b = ones(10), ones(10)
    assert count_work(lambda: a + b) == Work(other_flops=10, bytes_read=80, bytes_written=40, peak_bytes=40)


def test_broadcast_operation_counts_the_elements_of_its_result():
    a, b = ones(10, 1), ones(1, 20)
    assert count_work(lambda: a * b) == Work(other_flops=200, bytes_read=120, bytes_written=800, peak_bytes=800)


def test_exp_and_tanh_count_one_per_element_like_any_other():
    x = ones(10)
    assert count_work(lambda: torch.tanh(torch.exp(x))).other_flops == 20


def test_reduction_counts_the_elements_it_reads():
    x = ones(10, 6)
    assert count_work(lambda: x.sum(dim=-1)) == Work(other_flops=60, bytes_read=240, bytes_written=40, peak_bytes=40)


def test_operation_with_two_results_writes_both():
    x = ones(10, 6)
    work = count_work(lambda: x.max(dim=-1))
    assert (work.other_flops, work.bytes_written) == (60, 10 * 4 + 10 * 8)  # values, int64 indices


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.T,
        lambda x: x[1:3],
        lambda x: x[:, 2],
        lambda x: x.reshape(60),
        lambda x: x[None].expand(100, -1, -1),
        lambda x: x.unflatten(0, (2, 5)).transpose(1, 2),
        lambda x: x.contiguous(),
        lambda x: x.to(torch.float32),
        lambda x: x.detach(),
        lambda x: x.split(2),
        lambda x: x.unbind(),
    ],
)
def test_view_is_free(view):
    x = ones(10, 6)
    assert count_work(lambda: view(x)) == Work()


def test_reshape_that_must_copy_moves_the_elements():
    x = ones(10, 6)
    assert count_work(lambda: x.T.reshape(60)) == Work(bytes_read=240, bytes_written=240, peak_bytes=240)


def test_expanded_tensor_is_read_once():
    row, table = ones(6), ones(100, 6)
    work = count_work(lambda: row.expand(100, 6) + table)
    assert (work.other_flops, work.bytes_read) == (600, 4 * 6 + 4 * 600)


def test_conversion_moves_bytes_of_both_dtypes_and_does_no_arithmetic():
    x = ones(10)
    assert count_work(lambda: x.half()) == Work(bytes_read=40, bytes_written=20, peak_bytes=20)


def test_16_bit_elements_are_two_bytes():
    a = ones(10, dtype=torch.bfloat16)
    assert count_work(lambda: a + a) == Work(other_flops=10, bytes_read=40, bytes_written=20, peak_bytes=20)


PICKED = torch.tensor([7, 0, 7])
PICKS = {
    "index": lambda x: x[PICKED],
    "index_select": lambda x: x.index_select(0, PICKED),
    "embedding": lambda x: torch.nn.functional.embedding(PICKED, x),
}


@pytest.mark.parametrize("pick", PICKS.values(), ids=PICKS.keys())
def test_picking_rows_reads_those_rows_and_the_indices_only(pick):
    table = ones(1000, 6)
    picked = 3 * 6 * 4
    expected = Work(bytes_read=picked + 3 * 8, bytes_written=picked, peak_bytes=picked)
    assert count_work(lambda: pick(table)) == expected


def test_gather_reads_one_element_per_index():
    table, index = ones(1000, 6), torch.zeros(2, 6, dtype=torch.int64)
    expected = Work(bytes_read=12 * 4 + 12 * 8, bytes_written=48, peak_bytes=48)
    assert count_work(lambda: table.gather(0, index)) == expected


def test_copy_into_a_slice_writes_the_slice_only():
    buffer, new = ones(1000, 6), ones(2, 6)

    def write():
        buffer[5:7] = new

    assert count_work(write) == Work(bytes_read=48, bytes_written=48)


def test_broadcast_copy_writes_every_element():
    buffer, row = ones(10, 6), ones(6)
    assert count_work(lambda: buffer.copy_(row)) == Work(bytes_read=24, bytes_written=240)


def test_fill_reads_nothing():
    buffer = ones(10, 6)
    assert count_work(buffer.zero_) == Work(bytes_written=240)


def test_update_in_place_reads_what_it_overwrites():
    a, b = ones(10), ones(10)
    assert count_work(lambda: a.add_(b)) == Work(other_flops=10, bytes_read=80, bytes_written=40)


def test_scattered_write_writes_the_rows_it_names_only():
    buffer, new = ones(1000, 6), ones(3, 6)

    def write():
        buffer[PICKED] = new

    assert count_work(write) == Work(bytes_read=3 * 6 * 4 + 3 * 8, bytes_written=3 * 6 * 4)


def test_scattered_write_of_one_row_to_many_writes_all_of_them():
    buffer, new = ones(1000, 6), ones(6)

    def write():
        buffer[PICKED] = new

    assert count_work(write) == Work(bytes_read=6 * 4 + 3 * 8, bytes_written=3 * 6 * 4)


def test_concatenation_moves_and_does_no_arithmetic():
    a, b = ones(10, 6), ones(2, 6)
    assert count_work(lambda: torch.cat([a, b])) == Work(bytes_read=288, bytes_written=288, peak_bytes=288)


def test_unwritten_memory_is_held_but_not_moved():
    assert count_work(lambda: torch.empty(10)) == Work(peak_bytes=40)


def test_new_zeros_are_written():
    assert count_work(lambda: torch.zeros(10)) == Work(bytes_written=40, peak_bytes=40)


LIKE = {
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    "full_like": lambda x: torch.full_like(x, 3.0),
    "new_zeros": lambda x: x.new_zeros(10),
    "new_ones": lambda x: x.new_ones(10),
    "new_full": lambda x: x.new_full((10,), 3.0),
}


@pytest.mark.parametrize("make", LIKE.values(), ids=LIKE.keys())
def test_a_tensor_made_after_a_model_reads_nothing_of_it(make):
    x = ones(10)
    assert count_work(lambda: make(x)) == Work(bytes_written=40, peak_bytes=40)


# ------------------------------------------------------------------------------------------------ on chip


def test_on_chip_operations_compute_and_move_nothing():
    a, b = ones(3, 5), ones(5, 7)

    def run():
        with on_chip():
            return torch.exp(a @ b)

    assert count_work(run) == Work(matmul_flops=2 * 3 * 5 * 7, other_flops=21)


def test_load_reads_what_it_is_given_and_store_writes_where_it_is_told():
    x, out = ones(10, 6), torch.zeros(10, 6)

    def run():
        with on_chip():
            store(out[2:5], load(x[2:5]) + 1)

    assert count_work(run) == Work(other_flops=18, bytes_read=72, bytes_written=72)
    assert out.sum() == 3 * 6 * 2


def test_bytes_are_those_of_the_dtype_in_main_memory():
    x, out = ones(10, dtype=torch.float16), torch.zeros(10, dtype=torch.float16)

    def run():
        with on_chip():
            store(out, load(x).float() + 1)

    assert count_work(run) == Work(other_flops=10, bytes_read=20, bytes_written=20)


def test_load_of_an_expanded_tensor_reads_it_once():
    row = ones(6)
    assert count_work(lambda: load(row.expand(100, 6))) == Work(bytes_read=24)


def test_store_writes_every_element_of_a_broadcast():
    out, row = ones(10, 6), ones(6)
    assert count_work(lambda: store(out, row)) == Work(bytes_written=240)


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


def test_peak_counts_everything_still_held():
    x = ones(10)

    def three_kept():
        a, b = x + 1, x + 2
        return a + b

    assert count_work(three_kept).peak_bytes == 3 * 40


def test_peak_remembers_what_was_freed():
    x = ones(10)

    def large_then_small():
        return (x.expand(100, 10) + 1).sum()

    assert count_work(large_then_small).peak_bytes == 100 * 40 + 4


@pytest.mark.parametrize("nest", [lambda a, b: [a, b], lambda a, b: {"a": a, "rest": ([b],)}], ids=["list", "nested"])
def test_results_count_as_held_however_nested(nest):
    x = ones(10)
    assert count_work(lambda: nest(x + 1, x + 2)).peak_bytes == 2 * 40


def test_view_of_a_new_tensor_holds_nothing_more():
    x = ones(10)

    def with_views():
        y = x + 1
        return [y, y[2:], y.view(2, 5), y.expand(7, 10)]

    assert count_work(with_views).peak_bytes == 40


def test_view_keeps_its_whole_buffer_held():
    x = ones(10)

    def keep_one_element():
        first = (x + 1)[:1]
        return first, x + 2

    assert count_work(keep_one_element).peak_bytes == 2 * 40


def test_inputs_are_not_held_by_the_run():
    x = ones(1000)
    assert count_work(lambda: x[:10] + 1).peak_bytes == 40


# ------------------------------------------------------------------------------------------------ as a whole


def test_flops_and_bytes_moved_are_the_sums():
    work = Work(matmul_flops=1, other_flops=2, bytes_read=10, bytes_written=20)
    assert (work.flops, work.bytes_moved) == (3, 30)


def test_counts_add_up_over_a_run():
    a, b = ones(3, 5), ones(5, 7)

    def run():
        c = a @ b
        return torch.relu(c)

    assert count_work(run) == Work(210, 21, 4 * (50 + 21), 4 * (21 + 21), 2 * 4 * 21)


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
    x = torch.ones(2, 8, device=kernel_device)
    work = count_work(lambda: torch.ops.pagewise.online_softmax(x, 4))
    assert (work.matmul_flops, work.other_flops, work.bytes_read, work.bytes_written) == (1, 2, 48, 4)
    assert work.peak_bytes == x.nbytes


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
