"""The compilers g++, clang++, NVRTC and ptxas, their headers, and the cache of their results.

It imports arguments, cpp and gpus. Public: cache.cache_dir and cache.publish.
"""
