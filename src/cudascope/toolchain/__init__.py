"""The compilers g++, clang++, NVRTC and ptxas, their headers, the cache of their results, and loops of machine code.

Public: cache.cache_dir, cache.publish, compiler.cached_library and sass.SassLoop.
"""
