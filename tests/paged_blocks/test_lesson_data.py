"""Lesson 4's data: a batch whose tables are mixed up must not read as if nothing had happened."""

import json

import pytest
import torch

from conftest import ROOT
from pagewise.paged_attention import paged_attention
from pagewise.paged_blocks import PagedKVCache


@pytest.fixture
def batch():
    """What the lesson's cell makes: cache, q, block_tables, seq_lens, P."""
    cells = json.loads((ROOT / "lessons" / "04_paged_blocks.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (cell,) = (source for source in sources if "\nblock_tables = " in source)
    names = {"torch": torch, "PagedKVCache": PagedKVCache, "device": torch.device("cpu")}
    names["draw"] = torch.Generator().manual_seed(0)
    exec(cell.partition("\n\n\ndef ")[0], names)
    return names


def test_no_block_is_in_two_tables_of_the_lesson(batch):
    lens, P = batch["seq_lens"].tolist(), batch["P"]
    blocks = [table[: -(-n // P)] for table, n in zip(batch["block_tables"].tolist(), lens, strict=True)]
    assert len({block for table in blocks for block in table}) == sum(map(len, blocks))
    assert sorted(set(lens)) == sorted(lens)


def test_swapped_tables_change_what_the_lessons_sequences_read(batch):
    q, cache, tables, lens = (batch[name] for name in ("q", "cache", "block_tables", "seq_lens"))
    read = [paged_attention(q, cache.k[0], cache.v[0], t, lens, backend="torch") for t in (tables, tables.flip(0))]
    wrong = (read[0] - read[1]).abs().amax(dim=(1, 2))
    assert (wrong[lens > 0] > 0.1).all()
    assert wrong[lens == 0] == 0
