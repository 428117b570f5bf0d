"""Experiments that lessons run: the scoreboard, workloads, allocators, the benefit of sharing, benchmarks."""
