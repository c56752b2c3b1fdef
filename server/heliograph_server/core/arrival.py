"""What a command means, decided when it arrives: its handles, its task, and every static error.

`Arrivals.admit` turns a command into an entry with all that the rest needs to know: what to do,
what it uses, what it writes, where it runs. It changes the handle table, since a handle is known
from here on, and nothing else. Numbers from the wire are compared as Python's integers, which do
not overflow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from heliograph_proto import commands as c
from heliograph_proto.errors import (
    HeliographError,
    InvalidArgumentError,
    LimitExceededError,
    OutOfRangeError,
)
from heliograph_proto.limits import PLACE_BYTES, Limits
from heliograph_proto.types import TensorType, dtype
from heliograph_server.core.arrival_buffers import BufferArrivals
from heliograph_server.core.arrival_runs import RunArrivals
from heliograph_server.core.checks import (
    FrozenError,
    check_bytes,
    check_range,
    check_transfer,
    check_writable,
    len_bytes,
    overlap,
    produced_tensors,
    storage_of,
    view_of,
)
from heliograph_server.core.handles import (
    BufferHandle,
    EventHandle,
    HandleTable,
    Lane,
    PlanHandle,
    ReservationHandle,
    StreamHandle,
    TensorHandle,
    layout,
)
from heliograph_server.core.memories import FindMemory, plain_memory
from heliograph_server.core.ordering import Entry
from heliograph_server.core.principals import no_exchange
from heliograph_server.core.tasks import (
    AllocateTask,
    CopyTask,
    FetchTask,
    FillTask,
    FreeTask,
    OfferTask,
    Place,
    ReadTask,
    Task,
    WriteTask,
)

#: Stands in for the type of a tensor that was never made.
NO_TYPE = TensorType(dtype("u8"), (0,))


class Arrivals(BufferArrivals, RunArrivals):
    """Looks commands up in a handle table."""

    def __init__(
        self,
        table: HandleTable,
        limits: Limits,
        devices: tuple[str, ...],
        open_lane: Callable[[Lane], None],
        memory: FindMemory = plain_memory,
    ) -> None:
        super().__init__(table, limits, devices, open_lane, memory)
        self._admit: dict[type, Callable[[Entry, Any], None]] = {
            c.Run: self._run,
            c.SetTensor: self._set_tensor,
            c.GetTensor: self._get_tensor,
            c.Allocate: self._allocate,
            c.View: self._view,
            c.CreateStream: self._create_stream,
            c.Memset: self._memset,
            c.CopyTensor: self._copy_tensor,
            c.OfferTensor: self._offer_tensor,
            c.FetchTensor: self._fetch_tensor,
            c.Free: self._free,
            c.Record: self._record,
            c.AllocateBuffer: self._allocate_buffer,
            c.AllocateTensors: self._allocate_tensors,
            c.PlaceTensor: self._place_tensor,
            c.SetUsage: self._set_usage,
            c.ClearBuffer: self._clear_buffer,
            c.ResetBuffer: self._reset_buffer,
        }

    def admit(self, command: c.Command) -> Entry:
        """The entry of a command; one with an error if it can never start."""
        entry = Entry(command.sequence, notify=command.notify, timed=command.timeout_ms > 0)
        try:
            entry.stream = self._stream(command.stream)
            if admit := self._admit.get(type(command.kind)):
                admit(entry, command.kind)
        except HeliographError as error:
            self.refuse(entry, command.kind, error.from_command(command.sequence))
        return entry

    def refuse(self, entry: Entry, kind: c.CommandKind | None, error: HeliographError) -> None:
        """Makes it an entry that fails in its turn, and poisons what it was to produce."""
        entry.error, entry.heals = error, ()
        entry.uses = ()
        entry.targets = () if isinstance(error, FrozenError) else self._existing_targets(kind)
        for number in produced_tensors(kind):
            self._table.add_poisoned(number, TensorHandle(layout(NO_TYPE), error=error))
        if isinstance(kind, c.CreateStream):
            self._table.add_poisoned(kind.stream, StreamHandle(Lane(""), error=error))
        if isinstance(kind, c.AllocateBuffer | c.AllocateTensors):
            self._table.add_poisoned(kind.buffer, BufferHandle((), error=error))
        if entry.targets:
            entry.lane = entry.lane or self.device_lane(storage_of(entry.targets[0]).device)

    # Making handles

    def _allocate(self, entry: Entry, kind: c.Allocate) -> None:
        self._table.check_new(kind.tensor, TensorHandle)
        storage = self._new_storage(entry, kind, self._size_of(kind.type, kind))
        tensor = TensorHandle(layout(kind.type), storage)
        self._work(entry, AllocateTask((storage,), (tensor,)), storage.device)
        entry.targets = (tensor,)
        self._table.add(kind.tensor, tensor)

    def _size_of(self, type: TensorType, kind: c.Allocate) -> int:
        return self._memory(self._device(kind.device), kind.buffer_type).alloc_size(type)

    def _view(self, entry: Entry, kind: c.View) -> None:
        self._table.check_new(kind.tensor, TensorHandle)
        source = self._table.get(kind.source, TensorHandle)
        view = view_of(source.layout, kind)
        entry.uses = (source,)
        self._table.add(kind.tensor, TensorHandle(view, source.storage))

    def _create_stream(self, entry: Entry, kind: c.CreateStream) -> None:
        self._table.check_new(kind.stream, StreamHandle)
        # The command is an empty piece of work on its own lane: it succeeds if there is one.
        entry.lane = Lane(self._device(kind.device))
        self._open_lane(entry.lane)
        self._table.add(kind.stream, StreamHandle(entry.lane, tail=entry))

    def _record(self, entry: Entry, kind: c.Record) -> None:
        event = self._table.peek(kind.event, EventHandle)
        if event is None:
            self._table.check_new(kind.event, EventHandle)
            event = EventHandle()
            self._table.add(kind.event, event)
        event.mark = entry

    def _free(self, entry: Entry, kind: c.Free) -> None:
        gone, problem = [], None
        for number in kind.handles:
            try:
                found = self._table.remove(number)
                gone.append(found)
                if isinstance(found, ReservationHandle):
                    found.end()
            except HeliographError as error:
                problem = problem or error
        entry.task = FreeTask(tuple(gone))
        entry.error = problem.from_command(entry.sequence) if problem else None

    # Bytes of tensors

    def _set_tensor(self, entry: Entry, kind: c.SetTensor) -> None:
        tensor = self._table.get(kind.tensor, TensorHandle)
        size = self._sent_bytes(kind)
        check_bytes(tensor.layout, kind.offset_bytes, size, kind.chunks)
        self._hold(entry, 0 if kind.data is None else size)
        place = self._shared_place(kind)
        task = WriteTask(tensor, kind.offset_bytes, kind.data, kind.transfer, kind.chunks, place)
        self._write(entry, task, tensor, kind.offset_bytes, size)

    def _sent_bytes(self, kind: c.SetTensor) -> int:
        if kind.data is not None:
            self._check_inline(len_bytes(kind.data), "a command")
            return len_bytes(kind.data)
        if kind.shared is None and kind.size_bytes > self._limits.in_flight_bytes:
            raise LimitExceededError(
                f"a transfer of {kind.size_bytes:,} bytes; this server stages "
                f"{self._limits.in_flight_bytes:,}",
                advice="send it in pieces",
            )
        return kind.size_bytes

    def _shared_place(self, kind: c.SetTensor | c.GetTensor) -> Place | None:
        """Where the bytes lie in shared memory. Raises what `shared_place` does."""
        if kind.shared is None:
            return None
        if kind.transfer:
            raise InvalidArgumentError("a transfer and a shared place: the bytes go one way")
        return self.shared_place(kind.shared, kind.size_bytes)

    def shared_place(self, offset_bytes: int, size_bytes: int) -> Place:
        """A place in shared memory. Raises InvalidArgumentError, LimitExceededError, OutOfRangeError."""
        if not self.shared_bytes:
            raise InvalidArgumentError(
                "the session has no memory that it shares with the server", advice="ask for it first"
            )
        if size_bytes > PLACE_BYTES:
            raise LimitExceededError(
                f"{size_bytes:,} bytes at one place in shared memory; this server takes {PLACE_BYTES:,}",
                advice="send it in pieces",
            )
        end = offset_bytes + size_bytes
        if end > self.shared_bytes:
            raise OutOfRangeError(
                f"bytes {offset_bytes} to {end} of {self.shared_bytes} bytes of shared memory"
            )
        return Place(offset_bytes, size_bytes)

    def _memset(self, entry: Entry, kind: c.Memset) -> None:
        tensor = self._table.get(kind.tensor, TensorHandle)
        check_range(tensor.layout, kind.offset_bytes, kind.size_bytes)
        if not 0 <= kind.value <= 255:
            raise InvalidArgumentError(f"memset with {kind.value}; a byte is 0 to 255")
        task = FillTask(tensor, kind.offset_bytes, kind.size_bytes, kind.value)
        self._write(entry, task, tensor, kind.offset_bytes, kind.size_bytes)

    def _write(self, entry: Entry, task: Task, tensor: TensorHandle, offset: int, size: int) -> None:
        check_writable(tensor)
        self._work(entry, task, storage_of(tensor).device)
        entry.targets = (tensor,)
        chunked = isinstance(task, WriteTask) and task.chunks is not None
        if offset == 0 and size == tensor.type.nbytes:
            entry.heals = (tensor,)
        elif tensor.layout.is_contiguous and not chunked:
            entry.heals, entry.part = (tensor,), tensor.part(offset, size)
        else:
            entry.uses = (tensor,)

    def _get_tensor(self, entry: Entry, kind: c.GetTensor) -> None:
        tensor = self._table.get(kind.tensor, TensorHandle)
        check_bytes(tensor.layout, kind.offset_bytes, kind.size_bytes, kind.chunks)
        place = self._shared_place(kind)
        if kind.transfer:
            check_transfer(kind.transfer)
        elif place is None:
            self._check_inline(kind.size_bytes, "a completion")
            self._hold(entry, kind.size_bytes)
        task = ReadTask(tensor, kind.offset_bytes, kind.size_bytes, kind.transfer, kind.chunks, place)
        self._work(entry, task, storage_of(tensor).device)
        entry.uses = (tensor,)

    def _copy_tensor(self, entry: Entry, kind: c.CopyTensor) -> None:
        source = self._table.get(kind.source, TensorHandle)
        destination = self._table.get(kind.destination, TensorHandle)
        if source.type != destination.type:
            raise InvalidArgumentError(f"copy of {source.type} to {destination.type}: the types differ")
        if source is not destination and overlap(source, destination):
            raise InvalidArgumentError("copy between tensors that overlap", advice="copy by way of a third")
        check_writable(destination)
        task = CopyTask(source, destination)
        self._work(entry, task, storage_of(destination).device)
        entry.uses, entry.targets, entry.heals = (source,), (destination,), (destination,)

    # Other daemons

    def _offer_tensor(self, entry: Entry, kind: c.OfferTensor) -> None:
        tensor = self._table.get(kind.tensor, TensorHandle)
        self._work(entry, OfferTask(tensor, kind.edge, kind.run), storage_of(tensor).device)
        entry.uses = (tensor,)

    def _fetch_tensor(self, entry: Entry, kind: c.FetchTensor) -> None:
        if not self.may_exchange:
            raise no_exchange("fetch a tensor from another daemon")
        tensor = self._table.get(kind.tensor, TensorHandle)
        task = FetchTask(tensor, kind.edge, kind.run, kind.source)
        self._write(entry, task, tensor, 0, tensor.type.nbytes)

    # Refusals

    def _existing_targets(self, kind: c.CommandKind | None) -> tuple[TensorHandle, ...]:
        """Tensors that exist and that the refused command was to write."""
        match kind:
            case (
                c.SetTensor(tensor=number)
                | c.Memset(tensor=number)
                | c.CopyTensor(destination=number)
                | c.FetchTensor(tensor=number)
            ):
                found = self._table.peek(number, TensorHandle)
                return () if found is None or found.storage is None else (found,)
            case c.Run(plan=number, outputs=outputs):
                plan = self._table.peek(number, PlanHandle)
                into = (self._table.peek(one.into, TensorHandle) for one in outputs if one.into)
                written = tuple(one for one in into if one is not None and one.storage is not None)
                return (*(() if plan is None else plan.assigned), *written)
            case c.ClearBuffer(buffer=number):
                buffer = self._table.peek(number, BufferHandle)
                return () if buffer is None else buffer.parts
        return ()
