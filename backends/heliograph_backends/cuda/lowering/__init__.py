"""Lowering of groups of graph nodes to launches of CUDA kernels.

Pure: imports `planning` and the parameters of `cuda.driver`.
"""
