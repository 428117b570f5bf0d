"""Triton kernels executed on the CPU. Public: `cudascope.triton_compiled`, and launches.triton_target."""
