"""What lessons run and no user imports: the scoreboard, workloads, allocators, what sharing saves, speed."""
