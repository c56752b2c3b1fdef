"""Groups of graph nodes to steps of a native program.

Pure: imports `planning` and the words of `cpu.kernels.program`.
"""
