"""Performs tasks on devices, inside a queue's work.

Every method receives a task whose tensors are allocated and healthy, and returns the completion of
a success. Failures are raised; the caller passes them to `typed` for a HeliographError.

Device threads, or the thread that submitted a short run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from heliograph_backends.contract import Abort, Buffer, Tensor, access, host_bytes
from heliograph_proto.commands import Completion
from heliograph_proto.errors import CancelledError, HeliographError
from heliograph_server.compile.services import SessionServices
from heliograph_server.plans.loaded_plan import LoadedPlan, PlanCopy
from heliograph_server.resources.failures import typed
from heliograph_server.resources.handles import HandleStorage, TensorHandle
from heliograph_server.resources.memories import find_buffer_type
from heliograph_server.resources.quotas import QuotaKind
from heliograph_server.session.handoff import TensorHandoff
from heliograph_server.session.hosted_loops import HostedLoopRun, hosted_run
from heliograph_server.session.loop_runner import LoopRun
from heliograph_server.session.parts.edges import LoopState
from heliograph_server.session.protocol.dependencies import CommandState
from heliograph_server.session.protocol.instructions import (
    AllocateTask,
    ClearTask,
    CopyTask,
    FetchTask,
    FillTask,
    OfferTask,
    PlaceTask,
    ReadTask,
    ResetTask,
    RunTask,
    SharedPlace,
    Task,
    UsageTask,
    WriteTask,
)
from heliograph_server.session.run_timeline import RunBook
from heliograph_server.session.staging import (
    StagedMessages,
    StagedUpload,
    Staging,
    in_place,
    read,
    read_messages,
    write,
    write_incoming,
)
from heliograph_server.session.taps import LoopObserver, Observer
from heliograph_server.session.traffic import TrafficCounter, Transport

logger = logging.getLogger(__name__)


class SharedPlaces(Protocol):
    """The memory that the session shares with its client."""

    def shared_part(self, place: SharedPlace) -> memoryview:
        """Return bytes of it, in place. Raises UnknownHandleError once the session has ended."""

    def leave_place(self, sequence: int) -> None:
        """Release the command's place, so that the command may be interrupted."""

    def take_place(self, sequence: int) -> bool:
        """Claim the command's place. False if it may no longer be used."""


class ReadBytes(Protocol):
    """Takes the bytes of reads to those who wait for them."""

    def stage(self, sequence: int, data: StagedMessages) -> None:
        """Keep the bytes that an unfinished command has read."""

    def place(self, sequence: int, transfer: int, data: memoryview, abort: Abort) -> bool:
        """See `Downloads.place`."""


