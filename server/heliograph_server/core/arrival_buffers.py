"""Buffers: making them, placing tensors in them, and what concerns all of their bytes."""

from __future__ import annotations

from collections.abc import Sequence

from heliograph_proto import commands as c
from heliograph_proto.errors import HandleExistsError, InvalidArgumentError
from heliograph_server.core.arrival_base import ArrivalBase
from heliograph_server.core.checks import check_place, check_writable, storage_of
from heliograph_server.core.handles import BufferHandle, Storage, TensorHandle, layout, whole
from heliograph_server.core.ordering import Entry
from heliograph_server.core.tasks import AllocateTask, ClearTask, PlaceTask, ResetTask, UsageTask


class BufferArrivals(ArrivalBase):
    """The commands that name buffers."""

    def _allocate_buffer(self, entry: Entry, kind: c.AllocateBuffer) -> None:
        self._table.check_new(kind.buffer, BufferHandle)
        storage = self._new_storage(entry, kind, kind.size_bytes)
        storage.memory = kind.memory
        buffer = BufferHandle((whole(storage),))
        self._work(entry, AllocateTask((storage,), ()), storage.device)
        entry.targets = buffer.parts
        self._table.add(kind.buffer, buffer)

    def _allocate_tensors(self, entry: Entry, kind: c.AllocateTensors) -> None:
        self._check_new_tensors([kind.buffer, *(number for number, _ in kind.tensors)])
        self._table.check_new(kind.buffer, BufferHandle)
        types = [type for _, type in kind.tensors]
        placement = self._memory(self._device(kind.device), kind.buffer_type).place(types)
        storages = tuple(self._new_storage(entry, kind, size) for size in placement.buffer_bytes)
        tensors = tuple(
            TensorHandle(layout(type, where.offset_bytes), storages[where.buffer])
            for type, where in zip(types, placement.places, strict=True)
        )
        buffer = BufferHandle(tuple(map(whole, storages)))
        self._work(entry, AllocateTask(storages, tensors), storages[0].device)
        entry.targets = buffer.parts
        self._table.add(kind.buffer, buffer)
        for (number, _), tensor in zip(kind.tensors, tensors, strict=True):
            self._table.add(number, tensor)

    def _check_new_tensors(self, numbers: Sequence[int]) -> None:
        if len(set(numbers)) < len(numbers):
            raise HandleExistsError("a list of tensors and its buffer name a handle twice")
        for number in numbers:
            self._table.check_new(number, TensorHandle, len(numbers) - 1)

    def _place_tensor(self, entry: Entry, kind: c.PlaceTensor) -> None:
        self._table.check_new(kind.tensor, TensorHandle)
        buffer = self._table.get(kind.buffer, BufferHandle)
        if len(buffer.parts) != 1:
            raise InvalidArgumentError("a buffer of several parts has no places", advice="allocate another")
        storage = storage_of(buffer.parts[0])
        check_place(kind, storage, self._memory(storage.device, storage.buffer_type))
        tensor = TensorHandle(layout(kind.type, kind.offset_bytes), storage)
        self._work(entry, PlaceTask(tensor), storage.device)
        entry.targets, entry.writes = (tensor,), False
        self._table.add(kind.tensor, tensor)

    def _set_usage(self, entry: Entry, kind: c.SetUsage) -> None:
        storages = self._storages_of(entry, kind.buffer)
        self._work(entry, UsageTask(storages, kind.usage), storages[0].device)
        entry.writes = False

    def _clear_buffer(self, entry: Entry, kind: c.ClearBuffer) -> None:
        if not 0 <= kind.value <= 255:
            raise InvalidArgumentError(f"clearing with {kind.value}; a byte is 0 to 255")
        storages = self._storages_of(entry, kind.buffer)
        for part in entry.targets:
            check_writable(part)
        self._work(entry, ClearTask(storages, kind.value), storages[0].device)
        entry.heals = entry.targets

    def _reset_buffer(self, entry: Entry, kind: c.ResetBuffer) -> None:
        storages = self._storages_of(entry, kind.buffer)
        for part in entry.targets:
            # Kernels of the plans whose weights lie there read what would be dropped.
            check_writable(part)
        self._work(entry, ResetTask(storages), storages[0].device)
        entry.writes = False

    def _storages_of(self, entry: Entry, number: int) -> tuple[Storage, ...]:
        """The storages of a buffer, all of which the entry has for itself."""
        entry.targets = self._table.get(number, BufferHandle).parts
        return tuple(map(storage_of, entry.targets))
