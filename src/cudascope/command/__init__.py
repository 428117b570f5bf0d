"""The command `cudascope` and the cell magic `%%cuda`.

It may import every other folder of the package. Public: nothing. A shell and `%load_ext cudascope` start it.
"""
