"""Values on their way in: each straight into its tensor, until it is there or nobody waits for it.

Any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Protocol, TypeAlias

from heliograph_backends.contract import Abort, Tensor, access
from heliograph_proto.errors import CancelledError, HeliographError, InternalError, ProtocolError
from heliograph_proto.plans import Arrival, Edge, PeerSource
from heliograph_server.exchange.outgoing import OutgoingValue

#: Told that something is done, or why it is not.
Done: TypeAlias = Callable[[HeliographError | None], None]


class Sink(Protocol):
    """Where the bytes of one value go."""

    edge: Edge
    run: int
    size_bytes: int

    @property
    def is_quick(self) -> bool:
        """Whether its bytes are written quickly, by a copy in this host's memory."""

    def ready(self, wake: Callable[[], None]) -> bool:
        """Whether the next piece may be written; else `wake` is called, once, from any thread, when it is
        worth asking again."""

    def write(self, offset_bytes: int, data: memoryview) -> bool:
        """The next piece, from any thread; whether more is wanted. Raises ProtocolError for bytes that do not
        belong there, and what the device raises."""

    def finish(self) -> None:
        """All has come; what is missing is an error of its own. Nothing happens once it has ended."""

    def fail(self, error: HeliographError) -> None:
        """It does not come. Nothing happens once it has ended."""


class Puller(Protocol):
    """Fetches values from other daemons. Thread-safe; each sink ends by `finish` or `fail`."""

    def pull(self, source: PeerSource, sinks: Sequence[Sink]) -> None:
        """Asks for values, all of them together. Returns at once; raises nothing."""

    def forget(self, source: PeerSource, sinks: Sequence[Sink]) -> None:
        """Nobody waits for these any more. Returns at once."""

    def close(self) -> None:
        """Ends all ways; what is on its way fails."""


class Pusher(Protocol):
    """Brings values to other daemons. Thread-safe."""

    def push(self, destination: PeerSource, edge: Edge, run: int, value: OutgoingValue, done: Done) -> None:
        """Brings a value, which goes as it is taken. Returns at once; `done` is called once, from any thread,
        when the value is where it belongs, or with why it is not."""


class PeerLinks(Puller, Pusher, Protocol):
    """All ways to other daemons."""


