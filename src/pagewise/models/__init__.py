"""Small decoders that run real checkpoints.

A model knows nothing of caches or kernels: it calls `attend(layer, q, k, v)` and nothing else about attention.
"""
