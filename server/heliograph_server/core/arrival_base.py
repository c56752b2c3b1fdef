"""What every arriving command needs: where it runs, what it holds, and room for what it makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from heliograph_proto import commands as c
from heliograph_proto.errors import HeliographError, LimitExceededError, OutOfMemoryError
from heliograph_proto.limits import Limits
from heliograph_proto.types import TensorType
from heliograph_server.core.checks import unknown_device
from heliograph_server.core.handles import HandleTable, Lane, Storage, StreamHandle, TensorHandle, layout
from heliograph_server.core.memories import FindMemory, plain_memory
from heliograph_server.core.ordering import Entry
from heliograph_server.core.tasks import Task

Allocation: TypeAlias = c.Allocate | c.AllocateBuffer | c.AllocateTensors


class ArrivalBase:
    """Handles, limits, memory and lanes. `open_lane` is called for each lane that is made."""

    def __init__(
        self,
        table: HandleTable,
        limits: Limits,
        devices: tuple[str, ...],
        open_lane: Callable[[Lane], None],
        memory: FindMemory = plain_memory,
    ) -> None:
        self._table = table
        self._limits = limits
        self._open_lane = open_lane
        self._memory = memory
        #: Every device has a lane for what its named streams cannot do.
        self.lanes: dict[str, Lane | None] = dict.fromkeys(devices)
        self._default = StreamHandle(Lane(""))
        #: Of commands that have not retired.
        self.inline_bytes = 0
        #: Of the memory that the client maps as well; 0: there is none.
        self.shared_bytes = 0
        #: Whether it may name other daemons.
        self.may_exchange = True

    def _hold(self, entry: Entry, inline_bytes: int) -> None:
        """Counts what is held in memory for the command. Raises LimitExceededError."""
        if self.inline_bytes + inline_bytes > self._limits.in_flight_bytes:
            raise LimitExceededError(
                f"commands in flight hold {self.inline_bytes:,} bytes of data and results, "
                f"{inline_bytes:,} more would pass the limit of {self._limits.in_flight_bytes:,}",
                advice="wait for completions",
            )
        entry.inline_bytes = inline_bytes
        self.inline_bytes += inline_bytes

    def give_back(self, entry: Entry, size_bytes: int) -> None:
        """Holds so much less for the command, or nothing."""
        given = min(size_bytes, entry.inline_bytes)
        entry.inline_bytes -= given
        self.inline_bytes -= given

    def device_lane(self, device: str) -> Lane:
        """The lane of a device for what no named stream does. Raises UnknownDeviceError."""
        if device not in self.lanes:
            # Whoever knows its memory may know more of why it is not there.
            self._memory(device, "")
            raise unknown_device(device, self.lanes)
        lane = self.lanes[device]
        if lane is None:
            lane = self.lanes[device] = Lane(device)
            self._open_lane(lane)
        return lane

    def add_device(self, name: str) -> None:
        """There is a device of this name, now. A lane that could not be made while it was gone is made
        anew."""
        lane = self.lanes.setdefault(name, None)
        if lane is not None and lane.error is not None:
            self.lanes[name] = None
            if self._default.lane is lane:
                self._default.lane = Lane("")

    # Streams, and where work runs

    def note_failure(self, error: HeliographError) -> None:
        """Something on the default stream failed, and nothing stands behind it."""
        self._default.failure = self._default.failure or error

    def _stream(self, number: int) -> StreamHandle:
        if number != c.DEFAULT_STREAM:
            return self._table.get(number, StreamHandle)
        if not self._default.lane.device:
            self._default.lane = self.device_lane(self._device(""))
        return self._default

    def _device(self, name: str) -> str:
        if name:
            self.device_lane(name)
            return name
        return next(iter(self.lanes))

    def _work(self, entry: Entry, task: Task, device: str) -> None:
        """Gives the entry its task, on its stream's lane if that is on the device."""
        assert entry.stream is not None
        own = entry.stream.lane
        entry.lane = own if own.device == device else self.device_lane(device)
        entry.task = task

    # Making tensors

    def _new_storage(self, entry: Entry, kind: Allocation, size_bytes: int) -> Storage:
        device = self._device(kind.device)
        most = self._memory(device, kind.buffer_type).max_size
        if size_bytes > most:
            raise OutOfMemoryError(f"{size_bytes:,} bytes in one buffer; it has {most:,} at most")
        return Storage(
            size_bytes, device, buffer_type=kind.buffer_type, usage=kind.usage, maker=entry.sequence
        )

    def _new_output(self, entry: Entry, type: TensorType, device: str) -> TensorHandle:
        size_bytes = self._memory(device, "").alloc_size(type)
        return TensorHandle(layout(type), Storage(size_bytes, device, maker=entry.sequence))

    def _check_inline(self, size: int, where: str) -> None:
        if size > self._limits.inline_bytes:
            raise LimitExceededError(
                f"{size:,} bytes in {where}; this server takes {self._limits.inline_bytes:,}",
                advice="use a transfer, or bind a tensor",
            )
