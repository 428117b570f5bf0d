"""Arithmetic on sizes."""


def cdiv(numerator: int, denominator: int) -> int:
    """⌈numerator / denominator⌉."""
    return -(-numerator // denominator)
