"""The CPU backend: the definition of every op in NumPy, and native kernels for f32 and stored
weights."""

from heliograph_backends.cpu.backend import CpuBackend, CpuDevice

__all__ = ["CpuBackend", "CpuDevice"]
