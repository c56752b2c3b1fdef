"""The interpreter of elementwise programs. Imports `vector` and `program`."""
