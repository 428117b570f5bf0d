"""The kernels of the exercises, solutions with their holes marked. They are read as text (`exercises.code`)."""
