"""What lessons and benchmarks run and no user imports."""
