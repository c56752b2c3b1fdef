"""The conformance suite over the CUDA backend on an emulated GPU: all of it but CUDA itself."""

from __future__ import annotations

import pytest
from cuda_emulation import EmulatedDriver, why_not

from heliograph_backends.conformance.pytest import conformance_tests
from heliograph_backends.cuda import CudaDevice

if why_not():
    pytest.skip(why_not(), allow_module_level=True)

TestConformance = conformance_tests(lambda: CudaDevice("cuda0", EmulatedDriver()), quick=True)
