"""The Triton kernels of packed queries: their registration, their splits and what they refuse."""

import pytest
import torch
from packed_cases import assert_packed_matches_dense, packed_inputs

from conftest import executed
from pagewise.flash_decoding import Splits
from pagewise.paged_attention import paged_attention_varlen
from pagewise.paged_attention_varlen import plan
from pagewise.paged_attention_varlen.in_triton import varlen_plan


@pytest.mark.parametrize("splits", [Splits("num", 1), Splits("size", 16), Splits("share", 3)], ids=str)
def test_op_is_registered_soundly(splits, kernel_device):
    inputs = packed_inputs([5, 40], [1, 5], 4, 2, 32, dtype=torch.bfloat16, device=kernel_device)
    inputs = [t.nan_to_num() if t.is_floating_point() else t for t in inputs]  # it compares the inputs too
    step = plan(*inputs[3:], block_size=16, backend="triton", splits=splits).step
    chunk_seqs, work = varlen_plan(*inputs[:2], step)
    slopes = torch.ones(4, device=kernel_device)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    options = (None, 0.1, None, 0.0, 1.0) if splits.way == "num" else (slopes, 0.1, 9, 2.0, 0.5)
    arguments = (*inputs, chunk_seqs, *options, *work)
    torch.library.opcheck(torch.ops.pagewise.paged_attention_varlen, arguments, test_utils=tests)


@pytest.mark.parametrize("sizes", [{"block_size": 12}, {"head_size": 320}, {"dtype": torch.float64}], ids=str)
def test_refusals_name_torch(sizes, kernel_device):
    inputs = packed_inputs(
        [5, 40], [1, 5], 4, 2, **{"head_size": 32, "dtype": torch.float16} | sizes, device=kernel_device
    )
    with pytest.raises(ValueError, match=r'backend="triton".*backend="torch"'):
        paged_attention_varlen(*inputs, backend="triton")
    assert paged_attention_varlen(*inputs, backend="torch").isfinite().all()


def test_any_number_of_heads_may_share_a_kv_head(kernel_device):
    """More than a chunk has rows, so that one query's heads are in several."""
    for group in (1, 3, 40):
        inputs = packed_inputs([20, 35], [1, 3], 2 * group, 2, 16, dtype=torch.float16, device=kernel_device)
        assert_packed_matches_dense(in_triton, inputs)


def test_keys_are_cut_where_it_is_asked_for(kernel_device):
    inputs = packed_inputs([130, 40], [2, 5], 4, 2, 32, dtype=torch.float16, device=kernel_device)
    for splits, merges in (({"num_splits": 1}, 0), ({"num_splits": 3}, 1), ({"split_size": 64}, 1)):
        before = executed["merge_plan_kernel"]
        paged_attention_varlen(*inputs, **splits, backend="triton")
        assert executed["merge_plan_kernel"] - before == merges, splits


@pytest.mark.parametrize("splits", [{}, {"num_splits": 2}], ids=str)
def test_an_impossible_length_gives_nan(splits, kernel_device):
    """Unchecked, beyond what its table can hold; the other sequences' rows are right."""
    q, k, v, tables, lens, ends = packed_inputs([40, 40], [2, 2], 4, 2, 32, dtype=torch.float32, device=kernel_device)
    right = in_triton(q, k, v, tables, lens, ends)[0]
    lens[0] = 10**6
    out = paged_attention_varlen(q, k, v, tables, lens, ends, **splits, check=False, backend="triton")
    assert out[:2].isnan().all()
    torch.testing.assert_close(out[2:], right[2:], rtol=1e-5, atol=1e-6)


def in_triton(*inputs):
    return paged_attention_varlen(*inputs, return_lse=True, backend="triton")
