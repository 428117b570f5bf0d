"""The running scoreboard: its rows compute attention, or its gradients, and count what can be worked out by hand."""

from functools import partial

import pytest
import torch

from pagewise.experiments import scoreboard
from pagewise.experiments.scoreboard import ROWS, TRAINING, Row, score, score_training, with_cache
from pagewise.flash_attention import flash_attention_2
from pagewise.flash_decoding import flash_decoding
from pagewise.naive_attention import attention
from pagewise.tools.work import count_work

H, HKV, D = 8, 2, 64  # as in the scoreboard; its prompt is shortened, so that counting takes no seconds
PROMPT, NEW = 33, 4
LENGTHS = range(PROMPT + 1, PROMPT + NEW + 1)  # tokens seen when each new one is made


@pytest.fixture
def resize(monkeypatch):
    """Return a function that changes the number of tokens in the prompt, and of new tokens."""

    def resize(prompt, new=NEW):
        for name, size in {"PROMPT": prompt, "NEW": new, "TOTAL": prompt + new}.items():
            monkeypatch.setattr(scoreboard, name, size)

    return resize


@pytest.fixture(autouse=True)
def short_prompt(resize):
    resize(PROMPT)


def method(name):
    (row,) = (row for row in ROWS if name in row.method)
    return row


def test_the_piece_of_work_is_the_one_described(monkeypatch):
    monkeypatch.undo()  # of `resize`
    sizes = ("PROMPT", "NEW", "TOTAL", "HEADS", "KV_HEADS", "HEAD_SIZE")
    assert [getattr(scoreboard, name) for name in sizes] == [256, 32, 288, 8, 2, 64]
    assert "256 tokens and then 32 tokens" in scoreboard.__doc__


P = scoreboard.BLOCK_SIZE
SLOTS = sum(-(-n // P) * P for n in LENGTHS)  # blocks are multiplied whole, the empty slots of the last one too


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        ("recomputed", PROMPT**2 + sum(n**2 for n in LENGTHS)),
        ("naive with a KV cache", PROMPT**2 + sum(LENGTHS)),
        ("online softmax", PROMPT**2 + sum(LENGTHS)),
        ("streamed", PROMPT**2 + SLOTS),
        ("CUDA", PROMPT**2 + SLOTS),
    ],
)
def test_the_pairs_of_queries_and_keys_that_are_multiplied(name, pairs):
    assert score(method(name)).matmul_flops == 4 * H * D * pairs


@pytest.mark.slow
def test_paged_cache_is_held_in_whole_blocks():
    cache, outputs = 4 * 2 * HKV * -(-(PROMPT + NEW) // P) * P * D, 4 * H * (PROMPT + NEW) * D
    assert score(method("streamed")).peak_bytes >= cache + outputs


def test_tiles_hold_less_than_the_whole_score_matrix(resize):
    resize(256)  # more than one tile
    assert score(method("online softmax")).peak_bytes < score(method("naive with a KV cache")).peak_bytes


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.method)
def test_every_row_computes_naive_attention(row):
    assert score(row).matmul_flops > 0  # score() compares first


WRONG = {
    "shifted": (score, lambda q, k, v: [attention(q, k, v, causal=True).roll(1, dims=1)]),
    "one step short": (score, lambda q, k, v: [attention(q, k, v, causal=True)[:, :, :-1]]),
    "looks ahead": (score, lambda q, k, v: [attention(q, k, v)]),
    "all zero": (score, lambda q, k, v: [torch.zeros_like(q)]),
    "half of the gradients": (score_training, lambda *qkv: [dx / 2 for dx in TRAINING[0].run(*qkv)]),
    "no mask": (score_training, lambda *qkv: scoreboard.training_step(attention)(*qkv)),
}


@pytest.mark.parametrize(("compare", "wrong"), WRONG.values(), ids=WRONG)
def test_row_that_computes_something_else_is_refused(compare, wrong):
    with pytest.raises(AssertionError):
        compare(Row(99, "wrong", wrong))


