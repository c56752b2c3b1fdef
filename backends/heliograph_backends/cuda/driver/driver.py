"""What the backend needs of CUDA, for one GPU: the only door to it.

`cupy_driver` goes through it to CuPy. Addresses are plain numbers, streams, marks and graphs whatever the
driver says. A call that CUDA refuses raises `DriverError`; which of ours that is, `failures` decides. Tests
bring a driver that runs the kernels' source on the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from heliograph_backends.cuda.driver.parameters import Parameters

#: A queue of the device, a point in one, what was captured from one, and what was made of a source.
Queue: TypeAlias = Any
Mark: TypeAlias = Any
Recording: TypeAlias = Any
Kernel: TypeAlias = Any
Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]


#: The status where the compiler refused a source.
NOT_COMPILED = -2


class DriverError(Exception):
    """CUDA refused or failed; `status` is cudaError_t's number, NOT_COMPILED, or -1 for what has none."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Properties:
    """What a GPU is."""

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
    #: What keeps it.
    owner: Any


@dataclass(frozen=True, slots=True)
class Gemm:
    """c = a b over matrices in cuBLAS's order, columns first: [m, k] [k, n] -> [m, n]."""

    sizes: tuple[int, int, int]
    #: Whether a and b are transposed.
    transposed: tuple[bool, bool]
    #: Names of the data types of a, b and c.
    types: tuple[str, str, str]
    #: Elements between columns.
    leading: tuple[int, int, int]
    #: Elements between the matrices of a batch.
    strides: tuple[int, int, int] = (0, 0, 0)
    batch: int = 1


class Driver(ABC):
    """One GPU. Calls on queues return before the device is done, all others when they are."""

    #: NumPy or CuPy.
    xp: Any
    properties: Properties
    #: The GPU's number, for copies between peers.
    number: int

    @abstractmethod
    def memory(self) -> tuple[int, int]:
        """Bytes that are free on the card, and all."""

    @abstractmethod
    def set_limit(self, size_bytes: int) -> None:
        """The most bytes that `allocate` and the array library take together."""

    @abstractmethod
    def allocate(self, size_bytes: int) -> DeviceBlock:
        """Device memory, on a multiple of 256."""

    @abstractmethod
    def allocate_pinned(self, size_bytes: int) -> Bytes:
        """Host memory that the device reaches, on a multiple of 64; it lives as long as the array."""

    @abstractmethod
    def register(self, memory: Bytes) -> Callable[[], None]:
        """Pins memory of this process where it is; the call returned lets go of it."""

    @abstractmethod
    def queue(self) -> Queue:
        """A new ordered queue, which waits for the default one and is waited for by it."""

    @property
    @abstractmethod
    def default_queue(self) -> Queue:
        """The queue that is behind everything that was put on all others before."""

    @abstractmethod
    def using(self, queue: Queue) -> AbstractContextManager[None]:
        """Makes the GPU this thread's, and the queue the array library's."""

    @abstractmethod
    def mark(self, queue: Queue) -> Mark:
        """The present end of a queue."""

    @abstractmethod
    def is_reached(self, mark: Mark) -> bool:
        """Whether the device got there. Raises DriverError where it failed before."""

    @abstractmethod
    def wait(self, mark: Mark) -> None:
        """Waits until the device got there."""

    @abstractmethod
    def wait_for(self, queue: Queue, mark: Mark) -> None:
        """Has the queue wait, on the device."""

    @abstractmethod
    def copy(self, target: int, source: int, size_bytes: int, queue: Queue) -> None:
        """Copies bytes, wherever they lie that this device reaches."""

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
        """Copies `count` runs of `width` bytes."""

    @abstractmethod
    def copy_from_peer(self, target: int, source: int, peer: int, size_bytes: int, queue: Queue) -> None:
        """Copies bytes of another GPU, directly where the two can."""

    @abstractmethod
    def fill(self, address: int, value: int, size_bytes: int, queue: Queue) -> None:
        """Fills bytes."""

    @abstractmethod
    def array(
        self, address: int, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...], owner: Any
    ) -> Any:
        """An array of `xp` over memory that the device reaches, which keeps `owner`."""

    @abstractmethod
    def build(self, source: str) -> Kernel:
        """The kernel of a chain's source (see `sources.text_of_chain`), compiled and loaded. Raises
        DriverError, of status NOT_COMPILED where the compiler refuses it."""

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
        """Runs a kernel of `sources`, or one that was built. Parameters may change as soon as it returns."""

    @abstractmethod
    def gemm(self, product: Gemm, a: int, b: int, c: int, queue: Queue, *, tf32: bool) -> None:
        """Runs a product of cuBLAS, summed in f32, or f64 for f64. `tf32`: f32 operands may be rounded to
        it."""

    @abstractmethod
    def failure(self, error: Exception) -> DriverError | None:
        """What CUDA said, of an error that the array library raised; None if it was not CUDA's."""

    @abstractmethod
    def capture(self, issue: Callable[[Queue], None]) -> Recording:
        """Records what `issue` puts on a queue, without running it."""

    @abstractmethod
    def replay(self, recording: Recording, queue: Queue) -> None:
        """Runs what was recorded."""

    def warmup(self) -> None:
        """Compiles and loads the kernels. Default: with their first use."""

    def close(self) -> None:
        """Gives the device's memory back. Default: nothing."""
