"""The classes of kernels, and their launches. Public: `cudascope.CudaKernel` and `cudascope.PtxKernel`."""
