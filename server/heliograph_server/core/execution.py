"""How each task is done on a device: code that runs inside a lane's work.

Every function takes a task whose tensors are allocated and healthy, and returns the completion of
a success. Whatever goes wrong is raised; `typed` makes a HeliographError of it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from heliograph_backends import access
from heliograph_backends.contract import Abort, Buffer, Device, Plan, Tensor, Usage
from heliograph_proto.commands import Bytes, Completion
from heliograph_proto.errors import (
    ComputeFailedError,
    HeliographError,
    InternalError,
    OutOfMemoryError,
    UnsupportedError,
)
from heliograph_proto.types import TensorType
from heliograph_server.core.handles import TensorHandle
from heliograph_server.core.staging import Staging
from heliograph_server.core.tasks import (
    AllocateTask,
    CopyTask,
    FillTask,
    ReadTask,
    RunTask,
    Task,
    WriteTask,
)

logger = logging.getLogger(__name__)

#: An output that is fetched but not kept lies in memory that the plan keeps, up to this size.
MAX_SCRATCH_BYTES = 64 * 1024


class LoadedPlan:
    """A backend's plan, its device, and small buffers that its serial runs use again."""

    def __init__(self, plan: Plan, device: Device) -> None:
        self.plan = plan
        self.device = device
        self._scratch: dict[object, Tensor] = {}
        self._wraps_host = device.capabilities.buffer_from_host
        #: How long the next run may take, all in all: as long as the slowest of the last few.
        self.expected_us = math.inf

    def __repr__(self) -> str:
        return f"<LoadedPlan of {self.plan.graph} on {self.device.name}>"

    def input_of(self, place: int, type: TensorType, data: Bytes) -> Tensor:
        """Bytes from a command as a tensor: in place where the device can, else copied."""
        view = memoryview(data)
        if self._wraps_host:
            try:
                return Tensor(type, self.device.buffer_from_host(view))
            except UnsupportedError:
                self._wraps_host = False
        tensor = self._scratch_tensor(("input", place), type)
        tensor.buffer.set(0, view)
        return tensor

    def output_for(self, place: int, type: TensorType) -> Tensor:
        """Where an output that is only fetched is written."""
        return self._scratch_tensor(("output", place), type)

    def _scratch_tensor(self, key: object, type: TensorType) -> Tensor:
        if key not in self._scratch:
            buffer = self.device.buffer_type.allocate(type.nbytes, Usage.COMPUTE)
            self._scratch[key] = Tensor(type, buffer)
        return self._scratch[key]

    def note(self, took_us: float) -> None:
        """A run took so long. What was slower once is forgotten by half each time."""
        before = self.expected_us / 2 if math.isfinite(self.expected_us) else 0.0
        self.expected_us = max(took_us, before)

    def trim(self) -> None:
        """After a run: keeps only what is small."""
        large = [key for key, one in self._scratch.items() if one.type.nbytes > MAX_SCRATCH_BYTES]
        for key in large:
            self._scratch.pop(key).buffer.free()

    def free(self) -> None:
        """Gives all memory back. Idempotent."""
        self.plan.free()
        for tensor in self._scratch.values():
            tensor.buffer.free()
        self._scratch.clear()


