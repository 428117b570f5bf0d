// NVRTC has what kernels use of it built in.
