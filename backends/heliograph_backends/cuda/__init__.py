"""Devices with CUDA: NVIDIA GPUs, through CuPy.

`driver` is the only interface to CUDA, and `cupy_driver` implements it. All other modules are
Python that runs and is tested without a GPU. `kernels/` has the source of the kernels, a fixed set
that is compiled once and cached.
"""

from heliograph_backends.cuda.backend import CudaBackend
from heliograph_backends.cuda.device import CudaDevice

#: Lets a checkout that is not installed name this package as a plugin.
BACKEND = CudaBackend

__all__ = ["BACKEND", "CudaBackend", "CudaDevice"]
