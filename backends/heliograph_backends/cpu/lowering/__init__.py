"""Lowers groups of graph nodes to steps of a native program.

Pure: it depends on `planning` and on `cpu.kernels.program`, which has no native code.
"""
