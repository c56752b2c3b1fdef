"""The only interface to CUDA: the abstract driver, and CuPy and cuBLAS behind it. Imports only
`contract`."""
