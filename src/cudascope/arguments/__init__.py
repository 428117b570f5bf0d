"""The arguments and the shape of a launch: arrays, values, and what a kernel's parameters accept.

It imports cpp and gpus. Public: `cudascope.reachable`, and launch_shape.MAX_SHARED_BYTES.
"""
