"""The reader of C++: tokens, conditions, declarations, types, a source. Public: `cudascope.CompileError`."""
