"""The replay of a trace without a barrier: it agrees with `check`. See replay.py and planted_in_ptx.py."""

import numpy as np
import pytest
import test_ptx_kernel as entries
from planting import meetings, planted, removals
from test_planted_in_ptx import product_of, replayed, verdicts

from cudascope import PtxKernel

RING = (
    entries.HEADER
    + """
.visible .entry ring(.param .u64 x, .param .u64 y)
{
    .reg .b32 %r<8>;
    .reg .b64 %rd<6>;
    .shared .align 16 .b8 stages[2048];
    ld.param.u64 %rd1, [x];
    ld.param.u64 %rd2, [y];
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, stages;
    shl.b32 %r2, %r0, 2;
    add.s32 %r2, %r1, %r2;
    st.shared.b32 [%r2], %r0;
    bar.sync 0;
    xor.b32 %r3, %r0, 63;
    shl.b32 %r4, %r3, 2;
    add.s32 %r4, %r1, %r4;
    ld.shared.b32 %r5, [%r4];
    bar.sync 0;
    mul.wide.u32 %rd3, %r0, 16;
    add.s64 %rd4, %rd1, %rd3;
    shl.b32 %r2, %r0, 4;
    add.s32 %r2, %r1, %r2;
    cp.async.cg.shared.global [%r2], [%rd4], 16;
    cp.async.commit_group;
    bar.sync 0;
    cp.async.cg.shared.global [%r2+1024], [%rd4+1024], 16;
    cp.async.commit_group;
    cp.async.wait_group 0;
    bar.sync 0;
    shl.b32 %r4, %r3, 4;
    add.s32 %r4, %r1, %r4;
    ld.shared.b32 %r6, [%r4];
    ld.shared.b32 %r7, [%r4+1024];
    add.s32 %r5, %r5, %r6;
    add.s32 %r5, %r5, %r7;
    mul.wide.u32 %rd3, %r0, 4;
    add.s64 %rd5, %rd2, %rd3;
    st.global.b32 [%rd5], %r5;
    ret;
}
"""
)


def assert_needed(run, source, mistakes, needed):
    """Assert for each barrier of `source` that `check` and a replay know whether the kernel needs it."""
    seen = verdicts(run, mistakes, lambda each: "bar.sync" in each.instruction)
    assert [each.seen for each in seen.values()] == ["found" if each else "survived" for each in needed]
    count = replayed(run, source)
    barriers = [i for i, each in enumerate(meetings(source)) if "bar.sync" in each.instruction]
    assert count() == 0
    assert [count(each) > 0 for each in barriers] == needed


@pytest.mark.slow
def test_a_replay_tells_copies_from_the_plain_stores_of_their_group():
    """The first stage takes the place of plain stores. The barrier between the copies of two stages orders nothing."""
    mistakes = removals(RING)
    kernel = PtxKernel(planted(RING, mistakes))
    x, y = np.arange(512, dtype=np.int32), np.zeros(64, np.int32)

    def run():
        kernel[1, 64](x, y)
        return [y.copy()]

    assert_needed(run, RING, mistakes, [True, True, False, True])


@pytest.mark.slow
def test_a_replay_counts_the_reads_of_a_product_until_its_wait():
    """All warps have begun their product at the first barrier. One of them may still read after another has waited."""
    after = """bar.sync 0;
    wgmma.wait_group.sync.aligned 0;
    bar.sync 0;
    mov.u32 %r9, right;
    shl.b32 %r5, %r1, 2;
    add.s32 %r9, %r9, %r5;
    st.shared.b32 [%r9], %r1;"""
    source = entries.product("f32.f16.f16", 64, 16, wait=after)
    mistakes = removals(source)
    assert_needed(product_of(source, mistakes), source, mistakes, [True, False, True])
