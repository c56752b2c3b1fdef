"""Contents of a session that go to other daemons: straight from the client, or passed on from here.

    place ──▸ coming ──(the daemon says that it is whole)──▸ the session's contents
                 │
                 └──(it failed, or the session ends)──▸ its memory over there is freed

Nothing of them lies here: an upload that comes to this server is passed on piece by piece.
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

#: How long after the client heard that a content is whole this server may hear of it.
SETTLE_SECONDS = 10.0

#: Where contents are to lie, by digest, and their sizes.
Homes = Mapping[bytes, tuple[BufferType, int]]


@dataclass(eq=False, slots=True)
class DirectContent:
    """A content on its way to a buffer of another daemon."""

    digest: bytes
    buffer: Buffer
    #: Of its memory, until that is the session's or freed.
    charge: Charge
    #: Done when it is over, with why it is not there.
    over: Future[HeliographError | None] = field(default_factory=Future)
    received_bytes: int = 0
    #: Which of those that were announced together; None until they were.
    admittance: Admittance | None = None
    place: int = 0

    @property
    def offer(self) -> ContentOffer:
        assert self.admittance is not None, "a content that was announced"
        return self.admittance.offers[self.place]

    def free(self) -> None:
        """It does not come."""
        self.buffer.free()
        self.charge.give()


class DirectContents:
    """Those of one session. Thread-safe; `place` is called by one thread at a time."""

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
        """Takes memory for contents whose homes are other daemons' devices, and announces them there. For
        what has no room there, and what a daemon does not take so, there is no offer.

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
            return []  # its upload says so
        try:
            buffer = self._room.for_work(partial(memory.allocate, size_bytes, Usage.WEIGHTS))
        except BaseException as error:
            charge.give()
            if isinstance(error, OutOfMemoryError):
                return []  # compiling says so, or finds another place
            raise
        return [DirectContent(digest, buffer, charge)]

    def _announced(self, intake: Intake, ones: list[DirectContent]) -> list[DirectContent]:
        with self._lock:
            self._coming.update({one.digest: one for one in ones})
        try:
            wanted = [(one.digest, one.buffer) for one in ones]
            admittance = intake.admit(wanted, lambda place, news: self._told(ones[place], news))
        except BaseException as error:
            # Others are over already: freed, or the session's.
            _free(self._forget(ones))
            if isinstance(error, HeliographError) and not isinstance(
                error, ConnectionError | DeviceLostError
            ):
                logger.warning("contents go through this server, since the member refused them: %s", error)
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
        """Those of them that were not over yet: whoever is given one has to end it."""
        with self._lock:
            return [
                one for one in ones if self._coming.get(one.digest) is one and self._coming.pop(one.digest)
            ]

    def _told(self, one: DirectContent, news: UploadNews) -> None:
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

    # What is asked of them

    def received(self, digest: bytes) -> int:
        """How many bytes of a content are over there, as far as is known here."""
        found = self._find(digest)
        return found.received_bytes if found is not None else 0

    def is_coming(self, digest: bytes) -> bool:
        """Whether an upload of this content is passed on."""
        return self._find(digest) is not None

    def when_here(self, digests: Collection[bytes]) -> Future[None]:
        """Done when none of these is coming any more, SETTLE_SECONDS later at most."""
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
        """An upload that is passed on; None where the content is kept here. Raises ProtocolError,
        ContentMismatchError when what came before the offset is not there, ConnectionError."""
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
            raise _over_there(one) from None
        with self._lock:
            closed = self._closed
            self._relays.add(relay)
        if closed is not None or offset_bytes > relay.received_bytes:
            self._dropped(relay)
            raise closed or ContentMismatchError(
                f"the upload cannot go on at byte {offset_bytes:,}: {relay.received_bytes:,} came before",
                advice="send the content from its beginning",
            )
        return RelayedUpload(one, relay, offset_bytes, over, lambda: self._dropped(relay))

    def _dropped(self, relay: Relay) -> None:
        relay.cancel()
        with self._lock:
            self._relays.discard(relay)

    # The end

    def close(self, error: HeliographError) -> None:
        """What is not there yet will not come. Idempotent."""
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
    """A content that is passed on to another daemon as it comes; that one takes its digest."""

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
        #: Up to where the other daemon has it.
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
                "a member took a content and did not tell of it in time", advice="try again"
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


def _over_there(one: DirectContent) -> UnavailableError:
    """The other daemon takes a content no more: it has it, or will not, and is just telling so."""
    wait([one.over], SETTLE_SECONDS)
    return UnavailableError("the content came another way, or cannot come so", advice="ask what is missing")


def _free(ones: Iterable[DirectContent]) -> None:
    for one in ones:
        one.free()
