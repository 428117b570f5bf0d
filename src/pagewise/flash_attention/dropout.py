"""Dropout that can be drawn again: a weight is kept or dropped depending on its row, column and head (lesson 6).

The forward drops weights that it never stores, and the backward must drop the same ones. So the stream is counted, not
consumed. One draw of Philox4x32-10 decides over eight weights. Its counter is their position, its key is the seed:

    w₀ w₁ w₂ w₃ = Philox(counter = (row, column // 8, b · H + h, 0), key = seed)
    weight 8 · (column // 8) + 2 i + s is kept  iff  16-bit half s of wᵢ ≥ p · 2¹⁶

The result depends on no tile, no order and no device. The Triton kernels draw the same bits. Salmon et al. 2011.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int, Int64
from torch import Tensor

from pagewise.tools.checks import check_count, check_counts, check_number

DRAWS = 8  # weights that share one draw
LEVELS = 2**16  # p is rounded to a multiple of 1 / LEVELS, at most 1 − 1 / LEVELS


class Dropout(NamedTuple):
    """Each weight is dropped with probability p, rounded to `threshold` / LEVELS; those kept grow by 1 / (1 − p)."""

    p: float = 0.0
    seed: Int64[Tensor, ""] | None = None  # on the device of q; needed if p > 0

    @classmethod
    def checked(cls, p: float, seed: int | Tensor | None, device: torch.device) -> "Dropout":
        """Check the arguments of a public function. Without a seed, torch's generator draws one."""
        check_number("dropout_p", p, low=0.0, below=1.0)
        if isinstance(seed, Tensor):
            if seed.dtype != torch.int64 or seed.numel() != 1:
                raise ValueError(f"dropout_seed must be an int or one int64, got {seed.dtype} {list(seed.shape)}")
            seed = seed.reshape(()).to(device)
        elif seed is not None:
            check_count("dropout_seed", seed, minimum=-(2**63))
            seed = torch.full((), int(seed), dtype=torch.int64, device=device) if p else None
        elif p:
            seed = torch.randint(2**63 - 1, (), dtype=torch.int64, device=device)
        return cls(float(p), seed if p else None)

    @property
    def threshold(self) -> int:
        """A weight is kept iff its 16-bit draw is at least this."""
        return min(round(self.p * LEVELS), LEVELS - 1)

    @property
    def growth(self) -> float:
        """The factor of the weights that are kept: 1 / (1 − p) for the p that the draws have."""
        return LEVELS / (LEVELS - self.threshold)

    def keep(
        self, B: int, H: int, rows: Int[Tensor, " T"], cols: Int[Tensor, " S"], first_sequence: int = 0
    ) -> Bool[Tensor, "B H T S"]:
        """Whether each weight of these rows and columns is kept, in the B sequences from `first_sequence` on."""
        head = torch.arange(first_sequence * H, (first_sequence + B) * H, device=rows.device)[:, None, None]
        groups, of_col = torch.unique_consecutive(cols // DRAWS, return_inverse=True)
        words = torch.stack(philox(rows[:, None], groups, head, torch.zeros_like(head), self.seed), dim=-1)
        draws = torch.stack((words % LEVELS, words // LEVELS), dim=-1).flatten(-2)  # [B·H, T, groups, 8]
        return (draws[:, :, of_col, cols % DRAWS] >= self.threshold).unflatten(0, (B, H))


def dropout_mask(
    shape: tuple[int, int, int, int],
    dropout_p: float,
    dropout_seed: int | Int64[Tensor, ""],
    device: torch.device | str = "cpu",
) -> Bool[Tensor, "B H T S"]:
    """The weights that `flash_attention(…, dropout_p, dropout_seed)` keeps, whatever its backend and tiles.

    Args:
        shape: (B, H, T, S).
        dropout_p: probability in [0, 1) that a weight is dropped, rounded to a multiple of 2⁻¹⁶ up to 1 − 2⁻¹⁶.
        dropout_seed: 64 bits.

    Returns:
        True where a weight is kept.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
    """
    if not isinstance(shape, tuple | list) or len(shape) != 4:
        raise ValueError(f"shape must be (B, H, T, S), got {shape!r}")
    B, H, T, S = shape
    check_counts(minimum=0, B=B, H=H, T=T, S=S)
    if dropout_seed is None:
        raise TypeError("dropout_seed must be an int: without one there is no mask to draw again")
    dropout = Dropout.checked(dropout_p, dropout_seed, torch.device(device))
    if not dropout.p or not B * H * T * S:
        return torch.ones(B, H, T, S, dtype=torch.bool, device=device)
    return dropout.keep(B, H, torch.arange(T, device=device), torch.arange(S, device=device))


def philox(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, seed: Int64[Tensor, "..."]) -> tuple[Tensor, ...]:
    """Philox4x32-10: four random 32-bit words, as int64, of each counter (c0, c1, c2, c3) and a 64-bit key."""
    low, word = 2**32 - 1, 32
    k0, k1 = seed & low, (seed >> word) & low
    c0, c1, c2, c3 = torch.broadcast_tensors(c0, c1, c2, c3)
    for _ in range(10):
        # products of two 32-bit words wrap around in int64: the bits are right, so is the upper half after the mask
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> word & low) ^ c1 ^ k0, b & low, (a >> word & low) ^ c3 ^ k1, a & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c0, c1, c2, c3
