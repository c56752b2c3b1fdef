"""The CPU backend: NumPy's definition of every op, and native kernels for f32 and for stored weights."""

from heliograph_backends.cpu.backend import CpuBackend, CpuDevice

__all__ = ["CpuBackend", "CpuDevice"]
