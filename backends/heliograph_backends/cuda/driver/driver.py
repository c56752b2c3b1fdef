"""The backend's only interface to CUDA, for one GPU.

`cupy_driver` implements it with CuPy. Addresses are plain numbers; streams, marks and graphs are
opaque. A call that CUDA rejects raises `DriverError`, which `failures` maps to Heliograph's errors.
Tests have a driver that runs the kernels' source on the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from heliograph_backends.cuda.driver.parameters import Parameters

#: A queue of the device, a point in one, a recording of one, and a kernel built from a source.
Queue: TypeAlias = Any
Mark: TypeAlias = Any
Recording: TypeAlias = Any
Kernel: TypeAlias = Any
Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]


#: The status if the compiler rejects a source.
NOT_COMPILED = -2


class DriverError(Exception):
    """CUDA rejected a call or failed; `status` is cudaError_t's number, NOT_COMPILED, or -1 if
    there is none."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Properties:
    """The properties of a GPU."""

    name: str
    #: Such as "0000:c1:00.0".
    pci_id: str
    #: Such as (9, 0).
    compute_capability: tuple[int, int]
    multiprocessors: int
    l2_bytes: int
    #: The most shared memory of a block.
    shared_bytes: int
    integrated: bool = False


@dataclass(frozen=True, slots=True)
class DeviceBlock:
    """Device memory; it lives as long as the object."""

    address: int
    size_bytes: int
    #: The object that owns the memory.
    owner: Any


@dataclass(frozen=True, slots=True)
class Gemm:
    """c = a b over matrices in cuBLAS's order, columns first: [m, k] [k, n] -> [m, n]."""

    sizes: tuple[int, int, int]
    #: True for a and b if they are transposed.
    transposed: tuple[bool, bool]
    #: Names of the data types of a, b and c.
    types: tuple[str, str, str]
    #: Elements between columns.
    leading: tuple[int, int, int]
    #: Elements between the matrices of a batch.
    strides: tuple[int, int, int] = (0, 0, 0)
    batch: int = 1


class Driver(ABC):
    """One GPU. Calls on queues return before the device is done, all others after."""

    #: NumPy or CuPy.
    xp: Any
    properties: Properties
    #: The GPU's number, for copies between peers.
    number: int

    @abstractmethod
    def memory(self) -> tuple[int, int]:
        """Return the bytes that are free on the card, and all bytes."""

    @abstractmethod
    def set_limit(self, size_bytes: int) -> None:
        """Set the most bytes that `allocate` and the array library may take together."""

    @abstractmethod
    def allocate(self, size_bytes: int) -> DeviceBlock:
        """Allocate device memory, aligned to 256."""

    @abstractmethod
    def allocate_pinned(self, size_bytes: int) -> Bytes:
        """Allocate host memory that the device can access, aligned to 64; it lives as long as the
        array."""

    @abstractmethod
    def register(self, memory: Bytes) -> Callable[[], None]:
        """Pin memory of this process in place. Returns a call that unpins it."""

    @abstractmethod
    def queue(self) -> Queue:
        """Return a new ordered queue, which waits for the default one and for which the default one
        waits."""

    @property
    @abstractmethod
    def default_queue(self) -> Queue:
        """The queue whose work follows all work put on other queues before."""

    @abstractmethod
    def using(self, queue: Queue) -> AbstractContextManager[None]:
        """Make the GPU this thread's, and the queue the array library's."""

    @abstractmethod
    def mark(self, queue: Queue) -> Mark:
        """Return a mark at the present end of a queue."""

    @abstractmethod
    def time_mark(self, queue: Queue) -> Mark:
        """Return a mark that notes when the device reaches it."""

    @abstractmethod
    def elapsed_us(self, first: Mark, second: Mark) -> float:
        """Return the time between two time marks, which the device has reached."""

    @abstractmethod
    def is_reached(self, mark: Mark) -> bool:
        """True if the device has reached the mark. Raises DriverError if it failed before."""

    @abstractmethod
    def wait(self, mark: Mark) -> None:
        """Wait until the device has reached the mark."""

    @abstractmethod
    def wait_for(self, queue: Queue, mark: Mark) -> None:
        """Make the queue wait on the device."""

    @abstractmethod
    def copy(self, target: int, source: int, size_bytes: int, queue: Queue) -> None:
        """Copy bytes between any memory that this device can access."""

    @abstractmethod
    def copy_2d(
        self,
        target: int,
        target_step: int,
        source: int,
        source_step: int,
        width: int,
        count: int,
        queue: Queue,
    ) -> None:
        """Copy `count` runs of `width` bytes."""

    @abstractmethod
    def copy_from_peer(self, target: int, source: int, peer: int, size_bytes: int, queue: Queue) -> None:
        """Copy bytes from another GPU, directly if possible."""

    @abstractmethod
    def fill(self, address: int, value: int, size_bytes: int, queue: Queue) -> None:
        """Fill bytes with a value."""

    @abstractmethod
    def array(
        self, address: int, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...], owner: Any
    ) -> Any:
        """Return an array of `xp` over memory that the device can access; it keeps `owner`
        alive."""

    @abstractmethod
    def build(self, source: str) -> Kernel:
        """Compile and load the kernel of a chain's source (see `sources.text_of_chain`). Raises
        DriverError, with status NOT_COMPILED if the compiler rejects it."""

    @abstractmethod
    def launch(
        self,
        kernel: str | Kernel,
        grid: tuple[int, int, int],
        threads: int,
        parameters: Parameters,
        queue: Queue,
        shared_bytes: int = 0,
    ) -> None:
        """Run a kernel of `sources`, or one that was built. Parameters may change when this
        returns."""

    @abstractmethod
    def gemm(self, product: Gemm, a: int, b: int, c: int, queue: Queue, *, tf32: bool) -> None:
        """Run a cuBLAS product, summed in f32, or f64 for f64. With `tf32`, f32 operands may be
        rounded to it."""

    @abstractmethod
    def failure(self, error: Exception) -> DriverError | None:
        """Return CUDA's error behind an error that the array library raised; None if it was not
        CUDA's."""

    @abstractmethod
    def capture(self, issue: Callable[[Queue], None]) -> Recording:
        """Record the work that `issue` puts on a queue, without running it."""

    @abstractmethod
    def replay(self, recording: Recording, queue: Queue) -> None:
        """Run a recording."""

    def warmup(self) -> None:
        """Compile and load the kernels. Default: at their first use."""

    def close(self) -> None:
        """Give the device's memory back. Default: nothing."""
