"""cuBLAS through its C interface. CuPy's own wrapper rejects every call while a stream is captured.

There is one handle for each GPU, not for each thread, and a few workspaces. A workspace belongs to
the work that was last put on a queue with it, so another queue waits for that work first. A graph
keeps the workspace that it was captured with; without an explicit one, each product of a graph
would allocate memory when the graph runs. See the cuBLAS manual, cublasSetWorkspace and CUDA Graphs
Support.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from heliograph_backends.cuda.driver.driver import DriverError, Gemm
from heliograph_backends.cuda.driver.failures import OUT_OF_MEMORY

#: Values of cudaDataType_t, cublasComputeType_t and cublasStatus_t.
_DATA = {"f32": 0, "f64": 1, "f16": 2, "bf16": 14}
_COMPUTE_F32, _COMPUTE_F64, _COMPUTE_TF32 = 68, 70, 77
_DEFAULT_ALGORITHM = -1
_ALLOCATION_FAILED = 3
#: The most workspaces of a GPU: that many queues multiply at the same time.
MOST_WORKSPACES = 4
#: The sizes that the manual recommends from compute capability 9.0 on, and before.
WORKSPACE_BYTES, OLD_WORKSPACE_BYTES = 32 * 2**20, 4 * 2**20
#: The limit of a grid's dimension along which batches go.
MOST_BATCH = 65535


@dataclass(eq=False)
class Workspace:
    """Memory for intermediate results of products."""

    address: int
    #: The object that owns the memory.
    owner: Any
    #: The queue whose work was the last to use it.
    queue: Any = None


class MultiplyingQueue(Protocol):
    """The properties of a queue that products need."""

    @property
    def handle(self) -> int:
        """Its stream's number for CUDA."""

    #: True if it records the work that is put on it instead of running it.
    captures: bool
    #: Its workspace; None before its first product.
    workspace: Workspace | None


class Library:
    """The functions of cuBLAS that are used, from the library that CuPy has loaded. Each raises
    DriverError."""

    def __init__(self, path: str) -> None:
        """Load the functions. `path` is a library that depends on cuBLAS."""
        library = ctypes.CDLL(path)
        size, pointer, number = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int
        matrix = [pointer, number, size, size]
        self._create = self._function(library, "cublasCreate_v2", pointer)
        self._destroy = self._function(library, "cublasDestroy_v2", pointer)
        self._set_stream = self._function(library, "cublasSetStream_v2", pointer, pointer)
        self._set_workspace = self._function(
            library, "cublasSetWorkspace_v2", pointer, pointer, ctypes.c_size_t
        )
        self._multiply = self._function(
            library, "cublasGemmStridedBatchedEx_64",
            pointer, number, number, size, size, size, pointer, *matrix, *matrix, pointer, *matrix,
            size, number, number,
        )  # fmt: skip

    @staticmethod
    def _function(library: ctypes.CDLL, name: str, *types: Any) -> Callable[..., None]:
        function = getattr(library, name)
        function.argtypes, function.restype = types, ctypes.c_int

        def call(*arguments: Any) -> None:
            status = function(*arguments)
            if status:
                raise DriverError(
                    OUT_OF_MEMORY if status == _ALLOCATION_FAILED else -1,
                    f"{name} answered with cuBLAS status {status}",
                )

        return call

    def create(self) -> int:
        """Return a handle on this thread's GPU."""
        handle = ctypes.c_void_p()
        self._create(ctypes.byref(handle))
        return handle.value or 0

    def destroy(self, handle: int) -> None:
        self._destroy(handle)

    def use(self, handle: int, stream: int, workspace: int, size_bytes: int) -> None:
        """Set the stream and the workspace of the next calls; setting a stream resets the
        workspace."""
        self._set_stream(handle, stream)
        self._set_workspace(handle, workspace, size_bytes)

    def multiply(self, handle: int, product: Gemm, a: int, b: int, c: int, *, tf32: bool) -> None:
        """Compute a product, in parts if the batch is too large for one call."""
        wide = product.types[2] == "f64"
        one, nothing = _ADDRESSES[wide]
        compute = _COMPUTE_F64 if wide else _COMPUTE_F32
        if tf32 and product.types[0] == "f32":
            compute = _COMPUTE_TF32
        types = [_DATA[name] for name in product.types]
        turns = [int(turned) for turned in product.transposed]
        for start in range(0, product.batch, MOST_BATCH):
            at = (
                base + start * stride * _ITEM_BYTES[name]
                for base, stride, name in zip((a, b, c), product.strides, product.types, strict=True)
            )
            first, second, third = zip(at, types, product.leading, product.strides, strict=True)
            self._multiply(
                handle, *turns, *product.sizes, one, *first, *second, nothing, *third,
                min(MOST_BATCH, product.batch - start), compute, _DEFAULT_ALGORITHM,
            )  # fmt: skip


_ITEM_BYTES = {"f32": 4, "f64": 8, "f16": 2, "bf16": 2}
#: The factors of products and of the previous results, in f32 and f64, and their addresses: made
#: once, since arrays and their addresses would take a third of a call's time.
_SCALARS = tuple(np.array([1, 0], type) for type in (np.float32, np.float64))
_ADDRESSES = tuple((int(one.ctypes.data), int(one.ctypes.data) + one.itemsize) for one in _SCALARS)


class Products:
    """The products of one GPU. Thread-safe; one thread multiplies at a time, which takes
    microseconds."""

    def __init__(
        self,
        library: Library,
        workspace: Callable[[], Workspace],
        workspace_bytes: int,
        order: Callable[[Any, Any], None],
    ) -> None:
        """Create the products of a GPU. `workspace` makes a workspace; `order(queue, other)` makes
        a queue wait for the work on another one."""
        self._library = library
        self._make = workspace
        self._bytes = workspace_bytes
        self._order = order
        self._handle = 0
        self._workspaces: list[Workspace] = []
        self._given = 0
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"<Products with {len(self._workspaces)} workspaces>"

    def multiply(self, product: Gemm, a: int, b: int, c: int, queue: MultiplyingQueue, *, tf32: bool) -> None:
        """Put a product on a queue of this thread's GPU. Raises DriverError."""
        with self._lock:
            self._handle = self._handle or self._library.create()
            workspace = queue.workspace = queue.workspace or self._next(queue)
            with self.in_order(workspace, queue):
                self._library.use(self._handle, queue.handle, workspace.address, self._bytes)
                self._library.multiply(self._handle, product, a, b, c, tf32=tf32)

    @contextmanager
    def in_order(self, workspace: Workspace | None, queue: MultiplyingQueue) -> Iterator[None]:
        """Let work on a queue use a workspace inside: it follows the work of other queues that use
        it."""
        if workspace is None or queue.captures:
            yield
            return
        with self._lock:
            if workspace.queue is not None and workspace.queue is not queue:
                self._order(queue, workspace.queue)
            workspace.queue = queue
            yield

    def _next(self, queue: MultiplyingQueue) -> Workspace:
        """Return a workspace for a queue: a new one up to the limit. Captured products make
        none."""
        if len(self._workspaces) < MOST_WORKSPACES and not (self._workspaces and queue.captures):
            self._workspaces.append(self._make())
            return self._workspaces[-1]
        self._given += 1
        return self._workspaces[self._given % len(self._workspaces)]

    def close(self) -> None:
        """Free everything on this thread's GPU. Raises DriverError."""
        with self._lock:
            handle, self._handle = self._handle, 0
            self._workspaces.clear()
            if handle:
                self._library.destroy(handle)
