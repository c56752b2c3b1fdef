"""The only door to CUDA: the driver interface, and CuPy and cuBLAS behind it. Imports `contract` alone."""
