"""Values that a daemon carries between two daemons that cannot reach each other.

Everything here may be called from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from heliograph_proto.codec.bulk import encode_download
from heliograph_proto.errors import HeliographError, InternalError, ProtocolError
from heliograph_proto.plans import Edge
from heliograph_server.exchange.incoming import Done
from heliograph_server.exchange.outgoing import SMALL_BYTES, OutgoingValue

#: The most bytes of a value between being pulled and being pushed.
RELAY_BYTES = 8 * 2**20


class RelayedValue:
    """A value that is pulled in order to be pushed: a `Sink`.

    `push` begins to push a value. `done` is called once, from any thread.
    """

    is_quick = True
    is_awaited = False

    def __init__(
        self, edge: Edge, run: int, size_bytes: int, push: Callable[[OutgoingValue, Done], None], done: Done
    ) -> None:
        self.edge = edge
        self.run = run
        self.size_bytes = size_bytes
        self._push = push
        self._done = done
        self._lock = threading.Lock()
        self._is_done = False
        self._value: OutgoingValue | None = None
        self._held_bytes = 0
        self.received_bytes = 0
        self._wake: Callable[[], None] | None = None
        if size_bytes > SMALL_BYTES:
            self._value = OutgoingValue(size_bytes, self._freed)
            push(self._value, self._pushed)

    def __repr__(self) -> str:
        return f"<RelayedValue {self.edge} run {self.run}: {self.received_bytes:,} of {self.size_bytes:,} B>"

    def ready(self, wake: Callable[[], None]) -> bool:
        """As `Sink.ready`."""
        with self._lock:
            if self._held_bytes < RELAY_BYTES or self._is_done:
                return True
            self._wake = wake
            return False

    def _freed(self, size_bytes: int) -> None:
        self._count(-size_bytes)

    def _count(self, more_bytes: int) -> None:
        with self._lock:
            self._held_bytes += more_bytes
            wake = None
            if more_bytes < 0:
                wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    def write(self, offset_bytes: int, data: memoryview) -> bool:
        """As `Sink.write`."""
        if self._is_done:
            return False
        if offset_bytes + data.nbytes <= self.received_bytes and self.size_bytes:
            return True
        if offset_bytes != self.received_bytes or offset_bytes + data.nbytes > self.size_bytes:
            raise ProtocolError(f"a piece at byte {offset_bytes:,} of a relayed value does not belong there")
        self.received_bytes += data.nbytes
        if self._value is None:
            self._value = OutgoingValue.of(bytes(data))
            self._push(self._value, self._pushed)
        else:
            self._count(data.nbytes)
            self._value.put(encode_download(offset_bytes, self.size_bytes, data), data.nbytes)
        return True

    def finish(self) -> None:
        """As `Sink.finish`."""
        if self.received_bytes != self.size_bytes:
            self.fail(ProtocolError("a relayed value ended before all of it had arrived"))

    def fail(self, error: HeliographError) -> None:
        """As `Sink.fail`."""
        if self._value is not None:
            self._value.fail(error)
        self._pushed(error)

    def _pushed(self, error: HeliographError | None) -> None:
        with self._lock:
            if self._is_done:
                return
            self._is_done = True
            wake, self._wake = self._wake, None
        if wake is not None:
            wake()
        self._done(error)


def no_link() -> InternalError:
    """The error of a process without links to other daemons."""
    return InternalError("this process exchanges no values with other daemons")
