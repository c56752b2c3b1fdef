"""Validation of commands: their handles, their tasks, and every static error. Pure.

`CommandValidator.validate` turns a command into its state: the task, the tensors that it uses and
writes, and its queue. New handles enter the handle table here; nothing else changes. Numbers from
the wire are compared as Python integers, which do not overflow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from heliograph_proto import commands as c
from heliograph_proto.errors import HeliographError, InvalidArgumentError, LimitExceededError, OutOfRangeError
from heliograph_proto.sessions import PLACE_BYTES
from heliograph_proto.types import TensorType, dtype
from heliograph_server.resources.checks import (
    check_bytes,
    check_range,
    check_transfer,
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
    ReservationHandle,
    StreamHandle,
    TensorHandle,
    layout,
)
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

#: The type of a tensor that was never created.
NO_TYPE = TensorType(dtype("u8"), (0,))


class CommandValidator:
    """Validates commands against the handle table and limits of `context`."""

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
            c.FreeVariable: self._free_variable,
            c.Skip: self._skip,
            c.Record: self._record,
            c.AllocateBuffer: buffers.allocate_buffer,
            c.AllocateTensors: buffers.allocate_tensors,
            c.PlaceTensor: buffers.place_tensor,
            c.SetUsage: buffers.set_usage,
            c.ClearBuffer: buffers.clear_buffer,
            c.ResetBuffer: buffers.reset_buffer,
        }

    def validate(self, command: c.Command) -> CommandState:
        """Return the state of a command. It has an error if the command can never start."""
        state = CommandState(command.sequence, notify=command.notify, timed=command.timeout_ms > 0)
        try:
            state.stream = self._context.stream(command.stream)
            if validate := self._validators.get(type(command.kind)):
                validate(state, command.kind)
        except HeliographError as error:
            self.refuse(state, command.kind, error.from_command(command.sequence))
        return state

    def refuse(self, state: CommandState, kind: c.CommandKind | None, error: HeliographError) -> None:
        """Make a command fail in its turn, and poison the handles that it would have created."""
        state.error, state.heals = error, ()
        state.uses = ()
        state.targets = self._existing_targets(kind)
        for number in produced_tensors(kind):
            self._handles.add_poisoned(number, TensorHandle(layout(NO_TYPE), error=error))
        if isinstance(kind, c.CreateStream):
            self._handles.add_poisoned(kind.stream, StreamHandle(DeviceQueue(""), error=error))
        if isinstance(kind, c.AllocateBuffer | c.AllocateTensors):
            self._handles.add_poisoned(kind.buffer, BufferHandle((), error=error))
        if state.targets:
            state.queue = state.queue or self._context.device_queue(storage_of(state.targets[0]).device)

    # New handles

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
        # The command is empty work on its own queue. It succeeds if the queue can be created.
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

    def _free_variable(self, state: CommandState, kind: c.FreeVariable) -> None:
        state.task = FreeTask((self._context.take_variable(kind.name),))

    def _skip(self, state: CommandState, kind: c.Skip) -> None:
        if not state.sequence <= kind.through < c.SERVER_HANDLE:
            raise OutOfRangeError(f"command {state.sequence} passes over those up to {kind.through}")
        if kind.error is None:
            return
        state.error = kind.error.from_command(state.sequence)
        found = ((number, self._handles.peek(number, TensorHandle)) for number in kind.lost)
        targets = []
        for number, tensor in found:
            if tensor is None:
                self._handles.add_poisoned(number, TensorHandle(layout(NO_TYPE), error=state.error))
            elif tensor.storage is not None:
                targets.append(tensor)
        state.targets = tuple(targets)
        if targets:
            state.queue = self._context.device_queue(storage_of(targets[0]).device)

    # Bytes of tensors

    def _set_tensor(self, state: CommandState, kind: c.SetTensor) -> None:
        tensor = self._handles.get(kind.tensor, TensorHandle)
        staged_bytes = self._context.limits.in_flight_bytes
        size = kind.size_bytes if kind.data is None else len_bytes(kind.data)
        if kind.data is not None:
            self._context.check_inline(size, "a command")
        elif kind.shared is None and size > staged_bytes:
            raise LimitExceededError(
                f"a transfer of {size:,} bytes; this server stages {staged_bytes:,}",
                advice="send it in pieces",
            )
        check_bytes(tensor.layout, kind.offset_bytes, size, kind.chunks)
        if kind.data is not None:
            self._context.hold(state, size)
        place = None if kind.shared is None else self._shared_place(kind, kind.shared)
        self._write(state, WriteTask(tensor, kind, place), tensor, kind.offset_bytes, size)

    def _shared_place(self, kind: c.SetTensor | c.GetTensor, offset_bytes: int) -> SharedPlace:
        if kind.transfer:
            raise InvalidArgumentError("a transfer and a place in shared memory: the bytes take one path")
        return self.shared_place(offset_bytes, kind.size_bytes)

    def shared_place(self, offset_bytes: int, size_bytes: int) -> SharedPlace:
        """Return a place in shared memory. Raises InvalidArgumentError, LimitExceededError,
        OutOfRangeError."""
        if not self._context.shared_bytes:
            raise InvalidArgumentError(
                "the session shares no memory with the server", advice="request it first"
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
        place = None if kind.shared is None else self._shared_place(kind, kind.shared)
        if kind.transfer:
            check_transfer(kind.transfer)
        elif place is None:
            self._context.check_inline(kind.size_bytes, "a completion")
            self._context.hold(state, kind.size_bytes)
            # The completion carries the bytes.
            state.notify = True
        self._context.work(state, ReadTask(tensor, kind, place), storage_of(tensor).device)
        state.uses = (tensor,)

    def _copy_tensor(self, state: CommandState, kind: c.CopyTensor) -> None:
        source = self._handles.get(kind.source, TensorHandle)
        destination = self._handles.get(kind.destination, TensorHandle)
        if source.type != destination.type:
            raise InvalidArgumentError(f"copy of {source.type} to {destination.type}: the types differ")
        if source is not destination and overlap(source, destination):
            raise InvalidArgumentError(
                "copy between tensors that overlap", advice="copy through a third tensor"
            )
        task = CopyTask(source, destination)
        self._context.work(state, task, storage_of(destination).device)
        state.uses, state.targets, state.heals = (source,), (destination,), (destination,)

    # Other daemons

    def _offer_tensor(self, state: CommandState, kind: c.OfferTensor) -> None:
        tensor = self._handles.get(kind.tensor, TensorHandle)
        self._context.work(state, OfferTask(tensor, kind), storage_of(tensor).device)
        state.uses = (tensor,)

    def _fetch_tensor(self, state: CommandState, kind: c.FetchTensor) -> None:
        self._context.check_peer(kind.source.address)
        tensor = self._handles.get(kind.tensor, TensorHandle)
        self._write(state, FetchTask(tensor, kind), tensor, 0, tensor.type.nbytes)

    # Refusals

    def _existing_targets(self, kind: c.CommandKind | None) -> tuple[TensorHandle, ...]:
        """Return the existing tensors that a refused command would have written."""
        match kind:
            case (
                c.SetTensor(tensor=number)
                | c.Memset(tensor=number)
                | c.CopyTensor(destination=number)
                | c.FetchTensor(tensor=number)
            ):
                found = self._handles.peek(number, TensorHandle)
                return () if found is None or found.storage is None else (found,)
            case c.RunCommand(outputs=outputs):
                into = (self._handles.peek(one.into, TensorHandle) for one in outputs if one.into)
                return tuple(one for one in into if one is not None and one.storage is not None)
            case c.ClearBuffer(buffer=number):
                buffer = self._handles.peek(number, BufferHandle)
                return () if buffer is None else buffer.parts
        return ()
