"""A kernel built for the CPU, with the C++ runtime (runtime/) and the headers that a kernel includes (include/).

It imports translate and the folders below translate. Public: nothing.
"""
