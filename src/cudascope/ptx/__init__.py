"""PTX read as values: its entries, statements and source lines.

It imports toolchain and the folders below toolchain. Public: module.read_module.
"""