class Execution:
    """Does the tasks of one session."""

    def __init__(
        self,
        device: Callable[[str], Device],
        staging: Staging,
        uploads: dict[int, memoryview],
        reads: Callable[[int, memoryview], None],
    ) -> None:
        self._device = device
        self._staging = staging
        #: Staged bytes of uploads by transfer.
        self._uploads = uploads
        #: Takes the staged bytes of a read, by sequence number.
        self._reads = reads
        self._tasks: dict[type, Callable[[int, Any, Abort], Completion]] = {
            AllocateTask: self._allocate,
            WriteTask: self._write,
            ReadTask: self._read,
            FillTask: self._fill,
            CopyTask: self._copy,
            RunTask: self._run,
        }

    def perform(self, sequence: int, task: Task | None, abort: Abort) -> Completion:
        """Does a task; None is the empty one. Raises anything."""
        if task is None:
            return Completion(sequence)
        return self._tasks[type(task)](sequence, task, abort)

    def _allocate(self, sequence: int, task: AllocateTask, abort: Abort) -> Completion:
        storage = task.tensor.storage
        assert storage is not None
        storage.buffer = new_buffer(self._device(storage.device), storage.size_bytes)
        return Completion(sequence)

    def _write(self, sequence: int, task: WriteTask, abort: Abort) -> Completion:
        data = self._uploads[task.transfer] if task.data is None else memoryview(task.data)
        access.write(task.tensor.placed, task.offset_bytes, data)
        return Completion(sequence)

    def _read(self, sequence: int, task: ReadTask, abort: Abort) -> Completion:
        if not task.transfer:
            data = bytearray(task.size_bytes)
            access.read(task.tensor.placed, task.offset_bytes, memoryview(data))
            return Completion(sequence, data=data)
        staged = self._staging.take(task.size_bytes)
        try:
            access.read(task.tensor.placed, task.offset_bytes, staged)
        except BaseException:
            self._staging.give(staged.nbytes)
            raise
        self._reads(sequence, staged)
        return Completion(sequence)

    def _fill(self, sequence: int, task: FillTask, abort: Abort) -> Completion:
        access.memset(task.tensor.placed, task.offset_bytes, task.size_bytes, task.value)
        return Completion(sequence)

    def _copy(self, sequence: int, task: CopyTask, abort: Abort) -> Completion:
        if task.source is not task.destination:
            access.copy(task.source.placed, task.destination.placed)
        return Completion(sequence)

    def _run(self, sequence: int, task: RunTask, abort: Abort) -> Completion:
        loaded: LoadedPlan = task.plan.plan
        begun = time.perf_counter()
        try:
            inputs = self._inputs(loaded, task)
            outputs = self._outputs(loaded, task)
            started = time.perf_counter()
            loaded.plan.compute(inputs, outputs, abort)
            device_us = (time.perf_counter() - started) * 1e6
            fetched = tuple((one.output, _bytes_of(outputs[one.output])) for one in task.outputs if one.fetch)
        finally:
            loaded.trim()
            loaded.note((time.perf_counter() - begun) * 1e6)
        return Completion(sequence, outputs=fetched, device_us=device_us)

    def _inputs(self, loaded: LoadedPlan, task: RunTask) -> list[Tensor]:
        return [
            given.placed
            if isinstance(given, TensorHandle)
            else loaded.input_of(place, task.plan.inputs[place].type, given)
            for place, given in enumerate(task.inputs)
        ]

    def _outputs(self, loaded: LoadedPlan, task: RunTask) -> Sequence[Tensor | None]:
        outputs: list[Tensor | None] = [None] * len(task.plan.outputs)
        for wanted in task.outputs:
            type = task.plan.outputs[wanted.output].type
            if wanted.tensor is not None:
                storage = wanted.tensor.storage
                assert storage is not None
                storage.buffer = loaded.device.buffer_type.allocate(storage.size_bytes)
                outputs[wanted.output] = wanted.tensor.placed
            elif wanted.fetch:
                outputs[wanted.output] = loaded.output_for(wanted.output, type)
        return outputs


def new_buffer(device: Device, size_bytes: int, usage: Usage = Usage.ANY) -> Buffer:
    """A buffer of zeros. Raises OutOfMemoryError."""
    buffer = device.buffer_type.allocate(size_bytes, usage)
    try:
        buffer.clear()
    except BaseException:
        buffer.free()
        raise
    return buffer


def _bytes_of(tensor: Tensor | None) -> bytearray:
    assert tensor is not None
    data = bytearray(tensor.type.nbytes)
    access.read(tensor, 0, memoryview(data))
    return data


def typed(error: BaseException, doing: str, *, computing: bool = False) -> HeliographError:
    """What was raised as a value that can cross the wire; logs what was not expected."""
    if isinstance(error, HeliographError):
        return error
    logger.error("%s failed: %s: %s", doing, type(error).__name__, error)
    logger.debug("the traceback of that failure", exc_info=error)
    if isinstance(error, MemoryError):
        return OutOfMemoryError(f"{doing}: the host's memory does not suffice", advice="free something")
    kind = ComputeFailedError if computing else InternalError
    return kind(f"{doing} failed: {type(error).__name__}: {error}", advice="the server's log says more")
