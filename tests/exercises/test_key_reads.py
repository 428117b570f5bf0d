"""The reads of keys in lesson 5: the table has a kernel beside the one before it, with right scores."""

import pytest

from cudascope import CudaKernel
from pagewise.exercises.key_reads import KeyReads

KERNEL = """
#include <cuda_fp16.h>
__global__ void scores_1(const __half* q, const __half* k, const int* table, float* scores, int length) {
    const int token = threadIdx.x;
    if (token >= length) return;
    float qk = 0;
    for (int d = 0; d < 128; ++d) qk += float(q[d]) * float(k[(table[token / 16] * 16 + token % 16) * 128 + d]);
    scores[token] = qk;
}
"""


@pytest.mark.slow
def test_a_kernel_is_shown_beside_the_one_before_it():
    kernel, reads = CudaKernel(KERNEL, "scores_1"), KeyReads("first", "second")
    assert len(reads.count("first", kernel)) == 1
    rows = reads.count("second", kernel)
    assert [row[0] for row in rows] == ["first", "second"]
    assert rows[0][1:] == rows[1][1:] == (384, 11_520, 6.25, 0, "0.0000")
    assert set(reads.launches) == {"first", "second"}


def test_a_kernel_that_the_lesson_does_not_name_is_refused():
    with pytest.raises(ValueError, match="third"):
        KeyReads("first").count("third", CudaKernel(KERNEL, "scores_1"))
