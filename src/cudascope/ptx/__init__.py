"""PTX read as values: its entries, statements and source lines. Public: module.read_module."""