def test_rows_come_in_the_order_of_the_lessons_with_a_name_each():
    assert [row.lesson for row in ROWS] == sorted(row.lesson for row in ROWS)
    assert len({row.method for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("lesson", [0, 1, 4, 99])
@pytest.mark.parametrize(
    ("table", "of"),
    [(scoreboard.scoreboard, ROWS), (scoreboard.training_scoreboard, TRAINING)],
    ids=["decode", "training"],
)
def test_a_table_has_the_rows_of_all_lessons_so_far_in_columns_that_line_up(table, of, lesson):
    header, units, *rows = table(lesson).splitlines()
    assert [row.method for row in of if row.lesson <= lesson] == [row[8:42].strip() for row in rows]
    assert header.split() == ["lesson", "method", "matmul", "other", "read", "written", "held"]
    assert units.split() == ["MFLOP", "MFLOP", "MB", "MB", "MB"]
    assert len({len(line) for line in (header, units, *rows)}) == 1


def test_table_shows_the_counts_in_millions():
    work = score(ROWS[0])
    shown = scoreboard.scoreboard(1).splitlines()[2][42:].split()
    counts = (work.matmul_flops, work.other_flops, work.bytes_read, work.bytes_written, work.peak_bytes)
    assert shown == [f"{count / 1e6:.1f}" for count in counts]


@pytest.mark.slow
def test_the_kernel_reads_less_than_the_stream_because_it_holds_no_scores():
    assert score(method("CUDA")).bytes_read < score(method("streamed")).bytes_read


@pytest.mark.slow
def test_flash_attention_reads_the_prompt_once_per_row_tile_and_holds_no_scores(resize):
    resize(128)  # two row tiles: one sees 64 keys, the other all
    flash, grouped = score(method("FlashAttention")), score(method("CUDA"))
    assert grouped.matmul_flops - flash.matmul_flops == 4 * H * D * 64 * 64  # the tile above the diagonal
    q, k, v = (torch.randn(1, heads, 128, D) for heads in (H, HKV, HKV))
    prompt = count_work(lambda: flash_attention_2(q, k, v, causal=True, tile_rows=64, tile_cols=64))
    assert prompt.bytes_read == 4 * (H * 128 * D + 2 * HKV * (64 + 128) * D)
    assert prompt.bytes_written == 4 * (H * 128 * D + H * 128)


def test_splits_multiply_no_more_and_move_their_partial_results_besides():
    def one_split(q, k, v):
        prompt = partial(flash_attention_2, causal=True, tile_rows=64, tile_cols=64)
        return prompt(q, k, v) if q.shape[2] > 1 else flash_decoding(q, k, v, num_splits=1, backend="torch")

    split, whole = score(method("Flash-Decoding")), score(Row(7, "one split", with_cache(one_split)))
    assert split.matmul_flops == whole.matmul_flops == 4 * H * D * (PROMPT**2 + sum(LENGTHS))
    partials = NEW * 4 * 4 * H * (D + 2)  # steps × splits × bytes × heads × (acc, m, l)
    assert split.bytes_written - whole.bytes_written >= partials


# ------------------------------------------------------------------------------------------------ a training step


def test_backward_of_naive_attention_has_four_products_and_flash_attention_makes_the_scores_again():
    square = H * D * PROMPT**2
    works = {row.method: score_training(row) for row in TRAINING}
    products = [2 + 4, 2 + 4, 2 + 5, 2 + 5]
    assert [work.matmul_flops for work in works.values()] == [2 * n * square for n in products]


@pytest.mark.slow
def test_flash_attention_trains_without_the_score_matrix(resize):
    resize(256, new=0)
    naive, online, *flash = (score_training(row) for row in TRAINING)
    scores = 4 * H * 256 * 256
    assert min(naive.peak_bytes, online.peak_bytes) > 2 * scores
    assert max(work.peak_bytes for work in flash) < scores
    assert flash[1].bytes_moved < flash[0].bytes_moved < naive.bytes_moved / 5


def test_a_prompt_in_chunks_multiplies_and_reads_what_its_rows_of_tiles_would(resize):
    resize(256)
    whole, chunked = (score(method(name)) for name in ("Flash-Decoding", "chunks of 64"))
    assert chunked.matmul_flops == whole.matmul_flops
    assert whole.bytes_read <= chunked.bytes_read < 1.02 * whole.bytes_read
