"""The reader of C++: tokens, conditions, declarations, signatures of kernels, types, and a source with its files.

It imports no other folder. Public: `cudascope.CompileError`.
"""
