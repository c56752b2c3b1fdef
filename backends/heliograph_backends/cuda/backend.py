"""The backend `cuda`: one device for each GPU that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from heliograph_backends.contract import CONTRACT_VERSION, Backend, Parameter, ParameterKind
from heliograph_backends.cuda.device import CudaDevice
from heliograph_backends.cuda.driver.driver import Driver
from heliograph_proto.errors import ConfigurationError, HeliographError


class CudaBackend(Backend):
    """GPUs through CuPy. Without CuPy or a GPU it has no devices, and says why."""

    name = "cuda"
    contract_version = CONTRACT_VERSION
    parameters = (
        Parameter("gpu", ParameterKind.COUNT, "the GPU's number; by default each device has the next one"),
        Parameter("memory", ParameterKind.SIZE, "memory that it may use; 0: nearly all that is free"),
        Parameter("tf32", ParameterKind.COUNT, "1: products of f32 may round their operands to tf32"),
    )

    def __init__(self, parameters: Sequence[Mapping[str, Any]] = ({},)) -> None:
        self._devices: list[CudaDevice] = []
        self._why = ""
        self._features: Mapping[str, str] = {}
        try:
            self._start(parameters)
        except Exception as error:
            for device in self._devices:
                device.close()
            self._devices = []
            self._why = in_words(error)

    def _start(self, parameters: Sequence[Mapping[str, Any]]) -> None:
        # Here and not above: CuPy takes half a second, and may be missing.
        from heliograph_backends.cuda.driver.cupy_driver import open_gpu
        from heliograph_backends.cuda.driver.cupy_gpus import count_gpus, versions

        there = count_gpus()
        self._features = versions()
        for number, one in enumerate(parameters):
            gpu = one.get("gpu", number)
            if gpu >= there:
                raise ConfigurationError(f"there is no GPU {gpu}: {there} in all, from 0")
            if one.get("tf32", 0) > 1:
                raise ConfigurationError(f"tf32={one['tf32']} is neither 0 nor 1")
            self._devices.append(_device(number, gpu, one, open_gpu))

    def devices(self) -> tuple[CudaDevice, ...]:
        return tuple(self._devices)

    def why_unavailable(self) -> str:
        return self._why

    def features(self) -> Mapping[str, str]:
        return self._features


def in_words(error: Exception) -> str:
    """An error in one line: ours with its advice, others with their class where they say nothing."""
    if isinstance(error, HeliographError):
        return f"{error.message}; {error.advice}" if error.advice else error.message
    return str(error) or type(error).__name__


def _device(
    number: int, gpu: int, parameters: Mapping[str, Any], open_gpu: Callable[[int], Driver]
) -> CudaDevice:
    return CudaDevice(
        f"cuda{number}", open_gpu(gpu), parameters.get("memory", 0), tf32=bool(parameters.get("tf32", 0))
    )