class Operations:
    """Performs the tasks of one session."""

    def __init__(
        self,
        services: SessionServices,
        staging: Staging,
        uploads: dict[int, StagedUpload],
        reads: ReadBytes,
        places: SharedPlaces,
        observer: Callable[[int], Observer | None],
        handoff: TensorHandoff,
        book: RunBook,
        take_state: Callable[[int], LoopState | None],
    ) -> None:
        #: Returns the state from which a loop of a restored session goes on, once.
        self._take_state = take_state
        self._devices = services.devices
        self._chunk_bytes = services.limits.chunk_bytes
        self._room = services.room
        self._holding = services.holding
        self._staging = staging
        #: Bytes of uploads, by transfer.
        self._uploads = uploads
        #: Receives the bytes of reads.
        self._reads = reads
        self._places = places
        #: Counts this session's writes and reads.
        self.traffic = TrafficCounter()
        #: Returns the observer of a run, by sequence number.
        self._observer = observer
        self._handoff = handoff
        #: Records the times of runs.
        self._book = book
        self._tasks: dict[type, Callable[[int, Any, Abort], Completion]] = {
            AllocateTask: self._allocate,
            PlaceTask: self._place,
            UsageTask: self._set_usage,
            ClearTask: self._clear,
            ResetTask: self._reset,
            WriteTask: self._write,
            ReadTask: self._read,
            FillTask: self._fill,
            CopyTask: self._copy,
            OfferTask: self._offer,
            FetchTask: self._fetch,
            RunTask: self._run,
        }

    def perform(self, sequence: int, task: Task | None, abort: Abort) -> Completion:
        """Does a task; None is the empty one. Raises anything."""
        if task is None:
            return Completion(sequence)
        return self._tasks[type(task)](sequence, task, abort)

    def _allocate(self, sequence: int, task: AllocateTask, abort: Abort) -> Completion:
        # Storages in the client's own memory take nothing of a device.
        with self._charged([one for one in task.storages if one.memory is None]):
            self._room.for_work(lambda: self._make_storages(task, abort))
        return Completion(sequence)

    @contextmanager
    def _charged(self, storages: Sequence[HandleStorage]) -> Iterator[None]:
        """Charge storages to the tenant, and undo it for those that are not allocated.

        Raises OutOfMemoryError.
        """
        new, size_bytes = [], 0
        for storage in storages:
            if not storage.is_charged:
                new.append(storage)
                size_bytes += storage.size_bytes
        if size_bytes:
            self._holding.take(QuotaKind.MEMORY, size_bytes)
        for storage in new:
            storage.is_charged = True
        try:
            yield
        except BaseException:
            for storage in new:
                if storage.buffer is None:
                    storage.is_charged = False
                    self._holding.give(QuotaKind.MEMORY, storage.size_bytes)
            raise

    def _make_storages(self, task: AllocateTask, abort: Abort) -> None:
        made: list[Buffer] = []
        try:
            for storage in task.storages:
                made.append(self._new_buffer(storage, abort))
            for storage, buffer in zip(task.storages, made, strict=True):
                storage.buffer = buffer
            for tensor in task.tensors:
                init_tensor(tensor)
        except BaseException:
            for storage, buffer in zip(task.storages, made, strict=False):
                storage.buffer = None
                buffer.free()
            raise

    def _new_buffer(self, storage: HandleStorage, abort: Abort) -> Buffer:
        device = self._devices.device(storage.device)
        if storage.memory is not None:
            return device.buffer_from_host(storage.memory)
        memory = find_buffer_type(device, storage.buffer_type)
        return memory.zeros(storage.size_bytes, storage.usage, abort)

    def _place(self, sequence: int, task: PlaceTask, abort: Abort) -> Completion:
        init_tensor(task.tensor)
        return Completion(sequence)

    def _set_usage(self, sequence: int, task: UsageTask, abort: Abort) -> Completion:
        for storage in task.storages:
            storage.buffer.set_usage(task.usage)
            storage.usage = task.usage
        return Completion(sequence)

    def _clear(self, sequence: int, task: ClearTask, abort: Abort) -> Completion:
        for storage in task.storages:
            storage.buffer.fill(0, storage.buffer.size_bytes, task.value, abort)
        return Completion(sequence)

    def _reset(self, sequence: int, task: ResetTask, abort: Abort) -> Completion:
        for storage in task.storages:
            storage.buffer.reset()
        return Completion(sequence)

    def _write(self, sequence: int, task: WriteTask, abort: Abort) -> Completion:
        if task.place is not None:
            self._write_shared(sequence, task, task.place)
            return Completion(sequence)
        if task.command.data is None:
            incoming = self._uploads[task.command.transfer]
            write_incoming(task, incoming, abort)
            copied = incoming.size_bytes - incoming.placed_bytes + incoming.copied_bytes
            self.traffic.written(incoming.size_bytes, copied, Transport.BULK)
            return Completion(sequence)
        data = memoryview(task.command.data)
        write(task, data)
        self.traffic.written(data.nbytes, data.nbytes, Transport.INLINE)
        return Completion(sequence)

    def _write_shared(self, sequence: int, task: WriteTask, place: SharedPlace) -> None:
        data, copies = self._places.shared_part(place), 1
        if not _is_quick(task):
            data, copies = private_copy(data), 2
            self._places.leave_place(sequence)
        write(task, data)
        self.traffic.written(data.nbytes, copies * data.nbytes, Transport.SHARED)

    def _read(self, sequence: int, task: ReadTask, abort: Abort) -> Completion:
        if task.place is not None:
            self._read_shared(sequence, task, task.place)
            return Completion(sequence)
        if not task.command.transfer:
            data = bytearray(task.command.size_bytes)
            read(task, memoryview(data))
            self.traffic.read(task.command.size_bytes, task.command.size_bytes, Transport.INLINE)
            return Completion(sequence, data=data)
        whole = in_place(task)
        if whole is not None and self._reads.place(sequence, task.command.transfer, whole, abort):
            self.traffic.read(whole.nbytes, 0, Transport.BULK)
            return Completion(sequence)
        self._staging.reserve(task.command.size_bytes)
        try:
            staged = read_messages(task, self._chunk_bytes)
        except BaseException:
            self._staging.give(task.command.size_bytes)
            raise
        self.traffic.read(staged.nbytes, staged.copied_bytes, Transport.BULK)
        self._reads.stage(sequence, staged)
        return Completion(sequence)

    def _read_shared(self, sequence: int, task: ReadTask, place: SharedPlace) -> None:
        out = self._places.shared_part(place)
        if _is_quick(task):
            read(task, out)
            self.traffic.read(task.command.size_bytes, task.command.size_bytes, Transport.SHARED)
            return
        self._places.leave_place(sequence)
        found = host_bytes(np.empty(task.command.size_bytes, np.uint8))
        read(task, found)
        if self._places.take_place(sequence):
            np.copyto(np.asarray(out), np.asarray(found))
        self.traffic.read(task.command.size_bytes, 2 * task.command.size_bytes, Transport.SHARED)

    def _fill(self, sequence: int, task: FillTask, abort: Abort) -> Completion:
        command = task.command
        access.memset(task.tensor.placed, command.offset_bytes, command.size_bytes, command.value, abort)
        return Completion(sequence)

    def _copy(self, sequence: int, task: CopyTask, abort: Abort) -> Completion:
        if task.source is task.destination:
            return Completion(sequence)
        return Completion(sequence, copy_path=access.copy(task.source.placed, task.destination.placed, abort))

    def _offer(self, sequence: int, task: OfferTask, abort: Abort) -> Completion:
        self._handoff.offer(sequence, task, abort)
        return Completion(sequence)

    def _fetch(self, sequence: int, task: FetchTask, abort: Abort) -> Completion:
        self._handoff.fetch(task, abort)
        return Completion(sequence)

    def _run(self, sequence: int, task: RunTask, abort: Abort) -> Completion:
        if task.command.loop is not None:
            return self._loop(sequence, task, abort)
        loaded: LoadedPlan = task.plan.plan
        # Before its inputs go to the devices that are left.
        loaded.check_runnable()
        copy, observe = loaded.copies[task.slot], loaded.observing(self._observer(sequence))
        # A run that assigned variables, or sent values to others, cannot be repeated.
        once = task.plan.assigned or observe is not None or task.command.exchange_run
        begun = time.perf_counter()
        try:
            inputs = self._room.for_work(partial(self._inputs, copy, task))
            outputs = self._outputs(copy, task)

            def compute() -> None:
                asked = time.perf_counter()
                with copy.turn(abort) as turn:
                    copy.times.waited_us += (time.perf_counter() - asked) * 1e6
                    copy.compute(inputs, outputs, abort, observe, task.command.exchange_run, turn)

            self._book.had_inputs(sequence)
            started = time.perf_counter()
            try:
                compute() if once else self._room.for_work(compute)
            except HeliographError as error:
                raise loaded.explain(error) from None
            return self._completion(sequence, copy, task, outputs, started)
        finally:
            copy.trim()
            loaded.note(task.slot, (time.perf_counter() - begun) * 1e6)

    def _loop(self, sequence: int, task: RunTask, abort: Abort) -> Completion:
        loaded: LoadedPlan = task.plan.plan
        loaded.check_runnable()
        copy, observer = loaded.copies[task.slot], self._observer(sequence)
        assert isinstance(observer, LoopObserver)
        try:
            inputs = self._room.for_work(partial(self._inputs, copy, task))
            outputs = self._outputs(copy, task)
            state = self._take_state(sequence)
            looping = self._room.for_work(partial(_looping, task, inputs, outputs, state))
            self._book.had_inputs(sequence)
            started = time.perf_counter()
            # A step that assigned variables, or sent values of nodes, cannot be repeated.
            again = not (task.plan.assigned or loaded.is_observed or task.command.exchange_run)
            try:
                looping.run(observer, abort, self._room if again else None)
            except CancelledError:
                raise
            except Exception as error:
                failure = loaded.explain(typed(error, f"command {sequence}", computing=True))
                raise looping.explain(observer.step, failure) from None
            completion = self._completion(sequence, copy, task, looping.results(), started)
            return replace(completion, steps=looping.done)
        finally:
            copy.trim()

    def _completion(
        self,
        sequence: int,
        copy: PlanCopy,
        task: RunTask,
        outputs: Sequence[Tensor | None],
        started: float,
    ) -> Completion:
        """Copy the outputs that were not written in place, and fetch the requested ones."""
        for one in task.outputs:
            source = outputs[one.output]
            if one.into is not None and source is not None and not copy.writes(one.into.placed):
                access.copy(source, one.into.placed)
        # The splits of a loop's steps are not recorded.
        self._book.computed(sequence, copy.plan if task.command.loop is None else None)
        device_us = (time.perf_counter() - started) * 1e6
        fetched = []
        for one in task.outputs:
            if one.fetch:
                tensor = outputs[one.output]
                assert tensor is not None
                fetched.append((one.output, access.read_whole(tensor)))
        self._book.gave(sequence, fetched)
        return Completion(sequence, outputs=tuple(fetched), device_us=device_us)

    def _inputs(self, copy: PlanCopy, task: RunTask) -> list[Tensor]:
        return [
            given.placed
            if isinstance(given, TensorHandle)
            else copy.input_of(place, task.plan.inputs[place].type, given)
            for place, given in enumerate(task.inputs)
        ]

    def _outputs(self, copy: PlanCopy, task: RunTask) -> Sequence[Tensor | None]:
        """The tensor of each output of the plan; None for those that were not requested."""
        make = partial(self._make_outputs, copy, task)
        created = []
        for one in task.outputs:
            if one.tensor is not None and one.tensor.storage is not None:
                created.append(one.tensor.storage)
        if not created:
            return self._room.for_work(make)
        with self._charged(created):
            return self._room.for_work(make)

    def _make_outputs(self, copy: PlanCopy, task: RunTask) -> Sequence[Tensor | None]:
        outputs: list[Tensor | None] = [None] * len(task.plan.outputs)
        for one in task.outputs:
            if one.tensor is not None:
                storage = one.tensor.storage
                assert storage is not None
                if storage.buffer is not None:
                    # An earlier try found memory for this output, but not for another.
                    storage.buffer.free()
                storage.buffer = copy.device.buffer_type.allocate(storage.size_bytes)
                init_tensor(one.tensor)
                outputs[one.output] = one.tensor.placed
            elif one.into is not None and copy.writes(one.into.placed):
                outputs[one.output] = one.into.placed
            elif one.fetch or one.into is not None:
                outputs[one.output] = copy.output_for(one.output, task.plan.outputs[one.output].type)
        return outputs


