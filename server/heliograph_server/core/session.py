"""A session, as the services and the in-process mode know it. How it works is in `session_work`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from heliograph_backends.contract import CompileOptions, Device, Tensor
from heliograph_backends.sealed import SealedMemory
from heliograph_proto.commands import Command, CompletionBatch, Run
from heliograph_proto.description import ContentOffer, ModelInfo, PlanEstimate, PlanInfo, PlanReport, Traffic
from heliograph_proto.errors import (
    CancelledError,
    HandleExistsError,
    HeliographError,
    SessionClosedError,
    UnknownHandleError,
)
from heliograph_proto.inline_runs import InlineResult, InlineRun
from heliograph_proto.limits import Limits
from heliograph_proto.membership import DeviceChange
from heliograph_proto.types import tensor_type
from heliograph_server.core.bulk import ContentUpload, TransferUpload, Upload
from heliograph_server.core.compile_request import CompileRequest
from heliograph_server.core.compiling import Compiler
from heliograph_server.core.contents import Contents
from heliograph_server.core.deadlines import Deadlines
from heliograph_server.core.direct import DirectContents, Homes
from heliograph_server.core.downloads import Download
from heliograph_server.core.exchanging import LiveExchange
from heliograph_server.core.execution import private_copy
from heliograph_server.core.handles import (
    PlanHandle,
    ReservationHandle,
    TensorHandle,
)
from heliograph_server.core.loaded import LoadedPlan
from heliograph_server.core.log_fields import LogOwner, session_fields
from heliograph_server.core.measurements import TenantTimes
from heliograph_server.core.membership import Change, SessionDevices
from heliograph_server.core.occupancy import Occupancy
from heliograph_server.core.principals import ANYBODY, Principal, no_exchange
from heliograph_server.core.room import Room
from heliograph_server.core.run_book import RunBook
from heliograph_server.core.run_records import RunObserver
from heliograph_server.core.run_spans import Tracing
from heliograph_server.core.session_seen import SessionSeen
from heliograph_server.core.sizing import EstimateRequest, ReserveRequest
from heliograph_server.core.staged import Incoming
from heliograph_server.core.staging import Staging
from heliograph_server.core.tasks import (
    DropUpload,
)
from heliograph_server.core.tenants import Charge, Holding, Kind

logger = logging.getLogger(__name__)

#: How long closing waits for work that was asked to end.
CLOSE_SECONDS = 30.0
ANY_OPTIONS = CompileOptions()
#: The most memory of a session by which commands carry bytes; taken from the system page by page.
SHARED_BYTES = 128 * 2**20


@dataclass(frozen=True, slots=True)
class FileOfMemory:
    """Memory that a client of this host may map."""

    #: The receiver closes it.
    descriptor: int
    size_bytes: int
    #: Where a tensor begins in it.
    offset_bytes: int = 0


class Session(SessionSeen):
    """One client's handles and work. Thread-safe. Made by `Host.open_session`."""

    def __init__(
        self,
        number: int,
        client: str,
        limits: Limits,
        devices: SessionDevices,
        occupancies: Mapping[str, Occupancy],
        deadlines: Deadlines,
        room: Room,
        on_closed: Callable[[Session], None],
        contents: Contents | None,
        times: TenantTimes,
        exchange: LiveExchange,
        *,
        watches: bool = False,
        principal: Principal = ANYBODY,
        holding: Holding | None = None,
        observers: Sequence[RunObserver] = (),
        tracing: Tracing | None = None,
    ) -> None:
        book = RunBook(number, principal, observers, tracing)
        #: Whose lines of the log are its own.
        self.log_owner = LogOwner()
        fields = session_fields(self.log_owner, number, principal.tenant)
        held = holding or Holding()
        super().__init__(limits, devices, occupancies, deadlines, room, exchange, held, book, fields)
        #: Counts the sessions of the host: a name for logs, not the secret that names it to clients.
        self.number = number
        self.client = client or "somebody"
        self.principal = principal
        self._core.may_exchange(self.may_exchange)
        self._on_closed = on_closed
        self._watches = watches
        #: Graphs that wait to be compiled. One message may always wait, however low the limit.
        self.requests = Staging(max(limits.in_flight_bytes, limits.message_bytes), "graphs")
        self._contents = contents or Contents(devices.present, room, account=self._holding.account)
        #: Contents on their way to devices of other daemons.
        self._direct = DirectContents(self._contents, room, deadlines)
        known = times, exchange
        memory = self._contents, occupancies, devices.present, self._plans, room
        self._compiler = Compiler(
            self._core, self._lock, limits, self._device, *memory, *known, self._holding
        )
        #: With what those of contents count as on their way.
        self._open_uploads: dict[Upload, Charge | None] = {}
        #: What else is to end with the session, by whom it is of.
        self.when_closing: dict[object, Callable[[HeliographError], None]] = {}
        self._closing = False
        self._released = threading.Event()

    # The command stream

    def attach(
        self,
        on_batch: Callable[[CompletionBatch], None],
        on_end: Callable[[HeliographError], None] | None = None,
        *,
        at_once: bool = False,
    ) -> None:
        """Begins the command stream. The callbacks come from any thread, one at a time, and must not
        block or raise; `on_end` tells why the session closed, after the last batch. With `at_once`,
        `submit` itself does runs that are short; its thread must be one that no KeyboardInterrupt ends.

        Raises HandleExistsError for a second stream, or why the session was closed.
        """
        with self._lock:
            if self._core.closed is not None:
                raise self._core.closed.anew()
            if self._on_batch is not None:
                raise HandleExistsError("the session has its command stream already")
            self._on_batch, self._on_end, self._at_once = on_batch, on_end, at_once
        # What happened to devices since the session was opened.
        self._deliver()

    def submit(self, commands: Sequence[Command | InlineRun]) -> None:
        """The next commands. Raises ProtocolError for a gap (close the session then), or why it closed."""
        try:
            with self._lock:
                for command in commands:
                    if isinstance(command, InlineRun):
                        if self._do_inline(command):
                            continue
                        command = command.command()
                    self._decide(partial(self._receive, command))
        finally:
            self._deliver()

    def answer(self, run: InlineRun, give: Callable[[InlineResult], None]) -> bool:
        """Does the next command, a run, here and now, if that is best and all that was done before has been
        delivered; whether it did. A good end is given to `give`, which acknowledges with it everything up to
        there; a bad one is delivered as any."""
        with self._lock:
            is_silent = self._core.is_silent and not (self._delivering or self._calls)
            if not is_silent or not self._do_inline(run):
                return False
            result = self._core.take_result()
            telling = self._book.take() if result is not None else None
        if result is None:
            self._deliver()
        else:
            give(result)
            if telling is not None:
                telling()
        return True

    def _receive(self, command: Command) -> None:
        if isinstance(command.kind, Run):
            self._book.came(command.sequence, command.kind)
            self._receive_run(command)
        else:
            self._core.receive(command)
        # Not before: a time that passed while the core did not know the command would be lost.
        if command.timeout_ms and self._core.is_open(command.sequence):
            self._arm(command)

    def refuse(
        self, sequence: int, error: HeliographError, tensors: tuple[int, ...] = (), buffer: int = 0
    ) -> None:
        """A command that could not be read fails with this error; so does what it was to make."""
        self._event(partial(self._core.refuse, sequence, error, tensors, buffer))

    def end_of_commands(self) -> None:
        """The client will send no more: runs that would wait for a command go on."""
        self._event(self._core.end_of_commands)

    def watch(self, on_quiet: Callable[[], None]) -> None:
        """From now on, tells whenever no work is left."""
        with self._lock:
            self._on_quiet = on_quiet

    # Devices

    @property
    def devices(self) -> Sequence[Device]:
        """Those that are there."""
        return self._devices.present()

    def change_devices(self, change: Change, told: DeviceChange) -> None:
        """Devices came, or are gone; `told` is what the client is told, if it wants to know."""
        if not self._devices.change(change):
            return
        with self._lock:
            if self._core.closed is not None:
                return
            self._core.add_devices(device.name for device in change.appeared)
            if self._watches:
                self._changes.append(told)
        if change.lost:
            self._plans.forget_lost()
        self._deliver()

    # Plans and contents

    def when_written(self, tensors: Collection[int]) -> Future[None]:
        """Done when what was sent before to write these tensors has been done, well or not."""
        future: Future[None] = Future()
        with self._lock:
            waiter = self._core.await_writers(tensors)
            if waiter:
                self._waiters[waiter] = future
        if not waiter:
            future.set_result(None)
        return future

    def compile(self, request: CompileRequest) -> PlanInfo:
        """Compiles a graph that nobody has checked yet; blocks. Raises what Compile is refused with."""
        if request.portion is not None and not self.may_exchange:
            raise no_exchange("run a part of a graph whose values other daemons give")
        began = time.monotonic()
        try:
            info = self._compiler.compile(request)
            took = time.monotonic() - began
            logger.info("%s: plan %d compiled in %.3f s", self, request.plan, took, extra=self.log_fields)
            return info
        finally:
            # An update may have let go of the plan before.
            self._event(lambda: None)

    def estimate(self, request: EstimateRequest) -> PlanEstimate:
        """What compiling would take of devices' memory. Raises what Estimate is refused with."""
        self._check_open()
        return self._compiler.sizes.estimate(request)

    def explain(self, plan: int) -> PlanReport:
        """Where the nodes of a plan run and why. Raises UnknownHandleError."""
        with self._lock:
            self._check_open()
            found = self._core.handles.get(plan, PlanHandle)
            found.check_there()
            loaded: LoadedPlan = found.plan
        return loaded.report()

    def reserve(self, request: ReserveRequest) -> dict[str, int]:
        """Takes memory for plans that are compiled later; bytes by device. Raises what Reserve is refused
        with. A Free of its handle gives it back."""
        return self._compiler.sizes.reserve(request)

    def discard_plan(self, handle: int) -> None:
        """Undoes a compile whose client left before it learned of it."""
        self._event(partial(self._core.discard, handle, PlanHandle))

    def discard_reservation(self, handle: int) -> None:
        """Undoes a `reserve` whose client left before it learned of it."""
        self._event(partial(self._core.discard, handle, ReservationHandle))

    def place_contents(self, request: CompileRequest, missing: Collection[bytes]) -> tuple[ContentOffer, ...]:
        """Where missing contents of a graph will lie, as far as others than this server take them; blocks.
        Raises what PlaceContents is refused with."""

        def place(homes: Homes) -> tuple[ContentOffer, ...]:
            self._contents.expect({digest: memory for digest, (memory, _) in homes.items()})
            return self._direct.place(homes)

        try:
            return self._compiler.place(request, missing, place)
        finally:
            self._event(lambda: None)

    def when_here(self, digests: Collection[bytes]) -> Future[None]:
        """Done when contents that the client brought to other daemons are known here, or soon after."""
        return self._direct.when_here(digests)

    def is_relayed(self, digest: bytes) -> bool:
        """Whether an upload of this content is passed on to another daemon."""
        return self._direct.is_coming(digest)

    def missing_contents(self, digests: Sequence[bytes]) -> tuple[bytes, ...]:
        """Which of the contents the session must be sent."""
        self._check_open()
        return self._contents.missing(tuple(digests))

    def received_contents(self, digests: Sequence[bytes]) -> tuple[int, ...]:
        """How many bytes are here of contents that are missing: where their uploads may go on."""
        found = self._contents.received(tuple(digests))
        return tuple(self._direct.received(one) or here for one, here in zip(digests, found, strict=True))

    def models(self) -> tuple[str, ...]:
        """The files of tensors that the operator allows."""
        self._check_open()
        return self._contents.models()

    def describe_model(self, name: str) -> ModelInfo:
        """The tensors of one; blocks. Raises InvalidArgumentError, InvalidModelError."""
        self._check_open()
        return self._contents.describe_model(name)

    # Bulk

    def begin_upload(self, target: int | bytes, size_bytes: int, offset_bytes: int = 0) -> Upload:
        """Bytes for a transfer (a number) or of a content (its digest); a content's from this byte on.

        Raises LimitExceededError or OutOfMemoryError before any memory is taken, ProtocolError,
        ContentMismatchError when what came before the offset is not here, or the error of the command
        that was to use them.
        """
        self._check_open()
        upload: Upload
        charge: Charge | None = None
        if isinstance(target, int):
            upload = self._begin_transfer(target, size_bytes)
        else:
            charge = self._holding.account.charge(Kind.STAGING, max(size_bytes - offset_bytes, 0))
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

    def _begin_content(self, digest: bytes, size_bytes: int, offset_bytes: int) -> Upload:
        over = self._forget_upload
        if (passed_on := self._direct.begin(digest, size_bytes, offset_bytes, over)) is not None:
            return passed_on
        return ContentUpload(digest, size_bytes, self._contents, over, offset_bytes)

    def _begin_transfer(self, transfer: int, size_bytes: int) -> Upload:
        broke = partial(self._upload_broke, transfer)
        arrived = partial(self._upload_arrived, transfer)
        try:
            incoming = Incoming(size_bytes, self._staging)
        except HeliographError as error:
            # The command that waits for it fails as well.
            self._event(partial(self._core.upload_started, transfer, size_bytes))
            broke(error)
            raise
        upload = TransferUpload(incoming, arrived, broke, self._forget_upload)
        try:
            with self._lock:
                self._start_transfer(transfer, incoming)
        except BaseException:
            incoming.close(None)
            raise
        finally:
            self._deliver()
        return upload

    def _start_transfer(self, transfer: int, incoming: Incoming) -> None:
        """The command that waits for it may take its bytes from within this call."""
        is_new = transfer not in self._uploads
        if is_new:
            self._uploads[transfer] = incoming
        try:
            self._decide(partial(self._core.upload_started, transfer, incoming.size_bytes))
        except BaseException:
            if is_new:
                self._uploads.pop(transfer, None)
            raise

    def _upload_arrived(self, transfer: int) -> None:
        self._event(partial(self._core.upload_arrived, transfer))

    def _upload_broke(self, transfer: int, error: HeliographError) -> None:
        self._event(partial(self._core.upload_broke, transfer, error))

    @property
    def traffic(self) -> Traffic:
        """What was carried so far by writes and reads of tensors, and how often it was copied here."""
        return self._execution.traffic.now

    def _forget_upload(self, upload: Upload) -> None:
        with self._lock:
            was_open = upload in self._open_uploads
            charge = self._open_uploads.pop(upload, None)
        if charge is not None:
            charge.give()
        if was_open and upload.is_content:
            size_bytes = upload.received_bytes - upload.start_bytes
            self._execution.traffic.content(size_bytes, is_relayed=upload.is_relayed)

    def open_download(self, transfer: int) -> Download:
        """The bytes of a transfer, once they are read; the caller closes it. Raises ProtocolError."""
        self._check_open()
        return self._downloads.open(transfer)

    def hold_bytes(self, handle: int, size_bytes: int) -> tuple[Tensor, Callable[[], None]]:
        """A tensor of so many u8 that somebody else is to fill, and what lets it go. Until then it stays
        where it is, and no command writes it.

        Raises UnknownHandleError, InvalidArgumentError, or the error of what was to make it.
        """
        wanted = {0: (handle, tensor_type("u8", (size_bytes,)))}
        with self._lock:
            self._check_open()
            bound = self._core.bind_leaves(wanted, {0})
            storage = bound.tensors[0].storage
            if storage is None or storage.buffer is None:
                self._core.release_leaves(bound)
                raise UnknownHandleError(f"tensor {handle} has no memory yet", advice="wait until it is made")
            placed = bound.tensors[0].placed
        return placed, lambda: self._event(partial(self._core.release_leaves, bound))

    # Shared memory

    def share_memory(self) -> FileOfMemory:
        """The memory by which commands may carry bytes, made the first time. Raises UnsupportedError,
        OutOfMemoryError, LimitExceededError."""
        with self._lock:
            self._check_open()
            if self._shared is None:
                self._shared = SealedMemory(min(SHARED_BYTES, self.limits.in_flight_bytes))
                self._core.share(self._shared.size_bytes)
            return FileOfMemory(self._shared.descriptor(), self._shared.size_bytes)

    def shared_bytes(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """A copy of bytes of the session's memory, which its client can no longer change. Raises
        InvalidArgumentError, LimitExceededError, OutOfRangeError."""
        with self._lock:
            self._check_open()
            place = self._core.shared_place(offset_bytes, size_bytes)
            view = self.shared_part(place)
        return private_copy(view)

    def share_tensor(self, handle: int) -> FileOfMemory:
        """The memory in which a tensor lies. Raises UnknownHandleError, UnsupportedError, or the error of
        the command that was to make it."""
        with self._lock:
            self._check_open()
            tensor = self._core.handles.get(handle, TensorHandle)
            if (problem := tensor.problem()) is not None:
                raise problem
            if tensor.storage is None or tensor.storage.buffer is None:
                raise UnknownHandleError(f"tensor {handle} has no memory yet", advice="wait until it is made")
            placed = tensor.placed
            descriptor = placed.buffer.descriptor()
            return FileOfMemory(descriptor, placed.buffer.size_bytes, placed.offset_bytes)

    # The end

    def close(self, error: HeliographError | None = None) -> None:
        """Ends the session and frees everything: running work is aborted, the rest fails with `error`.

        Blocks until that is done, for CLOSE_SECONDS at most. Idempotent.
        """
        with self._lock:
            first, self._closing = not self._closing, True
        if not first:
            self._released.wait(CLOSE_SECONDS)
            return
        error = error or SessionClosedError("the session was closed", advice="open another")
        self._event(partial(self._core.close, error))
        with self._lock:
            uploads = list(self._open_uploads)
        self._contents.stop(error)
        # First: what is passed on may wait for another daemon, under its upload's lock.
        self._direct.close(error)
        for upload in uploads:
            upload.abort(error)
        for end in list(self.when_closing.values()):
            end(error)
        try:
            self._release_everything(error)
        finally:
            self._released.set()
            self._on_closed(self)
            self._call_end(error)

    def _release_everything(self, error: HeliographError) -> None:
        if self._shared is not None:
            # Work that is still under way keeps the pages that it moves.
            self._shared.close()
        self._plans.close()
        self._holding.account.leave(self._plans)
        if not self._quiet.wait(CLOSE_SECONDS) or not self._compiler.busy.acquire(timeout=CLOSE_SECONDS):
            # Memory that work may still touch is better lost than given away.
            lost = "%s: work did not end within %.0f s; its memory is lost"
            logger.error(lost, self, CLOSE_SECONDS, extra=self.log_fields)
            return
        try:
            self._event(self._core.release_all)
            for transfer in list(self._uploads):
                self._drop_upload(DropUpload(transfer))
            self._downloads.close(error)
            # A client that said goodbye has nothing to go on with.
            self._contents.close(error, keep=isinstance(error, CancelledError))
        finally:
            self._compiler.busy.release()

    def _call_end(self, error: HeliographError) -> None:
        with self._lock:
            if self._on_end is not None:
                self._calls.append(partial(self._on_end, error))
            self._on_end = None
        self._deliver()

    @property
    def closed(self) -> HeliographError | None:
        """Why it is closed."""
        return self._core.closed

    def _check_open(self) -> None:
        with self._lock:
            if self._core.closed is not None:
                raise self._core.closed.anew()
