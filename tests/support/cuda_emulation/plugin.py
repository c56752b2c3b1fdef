"""Emulated GPUs as a plugin of a daemon: `serve --backend cuda_emulation.plugin --device emulated`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cuda_emulation.driver import EmulatedDriver
from heliograph_backends.contract import CONTRACT_VERSION, Backend
from heliograph_backends.cuda import CudaDevice


class EmulatedBackend(Backend):
    """One device for each specification."""

    name = "emulated"
    contract_version = CONTRACT_VERSION

    def __init__(self, parameters: Sequence[Mapping[str, Any]] = ({},)) -> None:
        self._devices = [
            CudaDevice(f"emulated{number}", EmulatedDriver(number, lazy=True))
            for number, _ in enumerate(parameters)
        ]

    def devices(self) -> Sequence[CudaDevice]:
        return self._devices


BACKEND = EmulatedBackend
