"""What each softmax loop executes for a tile: the unified maximum exchanges nothing between lanes."""

import pytest
import torch

from pagewise.experiments.softmax_instructions import GROUP, TILE, D, lazy_kernel, per_tile
from pagewise.kernels.flash_decoding import split_decode_kernel
from pagewise.tools.launch import launch

pytestmark = pytest.mark.slow


def test_the_unified_maximum_saves_instructions_and_all_shuffles():
    online, lazy, unified = (per_tile(name) for name in ("online softmax", "lazy rescaling", "unified maximum"))
    assert online["product"] == lazy["product"] == unified["product"] > 0
    assert unified["shuffle"] == 0 < online["shuffle"] < lazy["shuffle"]
    assert unified["all"] < 0.85 * online["all"]
    assert abs(lazy["all"] / online["all"] - 1) < 0.05


def test_the_lazy_loop_gives_the_same_attention(device):
    q, (k, v) = torch.randn(1, GROUP, D, device=device), torch.randn(2, 1, 1, 3 * TILE, D, device=device)
    outs = []
    for kernel in (split_decode_kernel, lazy_kernel()):
        m, l, acc = (torch.empty(GROUP * n, device=device) for n in (1, 1, D))
        sizes = {"D": D, "GROUP": GROUP, "ROWS": 16, "TILE": TILE}
        launch(kernel, (1, 1, 1), 9 * q, k, v, m, l, acc, GROUP, 3 * TILE, D**-0.5, outputs=(m, l, acc), **sizes)
        outs.append(acc.view(GROUP, D) / l[:, None])
    torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-5)
