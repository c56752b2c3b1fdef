"""CuPy itself: whether it can be imported, its GPUs, and its errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heliograph_backends.cuda.driver.driver import DriverError, Properties
from heliograph_backends.cuda.driver.failures import OUT_OF_MEMORY
from heliograph_proto.errors import ConfigurationError

try:
    import cupy as cupy  # imported by others from here, where its absence is explained
except ImportError as error:
    advice = "pip install 'heliograph[cuda12]', or [cuda13] for CUDA 13"
    raise ConfigurationError(f"CuPy cannot be imported: {error}", advice=advice) from None
except OSError as error:
    # CuPy creates its cache folder when it is imported.
    advice = "set CUPY_CACHE_DIR to a writable folder"
    raise ConfigurationError(f"CuPy cannot be imported: {error}", advice=advice) from None

#: From cublasStatus_t.
_ALLOCATION_FAILED = 3


def count_gpus() -> int:
    """Return the number of GPUs. Raises ConfigurationError, with the reason, if there are none."""
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise ConfigurationError(f"there is no GPU that CUDA can use: {error}") from None
    if not count:
        raise ConfigurationError("there is no GPU that CUDA can use")
    return count


def versions() -> Mapping[str, str]:
    """Return the versions of CuPy, and of CUDA's runtime and driver."""
    runtime = cupy.cuda.runtime
    return {
        "cupy": cupy.__version__,
        "cuda_runtime": _dotted(runtime.runtimeGetVersion()),
        "cuda_driver": _dotted(runtime.driverGetVersion()),
    }


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def properties_of(device: Any) -> Properties:
    """Return the properties of a GPU, given CuPy's Device."""
    found = cupy.cuda.runtime.getDeviceProperties(device.id)
    name = found["name"]
    return Properties(
        name.decode(errors="replace") if isinstance(name, bytes) else str(name),
        str(device.pci_bus_id).lower(),
        (int(found["major"]), int(found["minor"])),
        int(found["multiProcessorCount"]),
        int(found["l2CacheSize"]),
        int(found["sharedMemPerBlockOptin"]),
        bool(found["integrated"]),
    )


def failure(error: Exception) -> DriverError | None:
    """Return CUDA's error behind an error that CuPy raised; None if it was not CUDA's."""
    if isinstance(error, DriverError):
        return error
    if isinstance(error, cupy.cuda.memory.OutOfMemoryError):
        return DriverError(OUT_OF_MEMORY, str(error))
    kinds = cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError
    if isinstance(error, kinds):
        # The numbers of CUresult and cudaError_t agree for the errors that are distinguished here.
        return DriverError(int(error.status), str(error))
    library = type(error).__name__
    if library == "CUBLASError" and getattr(error, "status", None) == _ALLOCATION_FAILED:
        return DriverError(OUT_OF_MEMORY, str(error))
    if library == "CompileException":
        return DriverError(-1, f"a kernel does not compile: {error}")
    return DriverError(-1, str(error)) if library in ("CUBLASError", "NVRTCError") else None


class OnGpu:
    """A context on a GPU that turns CuPy's errors into DriverError. Any number of threads may be in
    it.

    It surrounds every call; a generator would take 1.5 us instead of 0.2.
    """

    __slots__ = ("_device",)

    def __init__(self, number: int) -> None:
        self._device = cupy.cuda.Device(number)

    def __enter__(self) -> None:
        try:
            self._device.__enter__()
        except Exception as error:
            _translate(error)
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._device.__exit__(kind, error, trace)
        if isinstance(error, Exception):
            _translate(error)


def _translate(error: Exception) -> None:
    """Raise DriverError for an error of CUDA's."""
    found = failure(error)
    if found is not None and found is not error:
        raise found from error
