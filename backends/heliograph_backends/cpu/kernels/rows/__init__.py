"""Kernels along rows: attention, softmax, norms, rope, moves. Imports `matmul` and everything below it."""
