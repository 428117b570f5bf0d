"""Triton kernels compiled for a GPU and executed on the CPU.

It imports kernels and the folders below kernels. Public: `cudascope.triton_compiled`, and launches.triton_target.
"""
