"""`table` rounds what it shows, aligns numbers, and refuses rows that do not fit."""

import numpy as np
import pytest
import torch

from pagewise.figures import table


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (65536, "65,536"),
        (-1234567, "-1,234,567"),
        (2304.4, "2,300"),
        (99.96, "100"),
        (8.4, "8.40"),
        (0.0123456, "0.0123"),
        (0.0, "0.00"),
        (3.2e-7, "3.2e-07"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (torch.tensor(7), "7"),
        (torch.tensor(0.5), "0.500"),
        (np.float32(0.25), "0.250"),
        (True, "True"),
        (None, ""),
        ("a", "a"),
    ],
)
def test_numbers_are_rounded_to_what_a_reader_compares(value, shown):
    assert table(["x"], [(value,)]).rows == ((shown,),)


def test_markdown_aligns_columns_of_numbers_to_the_right():
    markdown = table(["kernel", "µs"], [("a|b", 63.4), ("c", None)])._repr_markdown_()
    assert markdown.splitlines() == ["| kernel | µs |", "| --- | ---: |", r"| a\|b | 63.4 |", "| c |  |"]


def test_text_aligns_columns_of_numbers_to_the_right():
    assert repr(table(["kernel", "tokens"], [("a", 1), ("flash", 65536)])).splitlines() == [
        "kernel  tokens",
        "a            1",
        "flash   65,536",
    ]


def test_a_row_of_another_length_is_refused():
    with pytest.raises(ValueError, match="3 values for 2 columns"):
        table(["a", "b"], [(1, 2), (1, 2, 3)])


def test_a_table_without_rows_shows_its_columns():
    assert table(["a", "b"], [])._repr_markdown_().splitlines() == ["| a | b |", "| --- | --- |"]
