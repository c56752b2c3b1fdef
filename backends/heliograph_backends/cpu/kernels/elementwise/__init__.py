"""The interpreter of elementwise programs."""
