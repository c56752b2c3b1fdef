"""Streams and events, for both APIs: the order of work on a device."""

from __future__ import annotations

from typing import TypeVar

from heliograph.core.future import Pending
from heliograph.core.shell import Handle, Shell
from heliograph_proto import commands as c
from heliograph_proto.errors import InvalidArgumentError


class EventBase(Handle):
    """A mark in a stream's order."""

    _kind = "event"

    def __init__(self, shell: Shell, handle: int, pending: Pending) -> None:
        super().__init__(shell, handle)
        self._pending = pending

    def done(self) -> bool:
        """True if everything before it on its stream is done, or has failed."""
        return self._pending.done

    def __repr__(self) -> str:
        state = "pending" if not self.done() else "failed" if self._pending.error else "reached"
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

    def _record(self, kind: type[EventT]) -> EventT:
        stream, core = self._live_handle, self._shell.core

        def send() -> tuple[int, Pending]:
            handle = core.handle()
            return handle, core.send(c.Record(handle), stream=stream, observed=True)

        return kind(self._shell, *self._shell.advance(send))

    def free(self) -> None:
        """End the stream once its work is done. Idempotent."""
        self._shell.core.streams.discard(self._handle)
        super().free()

    def __del__(self) -> None:
        self._shell.core.streams.discard(self._handle)
        super().__del__()

    def __repr__(self) -> str:
        return f"<Stream on {self.device} {self._state}>"


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
