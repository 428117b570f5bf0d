"""The compilers: g++ or clang++, NVRTC and ptxas, the headers that they read, and the cache of what they made.

It imports arguments, cpp and gpus. Public: cache.cache_dir and cache.publish.
"""
