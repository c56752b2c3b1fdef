"""Validation of the commands that name buffers. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from heliograph_proto import commands as c
from heliograph_proto.errors import HandleExistsError, InvalidArgumentError
from heliograph_server.resources.checks import check_place, storage_of
from heliograph_server.resources.handles import BufferHandle, HandleStorage, TensorHandle, layout, whole
from heliograph_server.session.protocol.dependencies import CommandState
from heliograph_server.session.protocol.instructions import (
    AllocateTask,
    ClearTask,
    PlaceTask,
    ResetTask,
    UsageTask,
)
from heliograph_server.session.protocol.validation_context import ValidationContext


class BufferValidator:
    """Validates the commands that name buffers: their handles, tasks and static errors."""

    def __init__(self, context: ValidationContext) -> None:
        self._context = context
        self._handles = context.handles

    def allocate_buffer(self, state: CommandState, kind: c.AllocateBuffer) -> None:
        self._handles.check_new(kind.buffer, BufferHandle)
        storage = self._context.new_storage(state, kind, kind.size_bytes)
        storage.memory = kind.memory
        buffer = BufferHandle((whole(storage),))
        self._context.work(state, AllocateTask((storage,), ()), storage.device)
        state.targets = buffer.parts
        self._handles.add(kind.buffer, buffer)

    def allocate_tensors(self, state: CommandState, kind: c.AllocateTensors) -> None:
        self._check_new_tensors([kind.buffer, *(number for number, _ in kind.tensors)])
        self._handles.check_new(kind.buffer, BufferHandle)
        types = [type for _, type in kind.tensors]
        placement = self._context.memory(self._context.device(kind.device), kind.buffer_type).place(types)
        storages = tuple(self._context.new_storage(state, kind, size) for size in placement.buffer_bytes)
        tensors = tuple(
            TensorHandle(layout(type, where.offset_bytes), storages[where.buffer])
            for type, where in zip(types, placement.places, strict=True)
        )
        buffer = BufferHandle(tuple(map(whole, storages)))
        self._context.work(state, AllocateTask(storages, tensors), storages[0].device)
        state.targets = buffer.parts
        self._handles.add(kind.buffer, buffer)
        for (number, _), tensor in zip(kind.tensors, tensors, strict=True):
            self._handles.add(number, tensor)

    def _check_new_tensors(self, numbers: Sequence[int]) -> None:
        if len(set(numbers)) < len(numbers):
            raise HandleExistsError("a list of tensors and its buffer name a handle twice")
        for number in numbers:
            self._handles.check_new(number, TensorHandle, len(numbers) - 1)

    def place_tensor(self, state: CommandState, kind: c.PlaceTensor) -> None:
        self._handles.check_new(kind.tensor, TensorHandle)
        buffer = self._handles.get(kind.buffer, BufferHandle)
        if len(buffer.parts) != 1:
            raise InvalidArgumentError(
                "a tensor cannot be placed in a buffer of several parts", advice="allocate another"
            )
        storage = storage_of(buffer.parts[0])
        check_place(kind, storage, self._context.memory(storage.device, storage.buffer_type))
        tensor = TensorHandle(layout(kind.type, kind.offset_bytes), storage)
        self._context.work(state, PlaceTask(tensor), storage.device)
        state.targets, state.writes = (tensor,), False
        self._handles.add(kind.tensor, tensor)

    def set_usage(self, state: CommandState, kind: c.SetUsage) -> None:
        storages = self._storages_of(state, kind.buffer)
        self._context.work(state, UsageTask(storages, kind.usage), storages[0].device)
        state.writes = False

    def clear_buffer(self, state: CommandState, kind: c.ClearBuffer) -> None:
        if not 0 <= kind.value <= 255:
            raise InvalidArgumentError(f"clearing with {kind.value}; a byte is 0 to 255")
        storages = self._storages_of(state, kind.buffer)
        self._context.work(state, ClearTask(storages, kind.value), storages[0].device)
        state.heals = state.targets

    def reset_buffer(self, state: CommandState, kind: c.ResetBuffer) -> None:
        storages = self._storages_of(state, kind.buffer)
        self._context.work(state, ResetTask(storages), storages[0].device)
        state.writes = False

    def _storages_of(self, state: CommandState, number: int) -> tuple[HandleStorage, ...]:
        """Return the storages of a buffer, and make them the command's targets."""
        state.targets = self._handles.get(number, BufferHandle).parts
        return tuple(map(storage_of, state.targets))
