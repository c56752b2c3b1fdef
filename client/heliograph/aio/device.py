"""Devices, and their streams and events."""

# ruff: noqa: ASYNC109

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from heliograph._base.device import DeviceBase
from heliograph._base.streams import EventBase, StreamBase, make_stream
from heliograph.core.effects import ask
from heliograph.core.methods import GET_MEMORY
from heliograph.graph.builder import Graph
from heliograph.procedures.transfer import synchronize, wait_for
from heliograph_proto.devices import BufferTypeInfo, Memory, OpAnswer, OpQuery, PlacementInfo
from heliograph_proto.types import DTypeArgument

if TYPE_CHECKING:
    from heliograph.transport.aio import AioShell


class Event(EventBase):
    """A mark in a stream's order, made by `stream.record()` or `session.event()`; awaitable.

    `stream.record(event)` moves the mark. An event that was never recorded counts as reached.
    """

    _shell: AioShell

    async def result(self, timeout: float | None = None) -> None:
        """Wait until everything before the event's last mark has been computed.

        Raises the first error of the stream since the mark before, or DeadlineExceededError.
        """
        if self._pending is None:
            return
        await self._shell.drive(wait_for(self._shell.core, self._pending), timeout, "the event")

    def __await__(self) -> Generator[Any, Any, None]:
        return self.result().__await__()


class Stream(StreamBase):
    """An ordered queue of work on a device. Made by `device.stream()` or `session.stream()`.

    Work on one stream runs in order; events order streams among each other.
    """

    _shell: AioShell

    def record(self, event: Event | None = None) -> Event:
        """Record an event at the current end of the stream: a new one, or again an existing one.

        Work that waits for an earlier mark of the event still waits for that one. Raises
        InvalidArgumentError, and UnknownHandleError for an event of another session.
        """
        return self._record(Event, event)

    async def synchronize(self, timeout: float | None = None) -> None:
        """Wait until everything sent to the stream has been computed.

        Raises the first error that no other call has raised, and DeadlineExceededError.
        """
        await self._shell.drive(
            synchronize(self._shell.core, (self._live_handle,)), timeout, "the work on the stream"
        )


class Device(DeviceBase):
    """A device of the server."""

    _shell: AioShell

    async def memory(self, timeout: float | None = None) -> Memory:
        """Return the device's free and total bytes now. Raises DeadlineExceededError."""
        return await self._shell.drive(
            ask(GET_MEMORY, self.name), timeout, f"asking for the memory of {self.name}"
        )

    def stream(self) -> Stream:
        """Create a stream on the device."""
        return make_stream(self._shell, self.name, Stream)

    async def query(self, queries: Sequence[OpQuery], timeout: float | None = None) -> tuple[OpAnswer, ...]:
        """Ask whether the device runs nodes, such as `hg.OpQuery("add", (type, type), type)`.

        Each answer says whether the device runs the node, whether fetching its weights for it pays
        off and, with `path=True`, by which op path it computes the node.

        Raises UnknownOpError, InvalidGraphError for operands that the op table refuses, and
        DeadlineExceededError.
        """
        return await self._shell.drive(self._querying(queries), timeout, self._asked)

    async def unsupported(self, graph: Graph, timeout: float | None = None) -> list[tuple[str, str]]:
        """Return the nodes of a graph that the device cannot run, as pairs of name and reason.

        Raises DeadlineExceededError.
        """
        return await self._shell.drive(self._comparing(graph), timeout, self._asked)

    async def placement(
        self,
        tensors: Iterable[tuple[Sequence[int] | int, DTypeArgument]],
        buffer_type: BufferTypeInfo | str | None = None,
        timeout: float | None = None,
    ) -> PlacementInfo:
        """Return the memory that tensors, given as pairs of shape and data type, would take.

        The result has each tensor's padded size and the size of each buffer. Nothing is allocated.
        Raises OutOfMemoryError for a tensor that is larger than any buffer, and
        DeadlineExceededError.
        """
        return await self._shell.drive(self._placing(tensors, buffer_type), timeout, self._asked)
