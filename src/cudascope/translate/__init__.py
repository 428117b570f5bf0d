"""CUDA C++ and PTX as the C++ that the host's compiler takes, and changes to its assembly.

It imports ptx and the folders below ptx. Public: nothing.
"""
