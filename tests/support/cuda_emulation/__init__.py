"""A GPU that is this host: the kernels' own source, compiled by the host's compiler, behind the driver's
interface.

What it shows: that kernels compute what the definition does, that parameters have the fields that kernels
read, and what plans, streams, events and errors do. What it cannot show: races, speed, and anything of CUDA
itself.
"""

from cuda_emulation.compiling import compile_all, why_not
from cuda_emulation.driver import EmulatedDriver

__all__ = ["EmulatedDriver", "compile_all", "why_not"]
