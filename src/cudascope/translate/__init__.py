"""CUDA C++ and PTX as the C++ that the host's compiler takes, and changes to its assembly. Public: nothing."""
