"""The arguments and the shape of a launch. Public: `cudascope.reachable`, and launch_shape.MAX_SHARED_BYTES."""
