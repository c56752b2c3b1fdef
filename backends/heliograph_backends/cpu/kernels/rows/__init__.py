"""Kernels along rows: attention, softmax, norms, rope, moves."""