def _looping(
    task: RunTask,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor | None],
    state: LoopState | None,
) -> LoopRun | HostedLoopRun:
    """Return what runs a loop; one that a restart broke off goes on from its state."""
    loaded: LoadedPlan = task.plan.plan
    if state is None:
        return hosted_run(loaded, task, inputs, outputs) or LoopRun(loaded, task, inputs, outputs)
    made = LoopRun(loaded, task, inputs, outputs)
    made.go_on_from(state)
    return made


def init_tensor(tensor: TensorHandle) -> None:
    """Initialize a tensor in allocated memory."""
    placed = tensor.placed
    placed.buffer.init_tensor(placed)
    tensor.is_placed = True


def tell_weights(state: CommandState) -> None:
    """Tell the buffers of weights that a command wrote to, also after a failure."""
    for target in state.targets if state.writes else ():
        if target.storage is not None:
            target.storage.tell_weights(target)


def _is_quick(task: WriteTask | ReadTask) -> bool:
    """True if the bytes move by a copy in this host's memory, not to a device or another daemon."""
    return task.tensor.placed.buffer.buffer_type.is_host


def private_copy(data: memoryview) -> memoryview:
    """Return a copy of bytes that no other process can change. Other threads run meanwhile."""
    made = np.empty(data.nbytes, np.uint8)
    np.copyto(made, np.asarray(data))
    return host_bytes(made)
