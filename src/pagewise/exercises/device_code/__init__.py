"""Kernels that solve exercises. `exercises.code` reads them as text."""
