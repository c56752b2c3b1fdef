"""What a command means: its handles, its task, and every static error. Pure.

`CommandValidator.validate` turns a command into its state, with all that the rest needs to know: what to
do, what it uses, what it writes, where it runs. It changes the handle table, since a handle is known
from here on, and nothing else. Numbers from the wire are compared as Python's integers, which do
not overflow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from heliograph_proto import commands as c
from heliograph_proto.errors import HeliographError, InvalidArgumentError, LimitExceededError, OutOfRangeError
from heliograph_proto.sessions import PLACE_BYTES
from heliograph_proto.types import TensorType, dtype
from heliograph_server.resources.checks import (
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
from heliograph_server.resources.handles import (
    BufferHandle,
    DeviceQueue,
    EventHandle,
    PlanHandle,
    ReservationHandle,
    StreamHandle,
    TensorHandle,
    layout,
)
from heliograph_server.resources.principals import no_exchange
from heliograph_server.session.protocol.buffer_validation import BufferValidator
from heliograph_server.session.protocol.dependencies import CommandState
from heliograph_server.session.protocol.instructions import (
    AllocateTask,
    CopyTask,
    FetchTask,
    FillTask,
    FreeTask,
    OfferTask,
    ReadTask,
    SharedPlace,
    Task,
    WriteTask,
)
from heliograph_server.session.protocol.run_validation import RunValidator
from heliograph_server.session.protocol.validation_context import ValidationContext

#: Stands in for the type of a tensor that was never made.
NO_TYPE = TensorType(dtype("u8"), (0,))


class CommandValidator:
    """Looks commands up in the handle table of `context`."""

    def __init__(self, context: ValidationContext) -> None:
        self._context = context
        self._handles = context.handles
        runs, buffers = RunValidator(context), BufferValidator(context)
        self._validators: dict[type, Callable[[CommandState, Any], None]] = {
            c.RunCommand: runs.run,
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
            c.AllocateBuffer: buffers.allocate_buffer,
            c.AllocateTensors: buffers.allocate_tensors,
            c.PlaceTensor: buffers.place_tensor,
            c.SetUsage: buffers.set_usage,
            c.ClearBuffer: buffers.clear_buffer,
            c.ResetBuffer: buffers.reset_buffer,
        }

    def validate(self, command: c.Command) -> CommandState:
        """The state of a command; one with an error if it can never start."""
        state = CommandState(command.sequence, notify=command.notify, timed=command.timeout_ms > 0)
        try:
            state.stream = self._context.stream(command.stream)
            if validate := self._validators.get(type(command.kind)):
                validate(state, command.kind)
        except HeliographError as error:
            self.refuse(state, command.kind, error.from_command(command.sequence))
        return state

    def refuse(self, state: CommandState, kind: c.CommandKind | None, error: HeliographError) -> None:
        """Makes it a command that fails in its turn, and poisons what it was to produce."""
        state.error, state.heals = error, ()
        state.uses = ()
        state.targets = () if isinstance(error, FrozenError) else self._existing_targets(kind)
        for number in produced_tensors(kind):
            self._handles.add_poisoned(number, TensorHandle(layout(NO_TYPE), error=error))
        if isinstance(kind, c.CreateStream):
            self._handles.add_poisoned(kind.stream, StreamHandle(DeviceQueue(""), error=error))
        if isinstance(kind, c.AllocateBuffer | c.AllocateTensors):
            self._handles.add_poisoned(kind.buffer, BufferHandle((), error=error))
        if state.targets:
            state.queue = state.queue or self._context.device_queue(storage_of(state.targets[0]).device)

    # Making handles

    def _allocate(self, state: CommandState, kind: c.Allocate) -> None:
        self._handles.check_new(kind.tensor, TensorHandle)
        storage = self._context.new_storage(state, kind, self._size_of(kind.type, kind))
        tensor = TensorHandle(layout(kind.type), storage)
        self._context.work(state, AllocateTask((storage,), (tensor,)), storage.device)
        state.targets = (tensor,)
        self._handles.add(kind.tensor, tensor)

    def _size_of(self, type: TensorType, kind: c.Allocate) -> int:
        return self._context.memory(self._context.device(kind.device), kind.buffer_type).alloc_size(type)

    def _view(self, state: CommandState, kind: c.View) -> None:
        self._handles.check_new(kind.tensor, TensorHandle)
        source = self._handles.get(kind.source, TensorHandle)
        view = view_of(source.layout, kind)
        state.uses = (source,)
        self._handles.add(kind.tensor, TensorHandle(view, source.storage))

    def _create_stream(self, state: CommandState, kind: c.CreateStream) -> None:
        self._handles.check_new(kind.stream, StreamHandle)
        # The command is an empty piece of work on its own queue: it succeeds if there is one.
        state.queue = DeviceQueue(self._context.device(kind.device))
        self._context.open_queue(state.queue)
        self._handles.add(kind.stream, StreamHandle(state.queue, tail=state))

    def _record(self, state: CommandState, kind: c.Record) -> None:
        event = self._handles.peek(kind.event, EventHandle)
        if event is None:
            self._handles.check_new(kind.event, EventHandle)
            event = EventHandle()
            self._handles.add(kind.event, event)
        event.mark = state

    def _free(self, state: CommandState, kind: c.Free) -> None:
        gone, problem = [], None
        for number in kind.handles:
            try:
                found = self._handles.remove(number)
                gone.append(found)
                if isinstance(found, ReservationHandle):
                    found.end()
            except HeliographError as error:
                problem = problem or error
        state.task = FreeTask(tuple(gone))
        state.error = problem.from_command(state.sequence) if problem else None

    # Bytes of tensors

    def _set_tensor(self, state: CommandState, kind: c.SetTensor) -> None:
        tensor = self._handles.get(kind.tensor, TensorHandle)
        size = self._sent_bytes(kind)
        check_bytes(tensor.layout, kind.offset_bytes, size, kind.chunks)
        self._context.hold(state, 0 if kind.data is None else size)
        place = self._shared_place(kind)
        self._write(state, WriteTask(tensor, kind, place), tensor, kind.offset_bytes, size)

    def _sent_bytes(self, kind: c.SetTensor) -> int:
        if kind.data is not None:
            self._context.check_inline(len_bytes(kind.data), "a command")
            return len_bytes(kind.data)
        if kind.shared is None and kind.size_bytes > self._context.limits.in_flight_bytes:
            raise LimitExceededError(
                f"a transfer of {kind.size_bytes:,} bytes; this server stages "
                f"{self._context.limits.in_flight_bytes:,}",
                advice="send it in pieces",
            )
        return kind.size_bytes

    def _shared_place(self, kind: c.SetTensor | c.GetTensor) -> SharedPlace | None:
        """Where the bytes lie in shared memory. Raises what `shared_place` does."""
        if kind.shared is None:
            return None
        if kind.transfer:
            raise InvalidArgumentError("a transfer and a shared place: the bytes go one way")
        return self.shared_place(kind.shared, kind.size_bytes)

    def shared_place(self, offset_bytes: int, size_bytes: int) -> SharedPlace:
        """A place in shared memory. Raises InvalidArgumentError, LimitExceededError, OutOfRangeError."""
        if not self._context.shared_bytes:
            raise InvalidArgumentError(
                "the session has no memory that it shares with the server", advice="ask for it first"
            )
        if size_bytes > PLACE_BYTES:
            raise LimitExceededError(
                f"{size_bytes:,} bytes at one place in shared memory; this server takes {PLACE_BYTES:,}",
                advice="send it in pieces",
            )
        end = offset_bytes + size_bytes
        if end > self._context.shared_bytes:
            raise OutOfRangeError(
                f"bytes {offset_bytes} to {end} of {self._context.shared_bytes} bytes of shared memory"
            )
        return SharedPlace(offset_bytes, size_bytes)

    def _memset(self, state: CommandState, kind: c.Memset) -> None:
        tensor = self._handles.get(kind.tensor, TensorHandle)
        check_range(tensor.layout, kind.offset_bytes, kind.size_bytes)
        if not 0 <= kind.value <= 255:
            raise InvalidArgumentError(f"memset with {kind.value}; a byte is 0 to 255")
        self._write(state, FillTask(tensor, kind), tensor, kind.offset_bytes, kind.size_bytes)

    def _write(self, state: CommandState, task: Task, tensor: TensorHandle, offset: int, size: int) -> None:
        check_writable(tensor)
        self._context.work(state, task, storage_of(tensor).device)
        state.targets = (tensor,)
        chunked = isinstance(task, WriteTask) and task.command.chunks is not None
        if offset == 0 and size == tensor.type.nbytes:
            state.heals = (tensor,)
        elif tensor.layout.is_contiguous and not chunked:
            state.heals, state.part = (tensor,), tensor.part(offset, size)
        else:
            state.uses = (tensor,)

    def _get_tensor(self, state: CommandState, kind: c.GetTensor) -> None:
        tensor = self._handles.get(kind.tensor, TensorHandle)
        check_bytes(tensor.layout, kind.offset_bytes, kind.size_bytes, kind.chunks)
        place = self._shared_place(kind)
        if kind.transfer:
            check_transfer(kind.transfer)
        elif place is None:
            self._context.check_inline(kind.size_bytes, "a completion")
            self._context.hold(state, kind.size_bytes)
        self._context.work(state, ReadTask(tensor, kind, place), storage_of(tensor).device)
        state.uses = (tensor,)

    def _copy_tensor(self, state: CommandState, kind: c.CopyTensor) -> None:
        source = self._handles.get(kind.source, TensorHandle)
        destination = self._handles.get(kind.destination, TensorHandle)
        if source.type != destination.type:
            raise InvalidArgumentError(f"copy of {source.type} to {destination.type}: the types differ")
        if source is not destination and overlap(source, destination):
            raise InvalidArgumentError("copy between tensors that overlap", advice="copy by way of a third")
        check_writable(destination)
        task = CopyTask(source, destination)
        self._context.work(state, task, storage_of(destination).device)
        state.uses, state.targets, state.heals = (source,), (destination,), (destination,)

    # Other daemons

    def _offer_tensor(self, state: CommandState, kind: c.OfferTensor) -> None:
        tensor = self._handles.get(kind.tensor, TensorHandle)
        self._context.work(state, OfferTask(tensor, kind), storage_of(tensor).device)
        state.uses = (tensor,)

    def _fetch_tensor(self, state: CommandState, kind: c.FetchTensor) -> None:
        if not self._context.may_exchange:
            raise no_exchange("fetch a tensor from another daemon")
        tensor = self._handles.get(kind.tensor, TensorHandle)
        self._write(state, FetchTask(tensor, kind), tensor, 0, tensor.type.nbytes)

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
                found = self._handles.peek(number, TensorHandle)
                return () if found is None or found.storage is None else (found,)
            case c.RunCommand(plan=number, outputs=outputs):
                plan = self._handles.peek(number, PlanHandle)
                into = (self._handles.peek(one.into, TensorHandle) for one in outputs if one.into)
                written = tuple(one for one in into if one is not None and one.storage is not None)
                return (*(() if plan is None else plan.assigned), *written)
            case c.ClearBuffer(buffer=number):
                buffer = self._handles.peek(number, BufferHandle)
                return () if buffer is None else buffer.parts
        return ()
