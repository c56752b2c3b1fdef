"""Streams and events, for both APIs: the order of work on a device."""

from __future__ import annotations

from typing import TypeVar

from heliograph.core.future import Pending
from heliograph.core.shell import Handle, Shell
from heliograph_proto import commands as c
from heliograph_proto.errors import InvalidArgumentError


class EventBase(Handle):
    """A mark in a stream's order. An event that was never recorded counts as reached."""

    _kind = "event"

    def __init__(self, shell: Shell, handle: int) -> None:
        # The server knows it from its first record on.
        super().__init__(shell, handle, owned=False)
        self._pending: Pending | None = None

    def done(self) -> bool:
        """True if everything before it on its stream is done, or has failed."""
        return self._pending is None or self._pending.done

    def _recorded(self, pending: Pending) -> None:
        self._pending, self._owned = pending, True

    def __repr__(self) -> str:
        error = self._pending.error if self._pending is not None else None
        state = "pending" if not self.done() else "failed" if error else "reached"
        return f"<Event {state}>"


EventT = TypeVar("EventT", bound=EventBase)


class StreamBase(Handle):
    """An ordered queue of work on a device."""

    _kind = "stream"

    def __init__(self, shell: Shell, handle: int, device: str) -> None:
        super().__init__(shell, handle)
        self.device = device

    def wait(self, event: EventBase) -> None:
        """Make the stream wait for an event before its next command.

        Raises InvalidArgumentError for another type, and UnknownHandleError for an event of another
        session.
        """
        if not isinstance(event, EventBase):
            raise InvalidArgumentError(
                f"a stream waits for events, not {event!r:.80}", advice="make one: stream.record()"
            )
        number, stream = event._used_in(self._shell), self._live_handle
        self._shell.advance(lambda: self._shell.core.send(c.WaitCommand(number), stream=stream))

    def _record(self, kind: type[EventT], event: EventT | None) -> EventT:
        """Record a new event, or move the mark of an existing one."""
        if event is None:
            event = make_event(self._shell, kind)
        elif not isinstance(event, kind):
            raise InvalidArgumentError(
                f"a stream records events, not {event!r:.80}", advice="make one: session.event()"
            )
        number, stream, core = event._used_in(self._shell), self._live_handle, self._shell.core
        event._recorded(
            self._shell.advance(lambda: core.send(c.Record(number), stream=stream, observed=True))
        )
        return event

    def free(self) -> None:
        """End the stream once its work is done. Idempotent."""
        self._shell.core.streams.discard(self._handle)
        super().free()

    def __del__(self) -> None:
        self._shell.core.streams.discard(self._handle)
        super().__del__()

    def __repr__(self) -> str:
        return f"<Stream on {self.device} {self._state}>"


def make_event(shell: Shell, kind: type[EventT]) -> EventT:
    """Create an event that was never recorded."""
    return kind(shell, shell.advance(shell.core.handle))


StreamT = TypeVar("StreamT", bound=StreamBase)


def make_stream(shell: Shell, device: str, kind: type[StreamT]) -> StreamT:
    """Create a stream of a device."""
    core = shell.core

    def send() -> int:
        handle = core.handle()
        core.send(c.CreateStream(handle, device))
        core.streams.add(handle)
        return handle

    return kind(shell, shell.advance(send), device)


def stream_handle(shell: Shell, stream: StreamBase | None) -> int | None:
    """Return the handle of the stream that a command names; None for the session's own."""
    if stream is None:
        return None
    if not isinstance(stream, StreamBase):
        raise InvalidArgumentError(
            f"stream is {stream!r:.80}", advice="make one: session.stream() or session.devices[0].stream()"
        )
    return stream._used_in(shell)
