// The host's functions: a kernel has no use for them.
