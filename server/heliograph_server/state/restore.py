"""Puts an image into a new session: the same handles, bytes, plans and variables.

A tensor on a device that is gone, and whatever else cannot be restored, is poisoned with an error
that says so; the rest lives.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from heliograph_backends.contract import Buffer, Tensor
from heliograph_proto.commands import SERVER_HANDLE
from heliograph_proto.devices import Usage
from heliograph_proto.errors import (
    HeliographError,
    NotReplayableError,
    OutOfMemoryError,
    SnapshotFailedError,
)
from heliograph_proto.plans import CompileRequest
from heliograph_proto.types import TensorType, dtype
from heliograph_server.resources.failures import typed
from heliograph_server.resources.handles import (
    BoundLeaves,
    BufferHandle,
    DeviceQueue,
    EventHandle,
    HandleStorage,
    PlanHandle,
    Poison,
    ReservationHandle,
    StreamHandle,
    TensorHandle,
    layout,
    whole,
)
from heliograph_server.resources.memories import find_buffer_type
from heliograph_server.resources.quotas import QuotaKind
from heliograph_server.session.operations import init_tensor
from heliograph_server.session.parts.edges import LoopState
from heliograph_server.session.session import Session
from heliograph_server.state.image import (
    Image,
    ImageLayout,
    ImageLoop,
    ImagePlan,
    ImageStorage,
    ImageStream,
)
from heliograph_server.state.kept_memory import KeptMemory
from heliograph_server.state.requests import decode_compile, decode_reserve

logger = logging.getLogger(__name__)

#: The handles under which tensors are bound to plans of a restored session, for a moment.
_FOR_A_MOMENT = SERVER_HANDLE | 1 << 62
#: The type of tensors of which only an error is left.
_BYTES = TensorType(dtype("u8"), (0,))


class ContentSource(Protocol):
    """The contents of an image."""

    def read(self, digest: bytes) -> Iterator[memoryview]:
        """Read a content in pieces, each valid until the next one. Raises SnapshotFailedError."""

    def read_all(self, digests: Sequence[bytes]) -> Iterator[memoryview]:
        """As `read`, for contents one after the other."""

    def whole(self, digest: bytes) -> bytes:
        """Read a small content. Raises SnapshotFailedError."""


class Restore:
    """Restores one image into a session that has received no command."""

    def __init__(
        self, session: Session, image: Image, store: ContentSource, kept: KeptMemory | None = None
    ) -> None:
        """`kept`: memory that members kept, which has its bytes already."""
        self._session = session
        self._kept = kept or KeptMemory()
        self._inside = session.inside
        self._core = session.inside.core
        self._image = image
        self._store = store
        #: In the order of the image's.
        self.storages: list[HandleStorage] = []

    def run(self) -> list[HeliographError]:
        """Restore everything. Return the errors of what could not be restored. Blocks.

        Raises SnapshotFailedError if a content is gone or damaged, and the error of a session that
        was closed meanwhile.
        """
        try:
            return self._run()
        except BaseException:
            self._free_unowned()
            raise

    def _run(self) -> list[HeliographError]:
        self._rename_devices()
        problems = [one for one in map(self._add_storage, self._image.storages) if one is not None]
        with self._inside.lock:
            self._check_open()
            self._add_handles()
        # The streams are opened.
        self._inside.executor.event(lambda: None)
        self._add_weights()
        problems += self._add_reservations()
        problems += [one for one in map(self._add_plan, self._image.plans) if one is not None]
        loops = {
            one.sequence: LoopState(one.steps, one.unsent, self._outputs(one)) for one in self._image.loops
        }
        with self._inside.lock:
            self._session.is_restored = True
            self._inside.executor.resumable.add(loops)
            self._session.kept_messages = self._image.acknowledged, self._image.messages
            self._core.go_on_after(self._image.last_sequence, self._image.default_failure)
        return problems

    def _rename_devices(self) -> None:
        """Let names of devices that left stand for those with their values, unless they are back."""
        devices = self._inside.devices
        devices.names.replace(
            {one.name: one.device for one in self._image.renamed if one.name not in devices}
        )

    # Memory

    def _add_storage(self, found: ImageStorage) -> HeliographError | None:
        """Allocate a storage and fill it. Return the error with which it is poisoned."""
        storage = HandleStorage(
            found.size_bytes, found.device, buffer_type=found.buffer_type, usage=Usage(found.usage)
        )
        storage.error = found.error
        self.storages.append(storage)
        self._check_open()
        if found.error is not None or not found.buffer_bytes:
            return None
        try:
            if not self._allocate(storage, found):
                self._fill(storage, found)
        except SnapshotFailedError:
            raise
        except Exception as error:
            storage.error = typed(error, "restoring a session")
            return storage.error
        return None

    def _check_open(self) -> None:
        """Raise the error of a session that was closed meanwhile."""
        if self._core.closed is not None:
            raise self._core.closed.anew()

    def _free_unowned(self) -> None:
        """Free the memory that the session does not have, after a restore that failed."""
        with self._inside.lock:
            owned = self._core.resources.storages
            unowned = [one for one in self.storages if one not in owned and one.buffer is not None]
        for storage in unowned:
            storage.buffer.free()
            storage.buffer = None

    def _allocate(self, storage: HandleStorage, found: ImageStorage) -> bool:
        """Give a storage its memory. True if that has the bytes already."""
        memory = find_buffer_type(self._inside.devices.device(found.device), found.buffer_type)
        self._inside.holding.take(QuotaKind.MEMORY, storage.size_bytes)
        storage.is_charged = True
        if (kept := self._kept.take(found, memory.name)) is not None:
            kept.usage = Usage(found.usage)
            storage.buffer = kept
            return True
        make = self._inside.room.for_work
        storage.buffer = make(lambda: memory.zeros(found.size_bytes, Usage(found.usage)))
        return False

    def _fill(self, storage: HandleStorage, found: ImageStorage) -> None:
        offset = 0
        for piece in self._store.read_all(found.pieces):
            if offset + piece.nbytes > storage.buffer.size_bytes:
                raise SnapshotFailedError("an image has more bytes of a tensor than it has room for")
            storage.buffer.set(offset, piece)
            offset += piece.nbytes

    def _outputs(self, loop: ImageLoop) -> dict[int, bytes]:
        """Return the outputs of a loop's last step."""
        read = self._store.read_all
        return {one.output: b"".join(map(bytes, read(one.pieces))) for one in loop.outputs}

    # Handles

    def _add_handles(self) -> None:
        handles, resources = self._core.handles, self._core.resources
        for storage in self.storages:
            resources.storages[storage] = None
        tensors = {one.handle: self._tensor(one.layout, one.error) for one in self._image.tensors}
        for one in self._image.tensors:
            tensors[one.handle].failure = one.failure
            self._add(one.handle, tensors[one.handle])
        self._poison(tensors)
        for buffer in self._image.buffers:
            parts = tuple(whole(self.storages[place - 1]) for place in buffer.storages)
            self._add(buffer.handle, BufferHandle(parts, buffer.error))
        for event in self._image.events:
            handles.add(event.handle, EventHandle())
        for stream in self._image.streams:
            self._add_stream(stream)
        named = {one.name: (one.handle, tensors[one.handle]) for one in self._image.variables}
        self._core.plans.restore_variables(self._image.variables_made, named)

    def _add(self, number: int, handle: TensorHandle | BufferHandle) -> None:
        if handle.error is None:
            self._core.handles.add(number, handle)
        else:
            self._core.handles.add_poisoned(number, handle)

    def _add_stream(self, stream: ImageStream) -> None:
        queue = DeviceQueue(stream.device)
        if stream.error is not None:
            self._core.handles.add_poisoned(stream.handle, StreamHandle(queue, error=stream.error))
            return
        self._core.resources.open_queue(queue)
        self._core.handles.add(stream.handle, StreamHandle(queue, failure=stream.failure))

    def _tensor(self, where: ImageLayout, error: HeliographError | None = None) -> TensorHandle:
        if not where.storage:
            return TensorHandle(layout(where.type), error=error)
        storage = self.storages[where.storage - 1]
        strides = where.strides_bytes or layout(where.type).strides
        tensor = TensorHandle(
            Tensor(where.type, layout(where.type).buffer, where.offset_bytes, strides), storage, error
        )
        if where.is_placed and storage.buffer is not None:
            init_tensor(tensor)
        return tensor

    def _poison(self, tensors: dict[int, TensorHandle]) -> None:
        for storage, found in zip(self.storages, self._image.storages, strict=True):
            for one in found.poisons:
                tensor = tensors.get(one.tensor) or _nothing(one.error)
                storage.poisons.append(Poison(one.start, one.end, one.error, tensor, one.sequence))
            if found.is_mapped and storage.error is None:
                storage.poison(0, max(1, found.size_bytes), _unmapped(), _nothing(_unmapped()), 0)

    # Weights and plans

    def _add_weights(self) -> None:
        """Give the session the weights that neither it nor another one of its tenant has."""
        for weight in self._image.weights:
            for buffer in self._kept.take_weight(weight.digest, weight.size_bytes):
                self._add_kept(weight.digest, buffer)
        weights = {one.digest: one for one in self._image.weights if not one.is_in_model}
        for digest in self._session.missing_contents(tuple(weights)):
            upload = self._session.begin_upload(digest, weights[digest].size_bytes)
            try:
                for piece in self._store.read(digest):
                    upload.write(upload.received_bytes, piece)
                upload.finish()
            except HeliographError as error:
                upload.abort(error)
                raise

    def _add_kept(self, digest: bytes, buffer: Buffer) -> None:
        """Give the session a weight that a member kept. Without room it is sent again."""
        contents = self._inside.contents
        try:
            charge = contents.charge(buffer.size_bytes)
        except OutOfMemoryError:
            buffer.free()
            return
        try:
            contents.add(digest, buffer)
        finally:
            charge.give()

    def _add_reservations(self) -> Iterator[HeliographError]:
        limits = self._session.limits
        for one in self._image.reservations:
            try:
                request = decode_reserve(self._store.whole(one.request), limits)
                self._session.reserve(replace(request, reservation=one.handle))
            except HeliographError as error:
                with self._inside.lock:
                    self._core.handles.add_poisoned(one.handle, ReservationHandle(None, error=error))
                yield error

    def _add_plan(self, plan: ImagePlan) -> HeliographError | None:
        """Compile a plan again. Return the error with which it is poisoned."""
        if plan.error is not None or not plan.request:
            self._add_failed(plan, plan.error or _no_request())
            return None
        bound: dict[int, TensorHandle] = {}
        with self._inside.lock:
            for number, binding in enumerate(plan.bindings, _FOR_A_MOMENT):
                bound[number] = self._tensor(binding.layout)
                self._core.handles.add(number, bound[number])
        leaves = {one.leaf: number for one, number in zip(plan.bindings, bound, strict=True)}
        try:
            request = decode_compile(self._store.whole(plan.request), self._session.limits)
            self._session.compile(
                replace(request, plan=plan.handle, bindings=leaves, reservation=plan.reservation, updates=0)
            )
        except SnapshotFailedError:
            raise
        except HeliographError as error:
            self._add_failed(plan, error)
            return error
        finally:
            self._inside.executor.event(lambda: self._release(bound))
        with self._inside.lock:
            self._name_bindings(plan, replace(request, plan=plan.handle))
        return None

    def _release(self, bound: dict[int, TensorHandle]) -> None:
        for number in bound:
            self._core.handles.remove_any(number)
        self._core.plans.release(bound.values())

    def _name_bindings(self, plan: ImagePlan, request: CompileRequest) -> None:
        """Give a plan the handles by which its client knows the tensors bound to it."""
        made = self._core.handles.get(plan.handle, PlanHandle)
        numbers = {one.leaf: one.handle for one in plan.bindings}
        made.bound = BoundLeaves(made.bound.tensors, made.bound.weights, numbers)
        made.request = request

    def _add_failed(self, plan: ImagePlan, error: HeliographError) -> None:
        with self._inside.lock:
            failed = PlanHandle("", (), (), (), (), (), BoundLeaves(), error=error)
            self._core.handles.add_poisoned(plan.handle, failed)


def _nothing(error: HeliographError) -> TensorHandle:
    """A tensor that was freed, or never created."""
    return TensorHandle(layout(_BYTES), error=error)


def _unmapped() -> NotReplayableError:
    return NotReplayableError(
        "the tensor was mapped by its client, and the daemon was restarted: what was written to that memory "
        "since the last snapshot is lost",
        advice="map it again and write it, or free it",
    )


def _no_request() -> SnapshotFailedError:
    return SnapshotFailedError("the plan is not in the image", advice="compile the graph again")
