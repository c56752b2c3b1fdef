"""Devices with CUDA: GPUs of NVIDIA's, through CuPy.

`driver` is the only door to CUDA, `cupy_driver` what is behind it; everything else is Python that runs and is
tested without a GPU. `kernels/` has the kernels' source, a fixed set that is compiled once and cached.
"""

from heliograph_backends.cuda.backend import CudaBackend
from heliograph_backends.cuda.device import CudaDevice

#: So that a checkout that is not installed can name this package as a plugin.
BACKEND = CudaBackend

__all__ = ["BACKEND", "CudaBackend", "CudaDevice"]
