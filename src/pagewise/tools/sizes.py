"""Arithmetic on sizes."""


def cdiv(numerator: int, denominator: int) -> int:
    """⌈numerator / denominator⌉."""
    return -(-numerator // denominator)


def padded(head_size: int) -> int:
    """BLOCK_D: a power of two, at least the 16 that a matrix product takes."""
    return max(16, 1 << (head_size - 1).bit_length())
