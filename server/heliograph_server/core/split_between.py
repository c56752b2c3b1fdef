"""The memory between the splits of a plan: results that other splits read, and copies of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

from heliograph_backends.contract import Buffer, BufferType, Tensor, Usage
from heliograph_proto.graph import Graph
from heliograph_server.core.reservation import Share
from heliograph_server.core.scheduling.between import Place, Span, Spans, plan_between

_SIZE = attrgetter("size_bytes")


class Between:
    """Of one plan. `memories`: of each device, in the schedule's order; `reserved`: what was reserved, by a
    device's name.
    """

    def __init__(
        self, graph: Graph, memories: Sequence[BufferType], reserved: Callable[[str], Share]
    ) -> None:
        self._graph = graph
        self._memories = memories
        self._reserved = reserved
        self._buffers: list[Buffer] = []
        #: Bytes by device that lie in what was reserved.
        self.lent = dict.fromkeys((one.device.name for one in memories), 0)

    def __repr__(self) -> str:
        return f"<Between {self.size_bytes:,} bytes>"

    @property
    def own_bytes(self) -> dict[str, int]:
        """Bytes by device that it took itself."""
        found = dict.fromkeys(self.lent, 0)
        for buffer in self._buffers:
            found[buffer.buffer_type.device.name] += buffer.size_bytes
        return found

    @property
    def lent_bytes(self) -> int:
        """What lies in what was reserved, of all devices."""
        return sum(self.lent.values())

    @property
    def size_bytes(self) -> int:
        """Of all devices."""
        return self.lent_bytes + sum(self.own_bytes.values())

    def place(self, spans: Spans) -> dict[Place, Tensor]:
        """Tensors for values, by device; those whose spans do not meet share bytes. Raises OutOfMemoryError,
        and keeps what it took until `free`."""
        return {
            (value, device): tensor
            for device, here in spans.items()
            for value, tensor in self._place(self._memories[device], here).items()
        }

    def place_arrivals(self, places: Sequence[Place]) -> dict[Place, Tensor]:
        """Tensors that share bytes with nothing, since nobody knows when they are written. As `place`."""
        found: dict[Place, Tensor] = {}
        for value, device in places:
            type, memory = self._graph.type_of(value), self._memories[device]
            self._buffers.append(memory.allocate(memory.alloc_size(type), Usage.COMPUTE))
            found[value, device] = Tensor(type, self._buffers[-1])
        return found

    def _place(self, memory: BufferType, spans: Mapping[int, Span]) -> dict[int, Tensor]:
        arena = plan_between(self._graph, spans, memory)
        chunks = self._chunks(memory, arena.chunk_bytes)
        placed = zip(spans, arena.chunks, arena.offsets, strict=True)
        return {
            value: Tensor(self._graph.type_of(value), chunks[chunk], offset)
            for value, chunk, offset in placed
        }

    def _chunks(self, memory: BufferType, sizes: Sequence[int]) -> list[Buffer]:
        """Buffers of such sizes: the smallest that suffices of what was reserved, or else a new one."""
        device, found = memory.device.name, list[Buffer]()
        fitting = (one for one in self._reserved(device).between if one.buffer_type.name == memory.name)
        offered = sorted(fitting, key=_SIZE)
        for size_bytes in sizes:
            place = bisect_left(offered, size_bytes, key=_SIZE)
            if place < len(offered):
                found.append(offered.pop(place))
                self.lent[device] += size_bytes
            else:
                found.append(memory.allocate(size_bytes, Usage.COMPUTE))
                self._buffers.append(found[-1])
        return found

    def free(self) -> None:
        """Gives its own memory back. Idempotent."""
        for buffer in self._buffers:
            buffer.free()
        self._buffers.clear()
