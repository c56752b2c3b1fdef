"""Streams and events: the order of work on a device, and marks in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from heliograph import _common
from heliograph._common import EventBase, StreamBase
from heliograph._procedures import synchronize, wait_for
from heliograph_proto.description import Memory

if TYPE_CHECKING:
    from heliograph._blocking import BlockingShell


class Event(EventBase):
    """A mark in a stream's order, made by `Stream.record`."""

    _shell: BlockingShell

    def result(self, timeout: float | None = None) -> None:
        """Blocks until the event is reached: everything before it has been computed.

        Raises the first error of the stream since its last mark, or DeadlineExceededError.
        """
        self._shell.drive(wait_for(self._shell.core, self._pending), timeout, "the event")


class Stream(StreamBase):
    """An ordered queue of work on a device, made by `device.stream()`.

    Work on one stream runs in order; events order streams against each other.
    """

    _shell: BlockingShell

    def record(self) -> Event:
        """Marks the present end of the stream."""
        return self._record(Event)

    def synchronize(self, timeout: float | None = None) -> None:
        """Blocks until everything before has been computed. Raises the first error nobody has seen."""
        self._shell.drive(
            synchronize(self._shell.core, (self._live_handle,)), timeout, "the work on the stream"
        )


class Device(_common.DeviceBase):
    """A device of the server."""

    _shell: BlockingShell

    def memory(self, timeout: float | None = None) -> Memory:
        """Its free and total bytes, now. Raises DeadlineExceededError."""
        return self._shell.drive(
            _common.ask_memory(self.name), timeout, f"asking for the memory of {self.name}"
        )

    def stream(self) -> Stream:
        """A new ordered queue of work."""
        return _common.make_stream(self._shell, self.name, Stream)
