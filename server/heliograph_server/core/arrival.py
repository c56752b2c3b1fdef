"""What a command means, decided when it arrives: its handles, its task, and every static error.

`Arrivals.admit` turns a command into an entry with all that the rest needs to know: what to do,
what it uses, what it writes, where it runs. It changes the handle table, since a handle is known
from here on, and nothing else. Numbers from the wire are compared as Python's integers, which do
not overflow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from heliograph_backends.contract import Tensor
from heliograph_proto import commands as c
from heliograph_proto.errors import (
    HeliographError,
    InvalidArgumentError,
    InvalidInputError,
    LimitExceededError,
    OutOfRangeError,
    UnknownDeviceError,
)
from heliograph_proto.limits import Limits
from heliograph_proto.types import TensorType, dtype
from heliograph_server.core.handles import (
    EventHandle,
    HandleTable,
    Lane,
    PlanHandle,
    Storage,
    StreamHandle,
    TensorHandle,
    layout,
)
from heliograph_server.core.ordering import Entry
from heliograph_server.core.tasks import (
    AllocateTask,
    CopyTask,
    FillTask,
    FreeTask,
    ReadTask,
    RunTask,
    Task,
    Wanted,
    WriteTask,
)

#: Stands in for the type of a tensor that was never made.
NO_TYPE = TensorType(dtype("u8"), (0,))


class Arrivals:
    """Looks commands up in a handle table. `open_lane` is called for each lane that is made."""

    def __init__(
        self,
        table: HandleTable,
        limits: Limits,
        devices: tuple[str, ...],
        open_lane: Callable[[Lane], None],
    ) -> None:
        self._table = table
        self._limits = limits
        self._open_lane = open_lane
        #: Every device has a lane for what its named streams cannot do.
        self.lanes: dict[str, Lane | None] = dict.fromkeys(devices)
        self._default = StreamHandle(Lane(""))
        #: Of commands that have not retired.
        self.inline_bytes = 0
        self._admit: dict[type, Callable[[Entry, Any], None]] = {
            c.Run: self._run,
            c.SetTensor: self._set_tensor,
            c.GetTensor: self._get_tensor,
            c.Allocate: self._allocate,
            c.View: self._view,
            c.CreateStream: self._create_stream,
            c.Memset: self._memset,
            c.CopyTensor: self._copy_tensor,
            c.Free: self._free,
            c.Record: self._record,
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
        entry.error, entry.heals = error, None
        entry.uses = ()
        entry.targets = self._existing_targets(kind)
        for number in produced_tensors(kind):
            self._table.add_poisoned(number, TensorHandle(layout(NO_TYPE), error=error))
        if isinstance(kind, c.CreateStream):
            self._table.add_poisoned(kind.stream, StreamHandle(Lane(""), error=error))
        if entry.targets:
            entry.lane = entry.lane or self.device_lane(_storage(entry.targets[0]).device)

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

    def device_lane(self, device: str) -> Lane:
        """The lane of a device for what no named stream does. Raises UnknownDeviceError."""
        if device not in self.lanes:
            raise unknown_device(device, self.lanes)
        lane = self.lanes[device]
        if lane is None:
            lane = self.lanes[device] = Lane(device)
            self._open_lane(lane)
        return lane

    # Streams, and where work runs

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

    # Making handles

    def _allocate(self, entry: Entry, kind: c.Allocate) -> None:
        self._table.check_new(kind.tensor, TensorHandle)
        tensor = self._new_tensor(entry, kind.type, self._device(kind.device))
        self._work(entry, AllocateTask(tensor), _storage(tensor).device)
        entry.targets = (tensor,)
        self._table.add(kind.tensor, tensor)

    def _new_tensor(self, entry: Entry, type: TensorType, device: str) -> TensorHandle:
        return TensorHandle(layout(type), Storage(type.nbytes, device, maker=entry.sequence))

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
                gone.append(self._table.remove(number))
            except HeliographError as error:
                problem = problem or error
        entry.task = FreeTask(tuple(gone))
        entry.error = problem.from_command(entry.sequence) if problem else None

    # Bytes of tensors

    def _set_tensor(self, entry: Entry, kind: c.SetTensor) -> None:
        tensor = self._table.get(kind.tensor, TensorHandle)
        size = self._sent_bytes(kind)
        check_range(tensor.layout, kind.offset_bytes, size)
        self._hold(entry, 0 if kind.data is None else size)
        task = WriteTask(tensor, kind.offset_bytes, kind.data, kind.transfer)
        self._write(entry, task, tensor, kind.offset_bytes, size)

    def _sent_bytes(self, kind: c.SetTensor) -> int:
        if kind.data is not None:
            self._check_inline(len_bytes(kind.data), "a command")
            return len_bytes(kind.data)
        if kind.size_bytes > self._limits.in_flight_bytes:
            raise LimitExceededError(
                f"a transfer of {kind.size_bytes:,} bytes; this server stages "
                f"{self._limits.in_flight_bytes:,}",
                advice="send it in pieces",
            )
        return kind.size_bytes

    def _memset(self, entry: Entry, kind: c.Memset) -> None:
        tensor = self._table.get(kind.tensor, TensorHandle)
        check_range(tensor.layout, kind.offset_bytes, kind.size_bytes)
        if not 0 <= kind.value <= 255:
            raise InvalidArgumentError(f"memset with {kind.value}; a byte is 0 to 255")
        task = FillTask(tensor, kind.offset_bytes, kind.size_bytes, kind.value)
        self._write(entry, task, tensor, kind.offset_bytes, kind.size_bytes)

    def _write(self, entry: Entry, task: Task, tensor: TensorHandle, offset: int, size: int) -> None:
        self._work(entry, task, _storage(tensor).device)
        entry.targets = (tensor,)
        if offset == 0 and size == tensor.type.nbytes:
            entry.heals = tensor
        elif tensor.layout.is_contiguous:
            entry.heals, entry.part = tensor, tensor.part(offset, size)
        else:
            entry.uses = (tensor,)

    def _get_tensor(self, entry: Entry, kind: c.GetTensor) -> None:
        tensor = self._table.get(kind.tensor, TensorHandle)
        check_range(tensor.layout, kind.offset_bytes, kind.size_bytes)
        if kind.transfer:
            _check_transfer(kind.transfer)
        else:
            self._check_inline(kind.size_bytes, "a completion")
            self._hold(entry, kind.size_bytes)
        task = ReadTask(tensor, kind.offset_bytes, kind.size_bytes, kind.transfer)
        self._work(entry, task, _storage(tensor).device)
        entry.uses = (tensor,)

    def _copy_tensor(self, entry: Entry, kind: c.CopyTensor) -> None:
        source = self._table.get(kind.source, TensorHandle)
        destination = self._table.get(kind.destination, TensorHandle)
        if source.type != destination.type:
            raise InvalidArgumentError(f"copy of {source.type} to {destination.type}: the types differ")
        if source is not destination and overlap(source, destination):
            raise InvalidArgumentError("copy between tensors that overlap", advice="copy by way of a third")
        task = CopyTask(source, destination)
        self._work(entry, task, _storage(destination).device)
        entry.uses, entry.targets, entry.heals = (source,), (destination,), destination

    def _check_inline(self, size: int, where: str) -> None:
        if size > self._limits.inline_bytes:
            raise LimitExceededError(
                f"{size:,} bytes in {where}; this server takes {self._limits.inline_bytes:,}",
                advice="use a transfer, or bind a tensor",
            )

    # Runs

    def _run(self, entry: Entry, kind: c.Run) -> None:
        plan = self._table.get(kind.plan, PlanHandle)
        inputs = self._inputs(plan, kind.inputs)
        outputs = self._outputs(entry, plan, kind.outputs)
        sent = sum(len_bytes(one) for one in inputs if not isinstance(one, TensorHandle))
        fetched = sum(plan.outputs[one.output].type.nbytes for one in outputs if one.fetch)
        self._hold(entry, sent + fetched)
        self._work(entry, RunTask(plan, inputs, outputs), plan.device)
        bound = tuple(one for one in inputs if isinstance(one, TensorHandle))
        entry.uses = (*bound, *plan.read, *plan.assigned)
        made = tuple(one.tensor for one in outputs if one.tensor is not None)
        entry.targets = (*made, *plan.assigned)
        for binding, wanted in zip(kind.outputs, outputs, strict=True):
            if wanted.tensor is not None:
                self._table.add(binding.tensor, wanted.tensor)

    def _inputs(
        self, plan: PlanHandle, bindings: tuple[c.InputBinding, ...]
    ) -> tuple[c.Bytes | TensorHandle, ...]:
        given: dict[int, c.Bytes | TensorHandle] = {}
        for binding in bindings:
            if not 0 <= binding.input < len(plan.inputs):
                raise InvalidInputError(f"input {binding.input} of a plan with {len(plan.inputs)}")
            if binding.input in given:
                raise InvalidInputError(f"input {plan.inputs[binding.input].name!r} is given twice")
            given[binding.input] = self._input(plan, binding)
        missing = [port.name for place, port in enumerate(plan.inputs) if place not in given]
        if missing:
            raise InvalidInputError(f"input {missing[0]!r} is missing", advice="give every input of the plan")
        return tuple(given[place] for place in range(len(plan.inputs)))

    def _input(self, plan: PlanHandle, binding: c.InputBinding) -> c.Bytes | TensorHandle:
        port = plan.inputs[binding.input]
        if binding.data is None:
            tensor = self._table.get(binding.tensor, TensorHandle)
            if tensor.type != port.type:
                raise InvalidInputError(f"input {port.name!r} is {port.type}, not {tensor.type}")
            return tensor
        size = len_bytes(binding.data)
        if size != port.type.nbytes:
            raise InvalidInputError(
                f"input {port.name!r} is {port.type} of {port.type.nbytes} bytes, not {size}"
            )
        self._check_inline(size, "a command")
        return binding.data

    def _outputs(
        self, entry: Entry, plan: PlanHandle, bindings: tuple[c.OutputBinding, ...]
    ) -> tuple[Wanted, ...]:
        self._check_outputs(plan, bindings)
        wanted = []
        for binding in bindings:
            type = plan.outputs[binding.output].type
            tensor = self._new_tensor(entry, type, plan.device) if binding.tensor else None
            wanted.append(Wanted(binding.output, tensor, binding.fetch))
        return tuple(wanted)

    def _check_outputs(self, plan: PlanHandle, bindings: tuple[c.OutputBinding, ...]) -> None:
        places, numbers = set(), set()
        for binding in bindings:
            if not 0 <= binding.output < len(plan.outputs):
                raise InvalidArgumentError(f"output {binding.output} of a plan with {len(plan.outputs)}")
            if binding.output in places or binding.tensor in numbers:
                raise InvalidArgumentError(f"output {binding.output}, or its handle, is bound twice")
            places.add(binding.output)
            if binding.tensor:
                numbers.add(binding.tensor)
                self._table.check_new(binding.tensor, TensorHandle, len(numbers))
            if binding.fetch:
                self._check_inline(plan.outputs[binding.output].type.nbytes, "a completion")

    # Refusals

    def _existing_targets(self, kind: c.CommandKind | None) -> tuple[TensorHandle, ...]:
        """Tensors that exist and that the refused command was to write."""
        match kind:
            case c.SetTensor(tensor=number) | c.Memset(tensor=number) | c.CopyTensor(destination=number):
                found = self._table.peek(number, TensorHandle)
                return () if found is None or found.storage is None else (found,)
            case c.Run(plan=number):
                plan = self._table.peek(number, PlanHandle)
                return () if plan is None else plan.assigned
        return ()


def produced_tensors(kind: c.CommandKind | None) -> tuple[int, ...]:
    """The handles of the tensors that a command makes."""
    match kind:
        case c.Allocate(tensor=number) | c.View(tensor=number):
            return (number,)
        case c.Run(outputs=outputs):
            return tuple(binding.tensor for binding in outputs if binding.tensor)
    return ()


def unknown_device(name: str, known: Iterable[str]) -> UnknownDeviceError:
    """The error for a name that no device has."""
    return UnknownDeviceError(f"no device is named {name[:64]!r}", advice=f"there are: {', '.join(known)}")


def len_bytes(data: c.Bytes) -> int:
    return data.nbytes if isinstance(data, memoryview) else len(data)


def check_range(tensor: Tensor, offset_bytes: int, size_bytes: int) -> None:
    """Raises OutOfRangeError or InvalidArgumentError, as `heliograph_backends.access` would later."""
    tensor.check_range(offset_bytes, size_bytes)
    item = tensor.type.dtype.block_bytes
    if not tensor.is_contiguous and (offset_bytes % item or size_bytes % item):
        raise InvalidArgumentError(
            f"bytes {offset_bytes} to {offset_bytes + size_bytes} of {tensor.type} with gaps: "
            f"offset and size must be whole elements of {item} bytes"
        )


def view_of(source: Tensor, kind: c.View) -> Tensor:
    """The layout of a view. Raises OutOfRangeError or InvalidArgumentError.

    Kernels read whole elements, so a view begins and steps at multiples of one.
    """
    strides, item = kind.strides_bytes, kind.type.dtype.block_bytes
    if strides and (len(strides) != kind.type.ndim or kind.type.dtype.block_size > 1):
        raise InvalidArgumentError(
            f"{len(strides)} strides for a view of {kind.type}: one for each dimension, none for blocks"
        )
    if any(step < 0 for step in strides):
        raise OutOfRangeError(f"a view with the strides {strides}: each must be 0 or more")
    # From the storage's first byte, which is aligned for every type; blocks are read by the byte.
    base = source.offset_bytes if kind.type.dtype.block_size == 1 else 0
    if any(number % item for number in (base + kind.offset_bytes, *strides)):
        raise InvalidArgumentError(f"offset and strides of a view of {kind.type} must be multiples of {item}")
    return source.view(kind.type, kind.offset_bytes, strides)


def overlap(one: TensorHandle, other: TensorHandle) -> bool:
    """Whether two tensors may share bytes."""
    if one.storage is not other.storage or 0 in (one.layout.extent_bytes, other.layout.extent_bytes):
        return False
    (start, end), (other_start, other_end) = one.span, other.span
    return start < other_end and other_start < end


def _check_transfer(transfer: int) -> None:
    if not 0 < transfer < 2**64:
        raise InvalidArgumentError(f"transfer {transfer} is not a number of 64 bits")


def _storage(tensor: TensorHandle) -> Storage:
    assert tensor.storage is not None  # a handle from `HandleTable.get` holds no error
    return tensor.storage
