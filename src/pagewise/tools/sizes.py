"""Arithmetic on sizes."""


def cdiv(numerator: int, denominator: int) -> int:
    """⌈numerator / denominator⌉ of integers (or of tensors of integers)."""
    return -(-numerator // denominator)
