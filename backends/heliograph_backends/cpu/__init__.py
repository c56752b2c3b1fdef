"""The CPU backend: NumPy's definition of every op, and native kernels for what is f32."""

from heliograph_backends.cpu.device import CpuBackend, CpuDevice

__all__ = ["CpuBackend", "CpuDevice"]
