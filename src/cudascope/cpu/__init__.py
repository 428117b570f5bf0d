"""A kernel built for the CPU, with the C++ runtime (runtime/), its rules, and the headers that a
kernel includes (include/).

It imports translate and the folders below translate. Public: nothing.
"""
