// Kernels include it, and find what it has for them in simt.h.
