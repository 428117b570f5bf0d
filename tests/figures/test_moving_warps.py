"""The stepper of the warps' walk: drawn from the trace of the kernel that ran."""

import numpy as np
import pytest
from paged_launch import TABLE, D, P, paged_launch
from stepped import captions

from pagewise.figures.moving_warps import _steps, warp_steps

pytestmark = pytest.mark.slow


def test_every_load_is_a_step_and_says_which_warp_is_where():
    traces = paged_launch().accesses("k_cache"), paged_launch().accesses("v_cache")
    steps = warp_steps(*traces, TABLE, (D // 8, P * 8), (D, P), title="Who reads?", alt="Six blocks of K and V.")
    said = captions(steps)
    assert len(said) == 1 + 8 + 1 + 4 + 1
    assert said[1] == (
        "Pass over K, load 0: warp 0 in block 7, warp 1 in block 1, warp 2 in block 4, warp 3 in block 0 of the cache."
    )
    assert (
        said[5] == "Pass over K, load 4: warp 0 in block 8, warp 1 in block 3 of the cache; 2 warps have no block left."
    )
    assert said[-1].startswith("All is read: each vec of K 1×, of V 1×.")


def test_a_load_of_k_is_one_row_of_the_packed_block():
    steps = _steps(paged_launch().accesses("k_cache"), TABLE, (D // 8, P * 8))
    for i, reads in enumerate(steps[1:5]):
        rows = [np.flatnonzero(now.any(axis=1)).tolist() for now in reads.now]
        assert rows == [[i]] * 4 + [[]] * 2
    assert [int(readers[0, 0]) for readers in steps[-1].readers] == [0, 1, 2, 3, 0, 1]
    assert all((readers >= 0).all() for readers in steps[-1].readers)
