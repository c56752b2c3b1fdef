"""Devices, streams and events for asyncio; as `heliograph.stream`."""

# The timeouts are those of the blocking API; each ends in a typed error of ours.
# ruff: noqa: ASYNC109

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from heliograph._devices import DeviceBase, ask_memory
from heliograph._procedures import synchronize, wait_for
from heliograph._streams import EventBase, StreamBase, make_stream
from heliograph.builder import Graph
from heliograph_proto.description import BufferTypeInfo, Memory, OpAnswer, OpQuery, PlacementInfo
from heliograph_proto.types import DTypeArgument

if TYPE_CHECKING:
    from heliograph._aio import AioShell


class Event(EventBase):
    """A mark in a stream's order, made by `Stream.record`; awaitable."""

    _shell: AioShell

    async def result(self, timeout: float | None = None) -> None:
        """Waits until the event is reached. Raises the first error of the stream since its last mark."""
        await self._shell.drive(wait_for(self._shell.core, self._pending), timeout, "the event")

    def __await__(self) -> Generator[Any, Any, None]:
        return self.result().__await__()


class Stream(StreamBase):
    """An ordered queue of work on a device, made by `device.stream()`."""

    _shell: AioShell

    def record(self) -> Event:
        """Marks the present end of the stream."""
        return self._record(Event)

    async def synchronize(self, timeout: float | None = None) -> None:
        """Waits until everything before has been computed. Raises the first error nobody has seen."""
        await self._shell.drive(
            synchronize(self._shell.core, (self._live_handle,)), timeout, "the work on the stream"
        )


class Device(DeviceBase):
    """A device of the server."""

    _shell: AioShell

    async def memory(self, timeout: float | None = None) -> Memory:
        """Its free and total bytes, now."""
        return await self._shell.drive(
            ask_memory(self.name), timeout, f"asking for the memory of {self.name}"
        )

    def stream(self) -> Stream:
        """A new ordered queue of work."""
        return make_stream(self._shell, self.name, Stream)

    async def query(self, queries: Sequence[OpQuery], timeout: float | None = None) -> tuple[OpAnswer, ...]:
        """As hg.Device.query."""
        return await self._shell.drive(self._querying(queries), timeout, self._asked)

    async def unsupported(self, graph: Graph, timeout: float | None = None) -> list[tuple[str, str]]:
        """As hg.Device.unsupported."""
        return await self._shell.drive(self._comparing(graph), timeout, self._asked)

    async def placement(
        self,
        tensors: Iterable[tuple[Sequence[int] | int, DTypeArgument]],
        buffer_type: BufferTypeInfo | str | None = None,
        timeout: float | None = None,
    ) -> PlacementInfo:
        """As hg.Device.placement."""
        return await self._shell.drive(self._placing(tensors, buffer_type), timeout, self._asked)