class IncomingValue:
    """One arrival of one run, on its way into a tensor. Thread-safe."""

    __slots__ = (
        "_calls", "_ended", "_lock", "_mail", "_outcome", "_received_bytes",
        "asked_as", "edge", "is_quick", "run", "size_bytes", "source", "tensor",
    )  # fmt: skip

    def __init__(
        self,
        arrival: Arrival,
        run: int,
        tensor: Tensor,
        ended: Callable[[int], None] = lambda size_bytes: None,
    ) -> None:
        self.edge = arrival.edge
        self.source = arrival.source
        self.run = run
        self.tensor = tensor
        self.size_bytes = tensor.type.nbytes
        self.is_quick = tensor.buffer.buffer_type.is_host
        #: Under what it was asked for: itself, or what was asked for before its run began.
        self.asked_as: Sink = self
        self._ended = ended
        self._lock = threading.Lock()
        self._received_bytes = 0
        #: True: it is there. An error: why it will never be.
        self._outcome: HeliographError | bool = False
        #: Who is called when it has ended.
        self._calls: list[Callable[[], None]] = []
        #: Mailboxes of those who wait.
        self._mail: list[SimpleQueue[None]] = []

    def __repr__(self) -> str:
        return f"<Landing {self.edge} run {self.run}: {self._received_bytes:,} of {self.size_bytes:,} bytes>"

    # Who brings it

    def ready(self, wake: Callable[[], None]) -> bool:
        return True

    def write(self, offset_bytes: int, data: memoryview) -> bool:
        with self._lock:
            if self._outcome is not False:
                return False
            if offset_bytes != self._received_bytes or offset_bytes + data.nbytes > self.size_bytes:
                raise self._wrong(f"bytes {offset_bytes:,} to {offset_bytes + data.nbytes:,}")
            access.write(self.tensor, offset_bytes, data)
            self._received_bytes += data.nbytes
        return True

    def finish(self) -> None:
        with self._lock:
            if self._outcome is not False:
                return
            whole = self._received_bytes == self.size_bytes
            self._end(True if whole else self._wrong("its end"))
        if whole:
            self._ended(self.size_bytes)
        self._tell()

    def fail(self, error: HeliographError) -> None:
        with self._lock:
            if self._outcome is not False:
                return
            self._end(error)
        self._tell()

    def land(self, data: bytes) -> HeliographError | None:
        """All of a small value; why it could not be taken."""
        try:
            if len(data) != self.size_bytes:
                raise self._wrong(f"{len(data):,} bytes")
            if not self.write(0, memoryview(data)):
                return CancelledError("nobody waits for this value any more")
            self.finish()
        except HeliographError as error:
            self.fail(error)
        except Exception as error:
            self.fail(InternalError(f"writing a value failed: {error}"))
        return self.error

    @property
    def error(self) -> HeliographError | None:
        """Why it does not come; None if it did, or may yet."""
        return self._outcome if isinstance(self._outcome, HeliographError) else None

    def _wrong(self, what: str) -> ProtocolError:
        return ProtocolError(
            f"{what} came where {self._received_bytes:,} of {self.size_bytes:,} bytes of a value had come",
            advice="do both daemons run the same version?",
        )

    def _end(self, outcome: HeliographError | bool) -> None:
        self._outcome = outcome
        for mail in self._mail:
            mail.put(None)

    def _tell(self) -> None:
        calls, self._calls = self._calls, []
        for call in calls:
            call()

    # Who waits for it

    def when_ended(self, call: Callable[[], None]) -> bool:
        """Whether it has ended; else this is called once when it has, by whoever ends it. It must not wait or
        raise."""
        with self._lock:
            if self._outcome is not False:
                return True
            self._calls.append(call)
            return False

    def wait(self, abort: Abort) -> None:
        """Until it is in its tensor. Raises why it is not, CancelledError after an abort."""
        if self._outcome is False:
            mail: SimpleQueue[None] = SimpleQueue()
            with abort.watch(lambda: mail.put(None)):
                with self._lock:
                    is_coming = self._outcome is False
                    self._mail.append(mail)
                if is_coming:
                    mail.get()
        if self._outcome is True:
            return
        if isinstance(self._outcome, HeliographError):
            raise self._outcome.at(self._outcome.origin)
        raise CancelledError("cancelled while it waited for a value of another daemon")

    def close(self) -> bool:
        """Nobody writes to the tensor when this returns. Whether it was on its way."""
        with self._lock:
            if self._outcome is not False:
                return False
            self._end(CancelledError("nobody waits for this value any more"))
        self._tell()
        return True


class RunIncomingValues:
    """The arrivals of one run of a partition: an `Incoming`."""

    def __init__(
        self,
        landings: Sequence[IncomingValue],
        forget: Callable[[Sequence[IncomingValue]], None],
        ask_ahead: Callable[[], None],
    ) -> None:
        self._landings = landings
        self._forget = forget
        self._ask_ahead = ask_ahead

    def __repr__(self) -> str:
        return f"<Arriving {len(self._landings)}>"

    def wait(self, place: int, abort: Abort) -> None:
        """As `Incoming.wait`."""
        self._landings[place].wait(abort)

    def when_ended(self, place: int, call: Callable[[], None]) -> bool:
        """As `Incoming.when_ended`."""
        return self._landings[place].when_ended(call)

    def ask_ahead(self) -> None:
        """As `Incoming.ask_ahead`."""
        self._ask_ahead()

    def close(self) -> None:
        """As `Incoming.close`. Idempotent."""
        pending = [one for one in self._landings if one.close()]
        if pending:
            self._forget(pending)
