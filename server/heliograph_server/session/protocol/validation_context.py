"""What the validation of every command needs: where it runs, what it holds, room for what it makes. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from heliograph_proto import commands as c
from heliograph_proto.errors import (
    HeliographError,
    LimitExceededError,
    OutOfMemoryError,
)
from heliograph_proto.sessions import Limits
from heliograph_proto.types import TensorType
from heliograph_server.resources.checks import unknown_device
from heliograph_server.resources.handles import (
    DeviceQueue,
    HandleStorage,
    HandleTable,
    StreamHandle,
    TensorHandle,
    layout,
)
from heliograph_server.resources.memories import FindMemory, plain_memory
from heliograph_server.session.protocol.dependencies import CommandState
from heliograph_server.session.protocol.instructions import (
    Task,
)

Allocation: TypeAlias = c.Allocate | c.AllocateBuffer | c.AllocateTensors


class ValidationContext:
    """Handles, limits, memory and device queues. `open_queue` is called for each queue that is made."""

    def __init__(
        self,
        handles: HandleTable,
        limits: Limits,
        devices: tuple[str, ...],
        open_queue: Callable[[DeviceQueue], None],
        memory: FindMemory = plain_memory,
    ) -> None:
        self.handles = handles
        self.limits = limits
        self.open_queue = open_queue
        self.memory = memory
        #: Every device has a queue for what its named streams cannot do.
        self.queues: dict[str, DeviceQueue | None] = dict.fromkeys(devices)
        self._default = StreamHandle(DeviceQueue(""))
        #: Of commands that have not retired.
        self.inline_bytes = 0
        #: Of the memory that the client maps as well; 0: there is none.
        self.shared_bytes = 0
        #: Whether it may name other daemons.
        self.may_exchange = True

    def hold(self, state: CommandState, inline_bytes: int) -> None:
        """Counts what is held in memory for the command. Raises LimitExceededError."""
        if self.inline_bytes + inline_bytes > self.limits.in_flight_bytes:
            raise LimitExceededError(
                f"commands in flight hold {self.inline_bytes:,} bytes of data and results, "
                f"{inline_bytes:,} more would pass the limit of {self.limits.in_flight_bytes:,}",
                advice="wait for completions",
            )
        state.inline_bytes = inline_bytes
        self.inline_bytes += inline_bytes

    def give_back(self, state: CommandState, size_bytes: int) -> None:
        """Holds so much less for the command, or nothing."""
        given = min(size_bytes, state.inline_bytes)
        state.inline_bytes -= given
        self.inline_bytes -= given

    def device_queue(self, device: str) -> DeviceQueue:
        """The queue of a device for what no named stream does. Raises UnknownDeviceError."""
        if device not in self.queues:
            # Whoever knows its memory may know more of why it is not there.
            self.memory(device, "")
            raise unknown_device(device, self.queues)
        queue = self.queues[device]
        if queue is None:
            queue = self.queues[device] = DeviceQueue(device)
            self.open_queue(queue)
        return queue

    def add_device(self, name: str) -> None:
        """There is a device of this name, now. A queue that could not be made while it was gone is made
        anew."""
        queue = self.queues.setdefault(name, None)
        if queue is not None and queue.error is not None:
            self.queues[name] = None
            if self._default.queue is queue:
                self._default.queue = DeviceQueue("")

    # Streams, and where work runs

    def note_failure(self, error: HeliographError) -> None:
        """Something on the default stream failed, and nothing stands behind it."""
        self._default.failure = self._default.failure or error

    def stream(self, number: int) -> StreamHandle:
        if number != c.DEFAULT_STREAM:
            return self.handles.get(number, StreamHandle)
        if not self._default.queue.device:
            self._default.queue = self.device_queue(self.device(""))
        return self._default

    def device(self, name: str) -> str:
        if name:
            self.device_queue(name)
            return name
        return next(iter(self.queues))

    def work(self, state: CommandState, task: Task, device: str) -> None:
        """Gives the command its task, on its stream's queue if that is on the device."""
        assert state.stream is not None
        own = state.stream.queue
        state.queue = own if own.device == device else self.device_queue(device)
        state.task = task

    # Making tensors

    def new_storage(self, state: CommandState, kind: Allocation, size_bytes: int) -> HandleStorage:
        device = self.device(kind.device)
        most = self.memory(device, kind.buffer_type).max_size
        if size_bytes > most:
            raise OutOfMemoryError(f"{size_bytes:,} bytes in one buffer; it has {most:,} at most")
        return HandleStorage(
            size_bytes, device, buffer_type=kind.buffer_type, usage=kind.usage, maker=state.sequence
        )

    def new_output(self, state: CommandState, type: TensorType, device: str) -> TensorHandle:
        size_bytes = self.memory(device, "").alloc_size(type)
        return TensorHandle(layout(type), HandleStorage(size_bytes, device, maker=state.sequence))

    def check_inline(self, size: int, where: str) -> None:
        if size > self.limits.inline_bytes:
            raise LimitExceededError(
                f"{size:,} bytes in {where}; this server takes {self.limits.inline_bytes:,}",
                advice="use a transfer, or bind a tensor",
            )
