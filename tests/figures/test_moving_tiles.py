"""The stepper of FlashAttention's loops: steps, captions and counts follow from the moves."""

import pytest
import torch
from stepped import captions

from pagewise.figures.moving_tiles import IDLE, KEPT, Move, _held, _look, loop_steps, tile_moves, visits
from pagewise.figures.palette import BLUE, ORANGE
from pagewise.flash_attention import flash_attention_1_forward
from pagewise.tools.work import trace_moves


def read(name, start, stop):
    return Move("read", name, start, stop, 10 * (stop - start))


def write(name, start, stop):
    return Move("write", name, start, stop, 10 * (stop - start))


KEYS_OUTSIDE = [
    move
    for j in range(0, 6, 2)
    for move in (
        read("K", j, j + 2),
        read("V", j, j + 2),
        *(m for i in (0, 3) for m in (read("Q", i, i + 3), read("O", i, i + 3), write("O", i, i + 3))),
    )
]
QUERIES_OUTSIDE = [
    move
    for i in (0, 3)
    for move in (
        read("Q", i, i + 3),
        *(m for j in range(0, 6, 2) for m in (read("K", j, j + 2), read("V", j, j + 2))),
        write("O", i, i + 3),
    )
]


def test_the_tensor_that_is_read_more_often_makes_the_steps():
    down = [(visit.rows, visit.cols) for visit in visits(KEYS_OUTSIDE)]
    assert down[:3] == [((0, 3), (0, 2)), ((3, 6), (0, 2)), ((0, 3), (2, 4))]
    right = [(visit.rows, visit.cols) for visit in visits(QUERIES_OUTSIDE)]
    assert right[:4] == [((0, 3), (0, 2)), ((0, 3), (2, 4)), ((0, 3), (4, 6)), ((3, 6), (0, 2))]
    assert set(down) == set(right)


@pytest.mark.parametrize("moves", [KEYS_OUTSIDE, QUERIES_OUTSIDE])
def test_every_move_belongs_to_one_step_in_order(moves):
    assert [move for visit in visits(moves) for move in visit.moves] == moves


@pytest.mark.slow
def test_captions_say_what_moves_and_the_end_counts_all_of_it():
    loops = {"Keys outside": KEYS_OUTSIDE, "Queries outside": QUERIES_OUTSIDE}
    steps = loop_steps(loops, title="In which order?", alt="Tiles.")
    said = captions(steps)
    assert said[1] == (
        "Keys outside, queries 3–5, keys 0–1: reads Q, O and writes O. "
        "Queries outside, queries 0–2, keys 2–3: reads K, V."
    )
    assert said[2].endswith("Queries outside, queries 0–2, keys 4–5: reads K, V and writes O.")
    assert len(said) == 6
    keys, queries = (sum(move.numbers for move in moves) for moves in loops.values())
    assert said[-1].endswith(f" Numbers read and written in all: Keys outside {keys:,}, Queries outside {queries:,}.")


def test_a_shorter_loop_waits_at_its_end(unrendered):
    steps = loop_steps({"long": KEYS_OUTSIDE, "short": QUERIES_OUTSIDE[:8]}, title="?", alt="Tiles.")
    said = captions(steps)[3]
    assert said.endswith("short is done.")


def test_the_papers_loop_is_drawn_from_its_own_trace():
    q, k, v = torch.randn(3, 1, 1, 7, 4).unbind()  # views of one memory, side by side
    (O, m, l), trace = trace_moves(lambda: flash_attention_1_forward(q, k, v, tile_rows=3, tile_cols=4))
    moves = tile_moves(trace, Q=q, K=k, V=v, O=O, m=m, l=l)
    assert len(moves) == len(trace)
    assert moves[:3] == [Move("read", "K", 0, 4, 16), Move("read", "V", 0, 4, 16), Move("read", "Q", 0, 3, 12)]
    assert [visit.rows for visit in visits(moves)] == 2 * [(0, 3), (3, 6), (6, 7)]
    assert [visit.cols for visit in visits(moves)] == 3 * [(0, 4)] + 3 * [(4, 7)]
    assert {move.tensor for move in tile_moves(trace, Q=q)} == {"Q"}


@pytest.mark.parametrize(("moves", "O", "Q"), [(KEYS_OUTSIDE, "hatched", "read"), (QUERIES_OUTSIDE, "kept", "kept")])
def test_a_tile_that_stays_on_chip_looks_different_from_a_tile_that_is_read(moves, O, Q):
    looks = {BLUE: "read", KEPT: "kept", ORANGE: "hatched", IDLE: "idle"}
    now = visits(moves)[1]  # with queries outside: the second tile of keys for the first queries
    held = _held(moves, now)
    assert looks[_look(now, "O", now.rows, held)["fill"]] == O
    assert looks[_look(now, "Q", now.rows, held)["fill"]] == Q
    assert looks[_look(now, "Q", (6, 9), held)["fill"]] == "idle"
