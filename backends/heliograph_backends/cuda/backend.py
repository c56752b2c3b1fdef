"""The backend `cuda`: one device for each requested GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from heliograph_backends.contract import CONTRACT_VERSION, Backend, Parameter, ParameterKind
from heliograph_backends.cuda.device import CudaDevice
from heliograph_proto.errors import ConfigurationError, HeliographError


class CudaBackend(Backend):
    """GPUs through CuPy. Without CuPy or a GPU it has no devices, and reports the reason."""

    name = "cuda"
    contract_version = CONTRACT_VERSION
    parameters = (
        Parameter("gpu", ParameterKind.COUNT, "the GPU's number; by default each device has the next one"),
        Parameter("memory", ParameterKind.SIZE, "memory that it may use; 0: nearly all that is free"),
        Parameter("tf32", ParameterKind.COUNT, "1: products of f32 may round their operands to tf32"),
    )

    def __init__(self, parameters: Sequence[Mapping[str, Any]] = ({},)) -> None:
        self._devices: list[CudaDevice] = []
        self._reason = ""
        self._features: Mapping[str, str] = {}
        try:
            self._start(parameters)
        except Exception as error:
            for device in self._devices:
                device.close()
            self._devices = []
            self._reason = in_words(error)

    def _start(self, parameters: Sequence[Mapping[str, Any]]) -> None:
        # Imported here because CuPy takes half a second and may be missing.
        from heliograph_backends.cuda.driver.cupy_driver import open_gpu
        from heliograph_backends.cuda.driver.cupy_gpus import count_gpus, versions

        available = count_gpus()
        self._features = versions()
        for number, one in enumerate(parameters):
            gpu = one.get("gpu", number)
            if gpu >= available:
                raise ConfigurationError(f"there is no GPU {gpu}: {available} in all, from 0")
            if one.get("tf32", 0) > 1:
                raise ConfigurationError(f"tf32={one['tf32']} is neither 0 nor 1")
            memory, tf32 = one.get("memory", 0), bool(one.get("tf32", 0))
            self._devices.append(CudaDevice(f"cuda{number}", open_gpu(gpu), memory, tf32=tf32))

    def devices(self) -> tuple[CudaDevice, ...]:
        return tuple(self._devices)

    def why_unavailable(self) -> str:
        return self._reason

    def features(self) -> Mapping[str, str]:
        return self._features


def in_words(error: Exception) -> str:
    """Return an error in one line: a Heliograph error with its advice, others by class if they have
    no text."""
    if isinstance(error, HeliographError):
        return f"{error.message}; {error.advice}" if error.advice else error.message
    return str(error) or type(error).__name__
