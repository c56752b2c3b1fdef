"""`cupy.cuda.runtime` of the module `cupy` whose CUDA is this host."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from inspect import ismethod
from typing import TYPE_CHECKING, Any

from cuda_emulation.library import record, signature

if TYPE_CHECKING:
    from cuda_emulation.cupy_module import Cuda


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError{status}")
        self.status = status


class Recorded:
    """An object whose methods take what CuPy's take, and fail when it is scripted."""

    def __init__(self, place: str, failures: dict[str, deque[int]]) -> None:
        for name in [one for one in dir(self) if not one.startswith("_") and ismethod(getattr(self, one))]:
            setattr(self, name, self._checked(f"{place}.{name}", getattr(self, name), failures))

    @staticmethod
    def _checked(name: str, function: Callable[..., Any], failures: dict[str, deque[int]]) -> Any:
        parameters = signature(record()["cuda"][name])

        def call(*arguments: Any, **named: Any) -> Any:
            parameters.bind(*arguments, **named)
            if failures.get(name):
                status = failures[name].popleft()
                if name.endswith("Query"):
                    return status
                raise CUDARuntimeError(status)
            return function(*arguments, **named)

        return call


class Runtime(Recorded):
    """`cupy.cuda.runtime`."""

    CUDARuntimeError = CUDARuntimeError
    memcpyDefault = 4
    hostAllocPortable = 1

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self.registered: dict[int, int] = {}
        self.copies_2d = 0
        super().__init__("cuda.runtime", cuda.failures)

    def getDeviceCount(self) -> int:
        return 2

    def runtimeGetVersion(self) -> int:
        return 13000

    def driverGetVersion(self) -> int:
        return 13010

    def getDeviceProperties(self, device: int) -> dict[str, Any]:
        return {
            "name": b"emulated by CuPy", "major": 9, "minor": 0, "multiProcessorCount": 4,
            "l2CacheSize": 2**20, "sharedMemPerBlockOptin": 2**17, "integrated": 0,
        }  # fmt: skip

    def memGetInfo(self) -> tuple[int, int]:
        return 2**30, 2**30

    def deviceCanAccessPeer(self, device: int, peer: int) -> bool:
        return device != peer

    def deviceEnablePeerAccess(self, peer: int) -> None:
        pass

    def hostRegister(self, ptr: int, size: int, flags: int) -> None:
        self.registered[ptr] = flags

    def hostUnregister(self, ptr: int) -> None:
        del self.registered[ptr]

    def eventQuery(self, event: int) -> int:
        return 600 if self._cuda.is_busy else 0

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:
        self._cuda.put(stream, lambda: ctypes.memmove(dst, src, size))

    def memcpyPeerAsync(self, dst: int, into: int, src: int, of: int, size: int, stream: int) -> None:
        self._cuda.put(stream, lambda: ctypes.memmove(dst, src, size))

    def memcpy2DAsync(
        self, dst: int, dpitch: int, src: int, spitch: int, width: int, height: int, kind: int, stream: int
    ) -> None:
        if max(dpitch, spitch) >= 2**31 or min(dpitch, spitch) < width:
            raise CUDARuntimeError(12)
        self.copies_2d += 1
        for row in range(height):
            self.memcpyAsync(dst + row * dpitch, src + row * spitch, width, kind, stream)

    def memsetAsync(self, ptr: int, value: int, size: int, stream: int) -> None:
        self._cuda.put(stream, lambda: ctypes.memset(ptr, value, size))
