"""Contents that a session uploads to other daemons: directly from the client, or forwarded from
here.

    place ──▸ coming ──(the daemon reports it complete)──▸ the session's contents
                 │
                 └──(it fails, or the session ends)──▸ its memory on the daemon is freed

Their bytes are not stored here: an upload that arrives at this server is forwarded piece by piece.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial

from heliograph_backends.contract import Admittance, Buffer, BufferType, Intake, Relay, UploadNews, Usage
from heliograph_proto.errors import (
    ConnectionError,
    ContentMismatchError,
    DeviceLostError,
    HeliographError,
    OutOfMemoryError,
    PermissionDeniedError,
    ProtocolError,
    UnavailableError,
)
from heliograph_proto.plans import ContentOffer
from heliograph_server.resources.quotas import Charge
from heliograph_server.resources.reclaim import MemoryReclaim
from heliograph_server.resources.timers import Deadlines
from heliograph_server.weights.session_weights import SessionWeights
from heliograph_server.weights.uploads import IncomingUpload

logger = logging.getLogger(__name__)

#: After the client has heard that a content is complete, this server hears of it within this time.
SETTLE_SECONDS = 10.0

#: The memories of contents, by digest, and the contents' sizes.
Homes = Mapping[bytes, tuple[BufferType, int]]


@dataclass(eq=False, slots=True)
class DirectContent:
    """A content on its way to a buffer on another daemon."""

    digest: bytes
    buffer: Buffer
    #: The quota charge of its memory, until the session has the content or it is freed.
    charge: Charge
    #: Done at the end, with the error if the content did not arrive.
    over: Future[HeliographError | None] = field(default_factory=Future)
    received_bytes: int = 0
    #: Set when the content is announced, with its index in the admittance.
    admittance: Admittance | None = None
    place: int = 0

    @property
    def offer(self) -> ContentOffer:
        assert self.admittance is not None, "a content that was announced"
        return self.admittance.offers[self.place]

    def free(self) -> None:
        """Free the memory of a content that does not arrive."""
        self.buffer.free()
        self.charge.give()


class DirectContents:
    """The contents of one session on their way. Thread-safe; only one thread at a time calls
    `place`."""

    def __init__(self, contents: SessionWeights, room: MemoryReclaim, deadlines: Deadlines) -> None:
        self._contents = contents
        self._room = room
        self._deadlines = deadlines
        self._lock = threading.Lock()
        self._coming: dict[bytes, DirectContent] = {}
        self._relays: set[Relay] = set()
        self._closed: HeliographError | None = None

    def __repr__(self) -> str:
        return f"<DirectContents {len(self._coming)} coming>"

    def place(self, homes: Homes) -> tuple[ContentOffer, ...]:
        """Allocate memory for contents on other daemons' devices, and announce them there. There is
        no offer for a content without room, or that the daemon does not accept this way.

        Raises ConnectionError or DeviceLostError when a daemon is gone.
        """
        found: list[DirectContent] = []
        made: dict[Intake, list[DirectContent]] = {}
        try:
            for digest, (memory, size_bytes) in homes.items():
                intake = memory.device.intake
                if (known := self._find(digest)) is not None:
                    found.append(known)
                elif intake is not None and size_bytes:
                    made.setdefault(intake, []).extend(self._allocated(digest, memory, size_bytes))
            while made:
                intake, ones = made.popitem()
                found += self._announced(intake, ones)
        except BaseException:
            for left in made.values():
                _free(left)
            raise
        return tuple(one.offer for one in found)

    def _find(self, digest: bytes) -> DirectContent | None:
        with self._lock:
            return self._coming.get(digest)

    def _allocated(self, digest: bytes, memory: BufferType, size_bytes: int) -> list[DirectContent]:
        try:
            charge = self._contents.charge(size_bytes)
        except OutOfMemoryError:
            return []  # the upload raises the error
        try:
            buffer = self._room.for_work(partial(memory.allocate, size_bytes, Usage.WEIGHTS))
        except BaseException as error:
            charge.give()
            if isinstance(error, OutOfMemoryError):
                return []  # compiling raises the error, or finds another place
            raise
        return [DirectContent(digest, buffer, charge)]

    def _announced(self, intake: Intake, ones: list[DirectContent]) -> list[DirectContent]:
        with self._lock:
            self._coming.update({one.digest: one for one in ones})
        try:
            announced = [(one.digest, one.buffer) for one in ones]
            admittance = intake.admit(announced, lambda place, news: self._update(ones[place], news))
        except BaseException as error:
            # The rest are over already: freed, or the session's.
            _free(self._forget(ones))
            if isinstance(error, HeliographError) and not isinstance(
                error, ConnectionError | DeviceLostError
            ):
                logger.warning("a member refused contents, which are uploaded through this server: %s", error)
                return []
            raise
        for place, one in enumerate(ones):
            one.admittance, one.place = admittance, place
        with self._lock:
            closed = self._closed
        if closed is not None:
            self._end(ones, closed)
            raise closed
        return ones

    def _forget(self, ones: Iterable[DirectContent]) -> list[DirectContent]:
        """Remove those contents that are not over yet, and return them. The caller must end
        them."""
        with self._lock:
            return [
                one for one in ones if self._coming.get(one.digest) is one and self._coming.pop(one.digest)
            ]

    def _update(self, one: DirectContent, news: UploadNews) -> None:
        one.received_bytes = news.received_bytes
        if not news.is_over or not self._forget([one]):
            return
        error = news.error
        if error is None:
            try:
                self._contents.add(one.digest, one.buffer)
            except HeliographError as refused:
                error = refused
            finally:
                one.charge.give()
        else:
            one.free()
        one.over.set_result(error)

    # Look-ups and uploads

    def received(self, digest: bytes) -> int:
        """The number of bytes of a content on the other daemon, as far as known here."""
        found = self._find(digest)
        return found.received_bytes if found is not None else 0

    def is_coming(self, digest: bytes) -> bool:
        """True if an upload of this content is forwarded."""
        return self._find(digest) is not None

    def when_here(self, digests: Collection[bytes]) -> Future[None]:
        """A future that is done when none of these contents is on its way, or after
        SETTLE_SECONDS."""
        future: Future[None] = Future()
        waiting = [one for digest in digests if (one := self._find(digest)) is not None]
        left, lock = len(waiting), threading.Lock()

        def one_is_over(_done: object) -> None:
            nonlocal left
            with lock:
                left -= 1
                is_last = not left
            if is_last:
                _finish(future, lock)

        if not waiting:
            future.set_result(None)
            return future
        timer = self._deadlines.after(SETTLE_SECONDS, lambda: _finish(future, lock))
        future.add_done_callback(lambda _done: self._deadlines.cancel(timer))
        for one in waiting:
            one.over.add_done_callback(one_is_over)
        return future

    def begin(
        self, digest: bytes, size_bytes: int, offset_bytes: int, over: Callable[[IncomingUpload], None]
    ) -> IncomingUpload | None:
        """Begin an upload that is forwarded. None if the content is stored here.

        Raises ProtocolError, ConnectionError, and ContentMismatchError if the bytes before the
        offset are missing.
        """
        one = self._find(digest)
        if one is None or one.admittance is None:
            return None
        if size_bytes != one.buffer.size_bytes:
            raise ProtocolError(
                f"a content of {size_bytes} bytes, where {one.buffer.size_bytes} were expected"
            )
        try:
            relay = one.admittance.relay(one.place)
        except PermissionDeniedError:
            # The other daemon accepts the content no longer: it has it or refuses it, and reports
            # that soon.
            wait([one.over], SETTLE_SECONDS)
            raise UnavailableError(
                "the content arrived another way, or cannot be uploaded like this", advice="try again"
            ) from None
        with self._lock:
            closed = self._closed
            self._relays.add(relay)
        if closed is not None or offset_bytes > relay.received_bytes:
            self._cancel(relay)
            raise closed or ContentMismatchError(
                f"the upload cannot continue at byte {offset_bytes:,}: only {relay.received_bytes:,} arrived",
                advice="send the content from its start",
            )
        return RelayedUpload(one, relay, offset_bytes, over, lambda: self._cancel(relay))

    def _cancel(self, relay: Relay) -> None:
        relay.cancel()
        with self._lock:
            self._relays.discard(relay)

    # Closing

    def close(self, error: HeliographError) -> None:
        """Fail the contents that have not arrived. Idempotent."""
        with self._lock:
            self._closed = self._closed or error
            coming, relays = list(self._coming.values()), list(self._relays)
        for relay in relays:
            relay.cancel()
        self._end(coming, error)

    def _end(self, coming: Collection[DirectContent], error: HeliographError) -> None:
        for admittance in {one.admittance for one in coming if one.admittance is not None}:
            admittance.cancel()
        for one in self._forget(coming):
            one.free()
            one.over.set_result(error)


class RelayedUpload(IncomingUpload):
    """An upload that is forwarded to another daemon, which checks the digest."""

    is_content = is_relayed = True

    def __init__(
        self,
        coming: DirectContent,
        relay: Relay,
        offset_bytes: int,
        over: Callable[[IncomingUpload], None],
        drop: Callable[[], None],
    ) -> None:
        super().__init__(coming.buffer.size_bytes, over)
        self.start_bytes = self.received_bytes = offset_bytes
        self._coming, self._relay, self._drop = coming, relay, drop
        #: The number of bytes that the other daemon has.
        self._passed_bytes = relay.received_bytes

    def _write(self, data: memoryview) -> None:
        fresh = data[max(0, self._passed_bytes - self.received_bytes) :]
        if fresh.nbytes:
            self._relay.write(fresh)
            self._passed_bytes += fresh.nbytes

    def _finish(self) -> None:
        self._relay.finish()
        try:
            error = self._coming.over.result(SETTLE_SECONDS)
        except TimeoutError:
            raise UnavailableError(
                "a member received a content and did not report it in time", advice="try again"
            ) from None
        self._drop()
        if error is not None:
            raise error

    def _abort(self, error: HeliographError) -> None:
        self._drop()


def _finish(future: Future[None], lock: threading.Lock) -> None:
    with lock:
        is_first = not future.done() and future.set_running_or_notify_cancel()
    if is_first:
        future.set_result(None)


def _free(ones: Iterable[DirectContent]) -> None:
    for one in ones:
        one.free()
