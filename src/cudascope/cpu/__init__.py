"""A kernel built for the CPU: the build, the C++ runtime, the rules, the headers for kernels. Public: nothing."""
