"""Values on their way in, each straight into its tensor.

Everything here may be called from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Protocol, TypeAlias

from heliograph_backends.contract import Abort, Tensor, access
from heliograph_proto.errors import CancelledError, HeliographError, InternalError, ProtocolError
from heliograph_proto.plans import Arrival, Edge, PeerSource
from heliograph_server.exchange.outgoing import OutgoingValue, unneeded

#: Called when something is done, with the error if it failed.
Done: TypeAlias = Callable[[HeliographError | None], None]


class Sink(Protocol):
    """The destination of the bytes of one value."""

    edge: Edge
    run: int
    size_bytes: int

    @property
    def is_quick(self) -> bool:
        """True if writing is only a copy in this host's memory."""

    @property
    def is_awaited(self) -> bool:
        """True if the other daemon waits until it knows that the value is here."""

    @property
    def received_bytes(self) -> int:
        """The bytes that are there, from the first one on. A value whose connection broke goes on
        behind them."""

    def ready(self, wake: Callable[[], None]) -> bool:
        """True if the next piece may be written. Otherwise `wake` is called once, from any thread,
        when it is worth asking again."""

    def write(self, offset_bytes: int, data: memoryview) -> bool:
        """Write the next piece, from any thread. Return True if more is expected.

        Ignores bytes that are there: an earlier connection brought them. Raises ProtocolError for
        bytes at the wrong offset, and the errors of the device.
        """

    def finish(self) -> None:
        """End the value. Missing bytes are an error. Has no effect once the value has ended."""

    def fail(self, error: HeliographError) -> None:
        """Fail the value. Has no effect once the value has ended."""


class PeerLinks(Protocol):
    """The links to other daemons. Thread-safe."""

    def pull(self, source: PeerSource, sinks: Sequence[Sink]) -> None:
        """Request values, all together. Returns at once and raises nothing; each sink ends by
        `finish` or `fail`. A connection that breaks is made again for some time before they fail.
        """

    def forget(self, source: PeerSource, sinks: Sequence[Sink]) -> None:
        """Cancel the requests for values. Returns at once."""

    def push(self, destination: PeerSource, edge: Edge, run: int, value: OutgoingValue, done: Done) -> None:
        """Push a value, piece by piece as it is taken. Returns at once.

        `done` is called once, from any thread, when the value is at its place or with the error.
        """

    def close(self) -> None:
        """Close all links. Values on their way fail."""


class IncomingValue:
    """One arrival of one run, on its way into a tensor: a `Sink`. Thread-safe."""

    __slots__ = (
        "_calls", "_ended", "_lock", "_mail", "_outcome", "asked_as", "edge",
        "is_awaited", "is_quick", "received_bytes", "run", "size_bytes", "source", "tensor",
    )  # fmt: skip

    def __init__(
        self,
        arrival: Arrival,
        run: int,
        tensor: Tensor,
        ended: Callable[[int], None] = lambda size_bytes: None,
        *,
        is_awaited: bool = False,
    ) -> None:
        self.edge = arrival.edge
        self.source = arrival.source
        self.run = run
        self.tensor = tensor
        self.size_bytes = tensor.type.nbytes
        self.is_quick = tensor.buffer.buffer_type.is_host
        self.is_awaited = is_awaited
        #: The sink of the request: this one, or the one that was requested before the run began.
        self.asked_as: Sink = self
        self._ended = ended
        self._lock = threading.Lock()
        self.received_bytes = 0
        #: True: it has arrived. An error: it never will.
        self._outcome: HeliographError | bool = False
        #: Callbacks for the end.
        self._calls: list[Callable[[], None]] = []
        #: Mailboxes of the threads that wait.
        self._mail: list[SimpleQueue[None]] = []

    def __repr__(self) -> str:
        return f"<IncomingValue {self.edge} run {self.run}: {self.received_bytes} of {self.size_bytes} B>"

    # Called by the link

    def ready(self, wake: Callable[[], None]) -> bool:
        return True

    def write(self, offset_bytes: int, data: memoryview) -> bool:
        with self._lock:
            if self._outcome is not False:
                return False
            if offset_bytes + data.nbytes <= self.received_bytes:
                return True
            if offset_bytes != self.received_bytes or offset_bytes + data.nbytes > self.size_bytes:
                raise self._wrong(f"bytes {offset_bytes:,} to {offset_bytes + data.nbytes:,}")
            access.write(self.tensor, offset_bytes, data)
            self.received_bytes += data.nbytes
        return True

    def finish(self) -> None:
        with self._lock:
            if self._outcome is not False:
                return
            whole = self.received_bytes == self.size_bytes
            self._end(True if whole else self._wrong("the end"))
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
        """Write all of a small value, unless it is here. Return the error if it failed."""
        if self._outcome is True:
            return None
        try:
            if len(data) != self.size_bytes:
                raise self._wrong(f"{len(data):,} bytes")
            if not self.write(0, memoryview(data)):
                return self.error
            self.finish()
        except HeliographError as error:
            self.fail(error)
        except Exception as error:
            self.fail(InternalError(f"writing a value failed: {error}"))
        return self.error

    @property
    def error(self) -> HeliographError | None:
        """The error if the value failed. None if it arrived, or still may."""
        return self._outcome if isinstance(self._outcome, HeliographError) else None

    def _wrong(self, what: str) -> ProtocolError:
        return ProtocolError(
            f"received {what} after {self.received_bytes:,} of {self.size_bytes:,} bytes of a value",
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

    # Called by the consumer

    def when_ended(self, call: Callable[[], None]) -> bool:
        """True if it has ended. Otherwise `call` is called once when it has; it must not wait or
        raise."""
        with self._lock:
            if self._outcome is not False:
                return True
            self._calls.append(call)
            return False

    def wait(self, abort: Abort) -> None:
        """Wait until the value is in its tensor. Raises the value's error, and CancelledError after
        an abort."""
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
        raise CancelledError("cancelled while waiting for a value of another daemon")

    def close(self) -> bool:
        """Stop writing to the tensor. Return True if the value was still on its way."""
        with self._lock:
            if self._outcome is not False:
                return False
            self._end(unneeded())
        self._tell()
        return True


class RunIncomingValues:
    """The `IncomingValues` of a `LivePorts`."""

    def __init__(
        self,
        values: Sequence[IncomingValue],
        forget: Callable[[Sequence[IncomingValue]], None],
        ask_ahead: Callable[[], None],
    ) -> None:
        self._values = values
        self._forget = forget
        self.ask_ahead = ask_ahead

    def __repr__(self) -> str:
        return f"<RunIncomingValues {len(self._values)}>"

    def wait(self, place: int, abort: Abort) -> None:
        """As `IncomingValues.wait`."""
        self._values[place].wait(abort)

    def when_ended(self, place: int, call: Callable[[], None]) -> bool:
        """As `IncomingValues.when_ended`."""
        return self._values[place].when_ended(call)

    def close(self) -> None:
        """As `IncomingValues.close`. Idempotent."""
        pending = [one for one in self._values if one.close()]
        if pending:
            self._forget(pending)
