"""The classes of kernels, and their launches on a CPU and on a GPU.

It imports watch and the folders below watch. Public: `cudascope.CudaKernel` and `cudascope.PtxKernel`.
"""
