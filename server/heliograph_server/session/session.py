"""The session of one client, as services and the in-process mode use it. Any thread may call it."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial

from heliograph_backends.contract import Device, Tensor
from heliograph_proto.commands import ResumedLoop
from heliograph_proto.devices import DeviceChange
from heliograph_proto.errors import (
    CancelledError,
    DeadlineExceededError,
    HeliographError,
    ProtocolError,
    SessionClosedError,
    UnknownHandleError,
)
from heliograph_proto.models import ModelFile, ModelInfo
from heliograph_proto.plans import (
    CompileRequest,
    ContentOffer,
    EstimateRequest,
    PlanEstimate,
    PlanInfo,
    PlanReport,
    ReserveRequest,
)
from heliograph_proto.sessions import PLACE_BYTES, Traffic
from heliograph_server.compile.compiler import Compiler
from heliograph_server.compile.services import SessionServices
from heliograph_server.plans.loaded_plan import LoadedPlan
from heliograph_server.resources.handles import (
    BufferHandle,
    EventHandle,
    PlanHandle,
    ReservationHandle,
    StreamHandle,
    TensorHandle,
)
from heliograph_server.resources.log_fields import LogOwner, session_fields
from heliograph_server.resources.membership import MembershipChange
from heliograph_server.resources.principals import Right, no_exchange
from heliograph_server.resources.quotas import Charge, QuotaKind
from heliograph_server.session.bulk import (
    ContentUpload,
    DownloadReader,
    ResumableUploads,
    TransferUpload,
)
from heliograph_server.session.executor import Executor
from heliograph_server.session.identity import FileOfMemory, SessionIdentity
from heliograph_server.session.operations import private_copy
from heliograph_server.session.parts.held_bytes import hold_bytes
from heliograph_server.session.parts.inside import SessionInside
from heliograph_server.session.protocol.instructions import DropUpload
from heliograph_server.session.run_timeline import RunBook, RunObserver, RunTimes, Tracing
from heliograph_server.session.staging import StagedUpload, Staging
from heliograph_server.session.statistics import SessionCounts, SessionStatistics
from heliograph_server.weights.direct_upload import DirectContents, Homes
from heliograph_server.weights.uploads import IncomingUpload

logger = logging.getLogger(__name__)

#: The time for which callers of `close` wait for aborted work. Its memory comes back in any case.
CLOSE_SECONDS = 30.0
#: The time after which the log says that a session that ended waits for its work.
LATE_SECONDS = 1.0


class Session:
    """One client's handles and work. Thread-safe. Created by `Host.open_session`.

    A facade of the executor, which has the core and its work, the compiler and the weights.
    """

    #: True if an earlier daemon had it, and if another one gave it to this one; and the messages
    #: acknowledged then, with those after them.
    is_restored = has_moved_here = False
    kept_messages: tuple[int, tuple[bytes, ...]] = (0, ())
    #: Returns the same of now, and lets no message be written, or again. They block. None: no stream.
    keep_messages: Callable[[], tuple[int, tuple[bytes, ...]]] | None = None
    hold_messages: Callable[[bool], None] | None = None

    def __init__(
        self,
        identity: SessionIdentity,
        services: SessionServices,
        on_closed: Callable[[Session], None],
        observers: Sequence[RunObserver] = (),
        tracing: Tracing | None = None,
    ) -> None:
        self.number = identity.number
        self.client = identity.client or "an unnamed client"
        self.principal = identity.principal
        self.limits = services.limits
        self.lease_seconds = identity.lease_seconds
        #: The time at which it ends unless its client attaches; None: it has its connection.
        self.lease_end: float | None = None
        #: The time at which it was opened, by `time.monotonic()`.
        self.opened = time.monotonic()
        #: The owner of its lines in the log.
        self.log_owner = LogOwner()
        self.log_fields = session_fields(self.log_owner, self.number, self.principal.tenant)
        #: The owner of its share of devices and of compiles.
        self.flow = services.flow
        self._watches = identity.watches
        #: The encodings that packed pieces of its transfers may have.
        self.encodings = identity.encodings
        self._on_closed = on_closed
        self._devices = services.devices
        self._exchange = services.exchange
        self._holding = services.holding
        self._contents = services.contents
        self._book = RunBook(self.number, self.principal, observers, tracing)
        self._executor = Executor(services, self._book, str(self), self.log_fields)
        self._core, self._lock = self._executor.core, self._executor.lock
        self._core.use_peer_check(partial(self.check_peer, what="fetch a tensor from another daemon"))
        self._compiler = Compiler(self._core.plans, self._lock, services, self._executor.plans)
        #: Memory of requests with graphs that come, or wait to be compiled.
        self.requests = Staging(self.limits.most_request_bytes, "requests", services.holding)
        #: Contents on their way to devices of other daemons.
        self._direct = DirectContents(self._contents, services.room, services.deadlines)
        #: Open uploads, and for those of contents the charge for their bytes.
        self._open_uploads: dict[IncomingUpload, Charge | None] = {}
        #: Those for commands that may go on, in a session with a lease.
        self._resumable = ResumableUploads()
        #: Callbacks for the end of the session, by their owner.
        self.when_closing: dict[object, Callable[[HeliographError], None]] = {}
        self._is_ending = False
        self._ended_at = 0.0
        #: Done when everything is free.
        self._released: Future[None] = Future()
        self._released.set_running_or_notify_cancel()
        #: Its parts, for images.
        self.inside = SessionInside(
            self._executor, self._compiler, self._contents, self._devices, self._holding, services.room
        )
        # Methods of the executor as they are, since each wrapper would cost every small run a call.
        self.attach = self._executor.attach
        self.submit = self._executor.submit
        self.answer = self._executor.answer
        self.watch = self._executor.watch
        self.when_written = self._executor.when_written

    def __repr__(self) -> str:
        counts = f"{self._core.in_flight} commands in flight, {len(self._core.handles)} handles"
        return f"<Session {self.number} of {self.client}: {counts}>"

    def __str__(self) -> str:
        return f"session {self.number} of {self.client}"

    # The command stream

    def refuse(
        self, sequence: int, error: HeliographError, tensors: tuple[int, ...] = (), buffer: int = 0
    ) -> None:
        """Fail a command that could not be decoded, and poison the handles it would create."""
        self._executor.refuse(sequence, error, tensors, buffer)

    def end_of_commands(self) -> None:
        """Record the end of the command stream. Runs that wait for a command proceed."""
        self._executor.event(self._core.taps.end_of_commands)

    def drop_unmatched_transfers(self) -> None:
        """Fail the commands whose upload has not begun since the last call, and drop the uploads
        that no command has named since then."""
        seconds = self.limits.upload_idle_ms / 1e3
        error = DeadlineExceededError(
            f"an upload and the command that names it did not both come within {2 * seconds:g} s",
            advice="upload the bytes when the command is sent",
        )
        self._executor.event(partial(self._core.drop_unmatched_transfers, error))
        if not self.is_detached:
            self._resumable.drop(error)
            self._executor.downloads.drop_unread()

    # Devices

    @property
    def devices(self) -> Sequence[Device]:
        """The present devices."""
        return self._devices.present()

    def change_devices(self, change: MembershipChange) -> bool:
        """Add and remove devices. Return True if it had an effect, to `tell_devices` afterwards."""
        if not self._devices.change(change):
            return False
        with self._lock:
            if self._core.closed is None:
                self._core.add_devices(device.name for device in change.appeared)
        return True

    def tell_devices(self, message: DeviceChange) -> None:
        """Send a change to the client if it watches devices, and fail the runs that it ends."""
        with self._lock:
            if self._core.closed is not None:
                return
            if self._watches:
                self._executor.tell_devices(message)
        if message.lost:
            self._executor.lose_devices()
        self._executor.deliver()

    def uses(self, devices: Collection[str]) -> bool:
        """True if it has tensors, plans, streams or reservations on one of the devices, or may make
        some now: it compiles."""
        if not self._compiler.busy.acquire(blocking=False):
            return True
        try:
            with self._lock:
                resources, plans = self._core.resources, self._core.plans.loaded
                found = {one.device for one in resources.storages}
                found.update(one.device for one in resources.queues)
                found.update(name for one in plans if one is not None for name in one.device_names)
                reserves = self._core.handles.count(ReservationHandle) > 0
        finally:
            self._compiler.busy.release()
        return reserves or not found.isdisjoint(devices)

    @contextmanager
    def still(self) -> Iterator[None]:
        """A context in which it begins no command, and no compile that has not begun already."""
        with self._lock:
            yield

    def tell_durable(self, sequence: int) -> None:
        """Tell the client that commands up to this one are on disk."""
        if self.closed is None and self.is_attached:
            self._executor.tell(durable_through=sequence)

    # Plans and contents

    def compile(self, request: CompileRequest) -> PlanInfo:
        """Compile an unchecked graph. Blocks. Raises the errors of PlanService.Compile."""
        if (partition := request.options.partition) is not None:
            named = [one.source.address for one in partition.arrivals if one.source is not None]
            named += [one.source.address for one in partition.loop_arrivals]
            for address in named or [""]:
                self.check_peer(address, "run a partition of a graph, whose edges other daemons feed")
        began = time.monotonic()
        try:
            info = self._compiler.compile(request)
            took = time.monotonic() - began
            logger.info("%s: plan %d compiled in %.3f s", self, request.plan, took, extra=self.log_fields)
            return info
        finally:
            # An update may have released the previous plan.
            self._executor.event(lambda: None)

    def estimate(self, request: EstimateRequest) -> PlanEstimate:
        """Estimate the device memory of a plan. Raises the errors of PlanService.Estimate."""
        self._check_open()
        return self._compiler.estimator.estimate(request)

    def explain(self, plan: int, measure: bool | None = None) -> PlanReport:
        """Report where the nodes of a plan run, and why; `measure`: see `ExplainRequest`. Raises
        UnknownHandleError."""
        with self._lock:
            self._check_open()
            found = self._core.handles.get(plan, PlanHandle)
            found.check_there()
            loaded: LoadedPlan = found.plan
        if measure is not None:
            loaded.measure(on=measure)
        return loaded.report()

    def reserve(self, request: ReserveRequest) -> dict[str, int]:
        """Allocate memory for plans that are compiled later, and return its bytes by device.

        A Free of the handle releases it. Raises the errors of PlanService.Reserve.
        """
        return self._compiler.estimator.reserve(request)

    def discard_plan(self, handle: int) -> None:
        """Undo a compile whose client left before it received the handle."""
        self._executor.event(partial(self._core.plans.discard, handle, PlanHandle))

    def discard_reservation(self, handle: int) -> None:
        """Undo a `reserve` whose client left before it received the handle."""
        self._executor.event(partial(self._core.plans.discard, handle, ReservationHandle))

    def place_contents(self, request: CompileRequest, missing: Collection[bytes]) -> tuple[ContentOffer, ...]:
        """Return the other daemons to which missing contents of a graph are to be uploaded.

        Blocks. Raises the errors of PlanService.PlaceContents.
        """

        def place(homes: Homes) -> tuple[ContentOffer, ...]:
            self._contents.expect({digest: memory for digest, (memory, _) in homes.items()})
            return self._direct.place(homes)

        try:
            return self._compiler.place(request, missing, place)
        finally:
            self._executor.event(lambda: None)

    def when_here(self, digests: Collection[bytes]) -> Future[None]:
        """Return a future that is done once contents uploaded to other daemons are known here.

        After a short time it is done in any case.
        """
        return self._direct.when_here(digests)

    def is_relayed(self, digest: bytes) -> bool:
        """True if an upload of this content is passed on to another daemon."""
        return self._direct.is_coming(digest)

    def missing_contents(self, digests: Sequence[bytes]) -> tuple[bytes, ...]:
        """Return the contents that the client must upload."""
        self._check_open()
        return self._contents.missing(tuple(digests))

    def received_contents(self, digests: Sequence[bytes]) -> tuple[int, ...]:
        """Return the bytes received of missing contents, from which their uploads may resume."""
        found = self._contents.received(tuple(digests))
        return tuple(self._direct.received(one) or here for one, here in zip(digests, found, strict=True))

    def models(self) -> tuple[ModelFile, ...]:
        """Return the tensor files that the operator allows."""
        self._check_open()
        return self._contents.models()

    def describe_model(self, name: str) -> ModelInfo:
        """Describe the tensors of a file. Blocks. Raises InvalidArgumentError,
        InvalidModelError."""
        self._check_open()
        return self._contents.describe_model(name)

    # Bulk

    def begin_upload(
        self, target: int | bytes, size_bytes: int, offset_bytes: int = 0, attempt: int = 0
    ) -> IncomingUpload:
        """Begin an upload for a transfer (a number), or of a content (a digest).

        Raises LimitExceededError or OutOfMemoryError before memory is allocated, ProtocolError,
        ContentMismatchError if the bytes before the offset are not here, or the error of the
        command that uses the transfer.
        """
        self._check_open()
        upload: IncomingUpload
        charge: Charge | None = None
        if isinstance(target, int):
            is_kept, how = self.lease_seconds > 0, (target, size_bytes, offset_bytes, attempt)
            found = self._resumable.go_on(*how) if is_kept else None
            upload = found or self._begin_transfer(target, size_bytes)
        else:
            # No more than one piece and its successor are in host memory.
            staged_bytes = min(max(size_bytes - offset_bytes, 0), PLACE_BYTES)
            charge = self._holding.account.charge(QuotaKind.STAGING, staged_bytes)
            try:
                upload = self._begin_content(target, size_bytes, offset_bytes)
            except BaseException:
                charge.give()
                raise
        with self._lock:
            self._open_uploads[upload] = charge
            closed = self._core.closed
        if closed is not None:
            upload.abort(closed)
            raise closed
        return upload

    def _begin_content(self, digest: bytes, size_bytes: int, offset_bytes: int) -> IncomingUpload:
        over = self._forget_upload
        if (passed_on := self._direct.begin(digest, size_bytes, offset_bytes, over)) is not None:
            return passed_on
        return ContentUpload(digest, size_bytes, self._contents, over, offset_bytes)

    def _begin_transfer(self, transfer: int, size_bytes: int) -> IncomingUpload:
        broke = partial(self._upload_broke, transfer)
        arrived = partial(self._executor.event, partial(self._core.upload_arrived, transfer))
        started = partial(self._core.upload_started, transfer, size_bytes)
        try:
            incoming = StagedUpload(size_bytes, self._executor.staging)
        except HeliographError as error:
            # The command that waits for it fails as well.
            self._executor.event(started)
            broke(error)
            raise
        is_kept = self.lease_seconds > 0
        upload = TransferUpload(incoming, arrived, broke, self._forget_upload, is_kept=is_kept)
        if is_kept:
            self._resumable.add(transfer, upload)
        uploads = self._executor.uploads
        try:
            with self._lock:
                # Registered first: the command that waits for it may take its bytes at once.
                is_new = uploads.setdefault(transfer, incoming) is incoming
                try:
                    self._executor.decide(started)
                except BaseException:
                    if is_new:
                        uploads.pop(transfer, None)
                    incoming.close(None)
                    self._resumable.over(upload)
                    raise
        finally:
            self._executor.deliver()
        return upload

    def _upload_broke(self, transfer: int, error: HeliographError) -> None:
        self._executor.event(partial(self._core.upload_broke, transfer, error))

    @property
    def traffic(self) -> Traffic:
        """The bytes carried by writes and reads of tensors, and the copies made of them here."""
        return self._executor.traffic.now

    def received_transfers(self, attempts: Mapping[int, int]) -> tuple[int, ...]:
        """Return the bytes received of transfers whose uploads broke off, from which they go on.

        `attempts`: the number of the next attempt, by transfer; earlier ones end. All of its bytes:
        the upload has ended. Raises ProtocolError without a lease.
        """
        if attempts and not self.lease_seconds:
            raise ProtocolError("uploads for commands go on only in a session with a lease")
        return tuple(self._resumable.received(*one) for one in attempts.items())

    def downloaded(self, transfer: int) -> None:
        """Drop the bytes of a read that its client has. Only in a session with a lease."""
        self._executor.downloads.acknowledge(transfer)

    def _forget_upload(self, upload: IncomingUpload) -> None:
        if isinstance(upload, TransferUpload) and self.lease_seconds:
            self._resumable.over(upload)
        with self._lock:
            was_open = upload in self._open_uploads
            charge = self._open_uploads.pop(upload, None)
        if charge is not None:
            charge.give()
        if was_open and upload.is_content:
            size_bytes = upload.received_bytes - upload.start_bytes
            self._executor.traffic.content(size_bytes, is_relayed=upload.is_relayed)

    def open_download(
        self, transfer: int, *, takes_placed: bool = False, offset_bytes: int = 0, resume: bool = False
    ) -> DownloadReader:
        """Open the download of a transfer, which the caller closes. As `Downloads.open`."""
        return self._executor.downloads.open(
            transfer, takes_placed=takes_placed, offset_bytes=offset_bytes, resume=resume
        )

    def hold_bytes(self, handle: int, size_bytes: int) -> tuple[Tensor, Callable[[], None]]:
        """As `hold_bytes` of `parts.held_bytes`."""
        with self._lock:
            self._check_open()
            return hold_bytes(self.inside, handle, size_bytes)

    # Shared memory

    def share_memory(self) -> FileOfMemory:
        """Return the memory shared with the client, created at the first call.

        Raises UnsupportedError, OutOfMemoryError, LimitExceededError.
        """
        with self._lock:
            self._check_open()
            shared = self._executor.share_memory()
            return FileOfMemory(shared.descriptor(), shared.size_bytes)

    def shared_bytes(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """Return a copy of bytes in shared memory, which the client can no longer change.

        Raises InvalidArgumentError, LimitExceededError, OutOfRangeError.
        """
        with self._lock:
            self._check_open()
            place = self._core.shared_place(offset_bytes, size_bytes)
            view = self._executor.shared_part(place)
        return private_copy(view)

    def share_tensor(self, handle: int) -> FileOfMemory:
        """Return the memory of a tensor.

        Raises UnknownHandleError, UnsupportedError, or the error of the command that creates it.
        """
        with self._lock:
            self._check_open()
            tensor = self._core.handles.get(handle, TensorHandle)
            if (problem := tensor.problem()) is not None:
                raise problem
            if tensor.storage is None or tensor.storage.buffer is None:
                raise UnknownHandleError(f"tensor {handle} has no memory yet", advice="wait until it is made")
            placed = tensor.placed
            descriptor = placed.buffer.descriptor()
            tensor.storage.is_mapped = True
            return FileOfMemory(descriptor, placed.buffer.size_bytes, placed.offset_bytes)

    # State

    def statistics(self) -> SessionStatistics:
        """Return the objects that the session holds now."""
        with self._lock:
            count = self._core.handles.count
            return SessionStatistics(
                tensors=count(TensorHandle),
                buffers=count(BufferHandle),
                plans=count(PlanHandle),
                streams=count(StreamHandle),
                events=count(EventHandle),
                storages=len(self._core.resources.storages),
                staged_bytes=self._executor.staging.used_bytes,
                content_bytes=self._contents.size_bytes,
                commands_in_flight=self._core.unretired,
                idle_plans=self._executor.plans.idle,
                idle_bytes=self._executor.plans.idle_bytes,
                reservations=count(ReservationHandle),
                runs_in_flight=self._core.runs_in_flight,
                tensor_bytes=self._core.resources.storage_bytes,
            )

    def plans_now(self) -> dict[int, LoadedPlan]:
        """Return the plans that have a handle, by it."""
        with self._lock:
            handles = self._core.handles
            found = handles.of_kind(PlanHandle) if handles.count(PlanHandle) else {}
        return {number: one.plan for number, one in found.items() if one.plan is not None}

    @property
    def uploads_now(self) -> tuple[IncomingUpload, ...]:
        """The uploads under way."""
        with self._lock:
            return tuple(self._open_uploads)

    @property
    def run_counts(self) -> tuple[int, int]:
        """As `RunBook.counts`."""
        return self._book.counts

    @property
    def runs_under_way(self) -> tuple[RunTimes, ...]:
        """The runs that have come and not ended, if the host has observers of runs."""
        return tuple(self._book.under_way.copy().values())

    def check_peer(self, address: str, what: str) -> None:
        """Raise PermissionDeniedError unless the session may make this daemon connect to an
        address; "" is none yet. `what` is the use, for the error."""
        if not self.principal.may(Right.POOL):
            raise no_exchange(what)
        if address:
            self._exchange.rules.check(address)

    @property
    def is_attached(self) -> bool:
        """True if its command stream has begun."""
        return self._executor.is_attached

    @property
    def is_detached(self) -> bool:
        """True if its connection broke, and its lease runs."""
        return self.lease_end is not None

    @property
    def lease_left_seconds(self) -> float | None:
        """The time until it ends, if it is detached."""
        end = self.lease_end
        return None if end is None else max(0.0, end - time.monotonic())

    @property
    def counts(self) -> SessionCounts:
        """Its counters, which only grow, except those of current runs."""
        traffic, failures = self._executor.traffic, Counter(self._core.failures.copy())
        return SessionCounts(traffic.now, traffic.by_transport, failures, *self._book.counts)

    @property
    def commands(self) -> int:
        """The number of commands received so far."""
        return self._core.last_sequence

    @property
    def resumed_loops(self) -> tuple[ResumedLoop, ...]:
        """The loops of a restored session that go on from a step once their commands come again."""
        return self._executor.resumable.told()

    @property
    def is_quiet(self) -> bool:
        """True if no work is queued or running."""
        with self._lock:
            return self._core.unretired == 0

    @property
    def plan_bytes(self) -> int:
        """Device memory of plans with a handle between their runs, except on lost devices."""
        with self._lock:
            plans: list[LoadedPlan] = [one for one in self._core.plans.loaded if one is not None]
        return sum(sum(one.kept_bytes().values()) for one in plans if not one.is_lost)

    # The end

    def close(self, error: HeliographError | None = None, wait_seconds: float = CLOSE_SECONDS) -> None:
        """As `end`, and wait until everything is free, `wait_seconds` after the first call at most.

        Blocks.
        """
        ended = self.end(error)
        left = self._ended_at + wait_seconds - time.monotonic()
        wait([ended], max(0.0, left))

    def end(self, error: HeliographError | None = None) -> Future[None]:
        """End the session: abort running work, fail the rest with `error`, and free everything.

        Return a future that is done when everything is free. Work that cannot be broken off keeps
        its memory, and the session its place, until the work ends, however late that is. May block
        for a short time. Idempotent.
        """
        with self._lock:
            first, self._is_ending = not self._is_ending, True
            if first:
                self._ended_at = time.monotonic()
        if first:
            error = error or SessionClosedError("the session was closed", advice="open another")
            try:
                self._interrupt(error)
            finally:
                is_quiet = self._executor.quiet.is_set() and not self._open_uploads
                if is_quiet and self._compiler.busy.acquire(blocking=False):
                    self._release(error)
                else:
                    self._begin_release(error)
        return self._released

    def _begin_release(self, error: HeliographError) -> None:
        release = partial(self._release_later, error)
        try:
            threading.Thread(target=release, name="heliograph-release", daemon=True).start()
        except RuntimeError:
            # The interpreter is ending, and with it all work and memory.
            self._released.set_result(None)

    def _interrupt(self, error: HeliographError) -> None:
        """Abort running work and fail everything else, without waiting for any."""
        self._executor.event(partial(self._core.close, error))
        self._contents.stop(error)
        for end in list(self.when_closing.values()):
            end(error)
        self._executor.close_shared_memory()
        self._executor.call_end(error)

    def _release_later(self, error: HeliographError) -> None:
        """Free everything when the work has ended."""
        try:
            # First, since a relayed upload may wait for another daemon under its own lock.
            self._direct.close(error)
            for upload in self.uploads_now:
                upload.abort(error)
            self._resumable.close(error)
        finally:
            self._release_after_work(error)

    def _release_after_work(self, error: HeliographError) -> None:
        busy = self._compiler.busy
        in_time = self._executor.quiet.wait(LATE_SECONDS) and busy.acquire(timeout=LATE_SECONDS)
        if not in_time:
            message = "%s: waits for work that cannot be broken off, and then frees its memory"
            logger.warning(message, self, extra=self.log_fields)
            self._executor.quiet.wait()
            busy.acquire()
        self._release(error)
        if not in_time:
            seconds = time.monotonic() - self._ended_at
            logger.info("%s: its memory is free, %.1f s after its end", self, seconds, extra=self.log_fields)

    def _release(self, error: HeliographError) -> None:
        """Free everything. No work is under way, and `_compiler.busy` is held."""
        try:
            self._direct.close(error)
            self._executor.plans.close()
            self._holding.account.leave(self._executor.plans)
            self._executor.event(self._core.release_all)
            for transfer in list(self._executor.uploads):
                self._executor.drop_upload(DropUpload(transfer))
            self._executor.downloads.close(error)
            # Partial contents are kept for a client that lost its connection and may come back.
            self._contents.close(error, keep=isinstance(error, CancelledError))
        finally:
            self._compiler.busy.release()
            self._on_closed(self)
            self._released.set_result(None)

    @property
    def closed(self) -> HeliographError | None:
        """The error that closed it."""
        return self._core.closed

    def _check_open(self) -> None:
        with self._lock:
            if self._core.closed is not None:
                raise self._core.closed.anew()
