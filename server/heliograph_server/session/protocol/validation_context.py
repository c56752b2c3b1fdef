"""The context in which commands are validated: handles, limits, queues and memory. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from heliograph_proto import commands as c
from heliograph_proto.errors import (
    HeliographError,
    LimitExceededError,
    OutOfMemoryError,
    UnknownHandleError,
)
from heliograph_proto.sessions import Limits
from heliograph_proto.types import TensorType
from heliograph_server.resources.checks import unknown_device
from heliograph_server.resources.device_names import DeviceNames
from heliograph_server.resources.handles import (
    DeviceQueue,
    HandleStorage,
    HandleTable,
    StreamHandle,
    TensorHandle,
    layout,
)
from heliograph_server.resources.memories import FindMemory, plain_memory
from heliograph_server.resources.quotas import Holding, QuotaKind
from heliograph_server.session.protocol.dependencies import CommandState
from heliograph_server.session.protocol.instructions import Task

Allocation: TypeAlias = c.Allocate | c.AllocateBuffer | c.AllocateTensors


class ValidationContext:
    """Handles, limits, memory and device queues. `open_queue` is called for each new queue."""

    def __init__(
        self,
        handles: HandleTable,
        limits: Limits,
        devices: tuple[str, ...],
        open_queue: Callable[[DeviceQueue], None],
        memory: FindMemory = plain_memory,
        holding: Holding | None = None,
        names: DeviceNames | None = None,
    ) -> None:
        """`holding`: the session's share of its tenant's account. `names`: what the client's names
        of devices stand for."""
        self._holding = holding
        self._names = names or DeviceNames()
        self.handles = handles
        self.limits = limits
        self.open_queue = open_queue
        self.memory = memory
        #: The queue of each device for work outside named streams; None until it is needed.
        self.queues: dict[str, DeviceQueue | None] = dict.fromkeys(devices)
        self._default = StreamHandle(DeviceQueue(""))
        #: Inline bytes of commands that have not retired.
        self.inline_bytes = 0
        #: The size of the memory shared with the client; 0: none.
        self.shared_bytes = 0
        #: Raises PermissionDeniedError for the address of a daemon that commands may not name.
        self.check_peer: Callable[[str], None] = lambda _address: None
        #: Removes a variable of the session by name. Raises UnknownHandleError, InvalidArgumentError.
        self.take_variable: Callable[[str], TensorHandle] = _no_variable

    def hold(self, state: CommandState, inline_bytes: int) -> None:
        """Count the memory held for the command. Raises LimitExceededError."""
        if self.inline_bytes + inline_bytes > self.limits.in_flight_bytes:
            raise LimitExceededError(
                f"commands in flight hold {self.inline_bytes:,} bytes of data and results, "
                f"{inline_bytes:,} more would pass the limit of {self.limits.in_flight_bytes:,}",
                advice="wait for completions",
            )
        if inline_bytes and self._holding is not None:
            self._holding.take(QuotaKind.STAGING, inline_bytes)
        state.inline_bytes = inline_bytes
        self.inline_bytes += inline_bytes

    def give_back(self, state: CommandState, size_bytes: int) -> None:
        """Hold this much less for the command, down to nothing."""
        given = min(size_bytes, state.inline_bytes)
        state.inline_bytes -= given
        self.inline_bytes -= given
        if given and self._holding is not None:
            self._holding.give(QuotaKind.STAGING, given)

    def device_queue(self, device: str) -> DeviceQueue:
        """Return the queue of a device for work outside named streams. Raises
        UnknownDeviceError."""
        device = self._names.current(device)
        if device not in self.queues:
            # Raises a more precise error for a device that is known to be gone.
            self.memory(device, "")
            raise unknown_device(device, self.queues)
        queue = self.queues[device]
        if queue is None:
            queue = self.queues[device] = DeviceQueue(device)
            self.open_queue(queue)
        return queue

    def add_device(self, name: str) -> None:
        """Add a device that appeared. A queue that failed in its absence is created again."""
        queue = self.queues.setdefault(name, None)
        if queue is not None and queue.error is not None:
            self.queues[name] = None
            if self._default.queue is queue:
                self._default.queue = DeviceQueue("")

    # Streams and queues

    @property
    def default_failure(self) -> HeliographError | None:
        """The first error on the default stream after its last mark."""
        return self._default.failure

    @default_failure.setter
    def default_failure(self, error: HeliographError | None) -> None:
        self._default.failure = error

    def note_failure(self, error: HeliographError) -> None:
        """Record a failure on the default stream, on which no later command waits."""
        self._default.failure = self._default.failure or error

    def stream(self, number: int) -> StreamHandle:
        """Return a stream by its handle. Raises UnknownHandleError."""
        if number != c.DEFAULT_STREAM:
            return self.handles.get(number, StreamHandle)
        if not self._default.queue.device:
            self._default.queue = self.device_queue(self.device(""))
        return self._default

    def device(self, name: str) -> str:
        """Return the name of an existing device; "" is the first. Raises UnknownDeviceError."""
        if not name:
            return self._names.current(next(iter(self.queues)))
        self.device_queue(name)
        return self._names.current(name)

    def work(self, state: CommandState, task: Task, device: str) -> None:
        """Set the command's task and its queue: its stream's if that is on the device, or the
        device's own."""
        assert state.stream is not None
        own = state.stream.queue
        state.queue = own if own.device == device else self.device_queue(device)
        state.task = task

    # Tensors

    def new_storage(self, state: CommandState, kind: Allocation, size_bytes: int) -> HandleStorage:
        """Return a new storage. Raises OutOfMemoryError above the buffer type's maximum."""
        device = self.device(kind.device)
        most = self.memory(device, kind.buffer_type).max_size
        if size_bytes > most:
            raise OutOfMemoryError(f"{size_bytes:,} bytes in one buffer; its buffer type allows {most:,}")
        return HandleStorage(
            size_bytes, device, buffer_type=kind.buffer_type, usage=kind.usage, maker=state.sequence
        )

    def new_output(self, state: CommandState, type: TensorType, device: str) -> TensorHandle:
        """Return a new tensor for an output, in the device's default buffer type."""
        size_bytes = self.memory(device, "").alloc_size(type)
        return TensorHandle(layout(type), HandleStorage(size_bytes, device, maker=state.sequence))

    def check_inline(self, size: int, where: str) -> None:
        """Raise LimitExceededError for more bytes than one message may carry."""
        if size > self.limits.inline_bytes:
            raise LimitExceededError(
                f"{size:,} bytes in {where}; this server takes {self.limits.inline_bytes:,}",
                advice="use a transfer, or bind a tensor",
            )


def _no_variable(name: str) -> TensorHandle:
    raise UnknownHandleError(f"the session has no variable {name[:64]!r}")
