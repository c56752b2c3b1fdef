"""The buffers and graphs of a connection, in its session. One thread."""

from __future__ import annotations

import logging
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Set
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

from heliograph_proto import commands as c
from heliograph_proto.devices import DeviceType, Usage, rounds_rows
from heliograph_proto.errors import HeliographError
from heliograph_proto.types import TensorType
from heliograph_server.gateways.ggml_rpc import wire
from heliograph_server.gateways.ggml_rpc.buffers import Buffer, Buffers, RefusedError
from heliograph_server.gateways.ggml_rpc.graphs import BoundGraph, bound_graphs, steps_of, written_by
from heliograph_server.gateways.ggml_rpc.session import NODE_BYTES, GatewaySession, Memory
from heliograph_server.gateways.ggml_rpc.tracing import Region

logger = logging.getLogger(__name__)

#: The most tensors of a graph, buffers of a connection, graphs that a client may compute again (a
#: number of the protocol), and graphs that stay compiled.
MOST_TENSORS = 65_536
MOST_BUFFERS = 4_096
MOST_UIDS = 1_024
MOST_COMPILED = 64
#: The most places of writes that are known by their description.
MOST_PLACES = 256
#: The most bytes of messages, packed, from which graphs are compiled again.
MOST_KEPT_BYTES = 128 * 2**20


@dataclass(slots=True)
class _Run:
    """A plan, and what happens to its outputs."""

    command: c.RunCommand
    #: From the outputs that are written apart to their places.
    copies: tuple[c.CopyTensor, ...]
    #: Freed with it.
    handles: tuple[int, ...]


@dataclass(slots=True)
class _KnownGraph:
    """A graph that was computed."""

    packed: bytes
    #: Buffers that it uses.
    buffers: frozenset[int] = frozenset()
    #: None: it is compiled again when it is needed.
    runs: tuple[_Run, ...] | None = None


class RpcDevice:
    """The devices of a connection as ggml's protocol has them."""

    def __init__(self, session: GatewaySession, version: wire.Version, activations: str = "auto") -> None:
        """`activations`: as the setting `ggml_rpc_activations`."""
        self._session = session
        types = [one.type for one in session.info.devices]
        self._on_cpus = frozenset(number for number, one in enumerate(types) if one is DeviceType.CPU)
        #: The devices whose products with blocks round their rows.
        self._rounding = frozenset(
            number for number, one in enumerate(types) if rounds_rows(activations, [one])
        )
        self._version = version
        self.names = session.device_names
        self._buffers = Buffers()
        #: The session's memory of each buffer.
        self._memory: dict[int, Memory] = {}
        #: The buffers that graphs have written, and those whose memory is weights of graphs.
        self._written: set[int] = set()
        self._ordered: set[int] = set()
        self._graphs: OrderedDict[bytes, _KnownGraph] = OrderedDict()
        #: The digest of the graph of each (device, uid).
        self._uids: dict[tuple[int, int], bytes] = {}
        self._kept_bytes = 0
        #: The places of the last writes, by their description; a freed buffer empties it.
        self._places: dict[tuple[bytes, int], tuple[Buffer, int]] = {}

    def check_device(self, device: int) -> str:
        """Return the name of a device. Raises RefusedError."""
        if device >= len(self.names):
            raise RefusedError(f"there is no device {device}; there are {len(self.names)}")
        return self.names[device]

    def flush(self) -> None:
        """Submit what was sent so far, but writes that a graph or a read may follow. Raises the
        error of earlier commands."""
        self._session.flush_work()

    # Buffers

    def allocate(self, device: int, size: int) -> tuple[int, int]:
        """Return the handle of a new buffer and its size; zeros if there is no memory."""
        name = self.check_device(device)
        if len(self._buffers) >= MOST_BUFFERS:
            raise RefusedError(f"more than {MOST_BUFFERS:,} buffers")
        if size >= 1 << 61:
            return 0, 0
        made = self._session.allocate(name, size)
        if isinstance(made, HeliographError):
            logger.info("no memory for a buffer of %d bytes: %s", size, made.message)
            return 0, 0
        buffer = self._buffers.add(device, size)
        self._memory[buffer.handle] = made
        return buffer.handle, size

    def base(self, handle: int) -> int:
        return self._buffers.get(handle).base

    def free(self, handle: int) -> None:
        """Free a buffer, and the graphs that use it."""
        self._buffers.remove(handle)
        for known in self._graphs.values():
            if handle in known.buffers:
                self._release(known)
        self._session.free(*self._memory.pop(handle))
        self._places.clear()
        self._written.discard(handle)
        self._ordered.discard(handle)

    def clear(self, handle: int, value: int) -> None:
        buffer = self._buffers.get(handle)
        self._session.send(c.Memset(self._memory[handle].bytes, 0, buffer.size, value))

    def memset(self, found: wire.Range) -> None:
        buffer, offset = self._buffers.part(found.tensor, found.offset, found.size)
        self._session.send(c.Memset(self._memory[buffer.handle].bytes, offset, found.size, found.value))

    def check_tensor(self, tensor: wire.Tensor) -> None:
        """Check that a tensor lies in its buffer. Raises RefusedError."""
        self._buffers.place(tensor)

    def part(self, tensor: wire.Tensor, offset: int, size: int) -> tuple[Buffer, int]:
        """Return the place of bytes of a tensor. Raises RefusedError."""
        return self._buffers.part(tensor, offset, size)

    def place_of(self, head: memoryview, size: int) -> tuple[Buffer, int]:
        """Return the place of the bytes of a SET_TENSOR. Raises WireError, RefusedError.

        The inputs of a graph that is computed again have the descriptions that they had before.
        """
        key = bytes(head), size
        if (found := self._places.get(key)) is None:
            if len(self._places) >= MOST_PLACES:
                self._places.clear()
            found = self._places[key] = self.part(*wire.set_tensor(head), size)
        return found

    def set(self, buffer: Buffer, offset: int, data: bytearray) -> None:
        """Write a piece."""
        self._session.set(self._memory[buffer.handle].bytes, offset, data)

    @property
    def piece_bytes(self) -> int:
        return self._session.piece_bytes

    def get(self, found: wire.Range) -> Iterator[c.Bytes]:
        """Return bytes of a tensor, in pieces. Checks first; raises RefusedError."""
        buffer, offset = self._buffers.part(found.tensor, found.offset, found.size)
        return self._pieces(self._memory[buffer.handle].bytes, offset, found.size)

    def _pieces(self, memory: int, offset: int, size: int) -> Iterator[c.Bytes]:
        for start in range(0, size, self.piece_bytes):
            yield self._session.get(memory, offset + start, min(self.piece_bytes, size - start))

    def get_pieces(self, found: wire.Pieces) -> Iterator[c.Bytes]:
        """Return bytes of a tensor, in pieces. Checks first; raises RefusedError."""
        places = self.places(found)
        return (
            piece
            for buffer, offset, size in places
            for piece in self._pieces(self._memory[buffer.handle].bytes, offset, size)
        )

    def places(self, found: wire.Pieces) -> Iterator[tuple[Buffer, int, int]]:
        """Return buffer, offset and size of each piece. Checks first; raises RefusedError."""
        size, number, stride = found.size, found.number, found.stride
        if not number or not size or (number > 1 and stride < size):
            raise RefusedError(f"{number} pieces of {size} bytes, {stride} apart")
        buffer, offset = self._buffers.part(found.tensor, found.offset, (number - 1) * stride + size)
        if stride == size:
            size, number = size * number, 1
        return ((buffer, offset + place * stride, size) for place in range(number))

    def copy(self, source: wire.Tensor, destination: wire.Tensor) -> bool:
        """Copy a tensor. False if the client shall do it."""
        start, to = self._buffers.place(source), self._buffers.place(destination)
        if start.span != to.span:
            raise RefusedError(f"a copy of {start.span:,} bytes to {to.span:,}")
        if not (start.is_contiguous and to.is_contiguous) or not start.span:
            return not start.span
        return self._session.copy(
            self._memory[start.buffer.handle].bytes, start.offset,
            self._memory[to.buffer.handle].bytes, to.offset, start.span,
        )  # fmt: skip

    # Graphs

    def compute(self, payload: memoryview) -> None:
        """Compute a graph. Raises WireError, RefusedError, or the error of its compile."""
        first = 12 if self._version.has_uids else 4
        digest = blake2b(payload[:4], digest_size=16)
        digest.update(payload[first:])
        key = digest.digest()
        known = self._graphs.get(key)
        device, uid = self._head(payload)
        if known is None:
            known = _KnownGraph(zlib.compress(payload, 1))
            self._kept_bytes += len(known.packed)
            if self._kept_bytes > MOST_KEPT_BYTES:
                raise RefusedError(f"more than {MOST_KEPT_BYTES:,} bytes of graphs")
            self._graphs[key] = known
        self._run(key, known, payload)
        if uid or not self._version.has_uids:
            self._remember(device, uid, key)
        self._forget_unnamed()

    def _head(self, payload: memoryview) -> tuple[int, int]:
        if payload.nbytes < 16:
            raise wire.WireError(f"a graph of {payload.nbytes} bytes")
        device = int.from_bytes(payload[:4], "little")
        return device, int.from_bytes(payload[4:12], "little") if self._version.has_uids else 0

    def _remember(self, device: int, uid: int, key: bytes) -> None:
        mine = [one for one in self._uids if one[0] == device]
        if (device, uid) not in self._uids and len(mine) >= MOST_UIDS:
            for one in mine:
                del self._uids[one]
        self._uids[device, uid] = key

    def _forget_unnamed(self) -> None:
        """Forget the oldest graphs that cannot be asked for again, and release what was compiled of
        others."""
        if len(self._graphs) <= MOST_COMPILED:
            return
        named = set(self._uids.values())
        for key, known in list(self._graphs.items())[: len(self._graphs) - MOST_COMPILED]:
            self._release(known)
            if key not in named:
                self._kept_bytes -= len(known.packed)
                del self._graphs[key]

    def recompute(self, device: int, uid: int) -> None:
        """Compute a graph again. Raises RefusedError."""
        key = self._uids.get((device, uid))
        if key is None:
            raise RefusedError(f"there is no graph {uid} of device {device}")
        self._run(key, self._graphs[key], None)

    def _run(self, key: bytes, known: _KnownGraph, payload: memoryview | None) -> None:
        if known.runs is None:
            message = memoryview(zlib.decompress(known.packed)) if payload is None else payload
            self._compile(known, wire.graph(message, self._version, MOST_TENSORS))
        self._graphs.move_to_end(key)
        assert known.runs is not None
        for one in known.runs:
            self._session.run(one.command, one.copies)

    def _compile(self, known: _KnownGraph, message: wire.GraphMessage) -> None:
        name = self.check_device(message.device)
        size_bytes = NODE_BYTES * len(message.nodes)
        found, written = self._session.in_turn(size_bytes, partial(self._bound, message))
        self._settle(written, frozenset[int]().union(*(one.weights for one in found)))
        used: set[int] = set()
        runs: list[_Run] = []
        try:
            for one in found:
                runs.append(self._loaded(one, name))
                regions = [*one.leaves.values(), *one.copied.values()]
                used.update(region.buffer for region, _ in regions)
        except BaseException:
            for run in runs:
                self._session.free(*run.handles)
            raise
        known.runs, known.buffers = tuple(runs), frozenset(used)

    def _bound(self, message: wire.GraphMessage) -> tuple[list[BoundGraph], Set[int]]:
        """Return the graphs of ours, and the buffers that they write. Raises RefusedError."""
        steps = steps_of(message, self._buffers)
        written = written_by(steps)
        rounds_rows = message.device in self._rounding
        known = self._written | written if message.device in self._on_cpus else None
        return bound_graphs(steps, rounds_rows=rounds_rows, written=known), written

    def _settle(self, written: Set[int], weights: Set[int]) -> None:
        """Note which buffers a new graph writes, and which have its weights.

        A device may keep weights in an order of its own, as long as no graph writes their buffer.
        Graphs that know it otherwise are compiled again.
        """
        news = weights - self._ordered
        # Graphs that read such a buffer as it was may have copies in the client's order.
        changed = news | ((written - self._written) & self._ordered)
        for known in self._graphs.values():
            if known.buffers & changed:
                self._release(known)
        self._written |= written
        self._ordered |= weights
        for handle in news:
            self._session.send(c.SetUsage(self._memory[handle].buffer, Usage.WEIGHTS))

    def _loaded(self, found: BoundGraph, device: str) -> _Run:
        bindings = {leaf: self._view(*where) for leaf, where in found.leaves.items()}
        plan = self._session.compile(found.graph, bindings, device)
        outputs, copies = [], []
        for place, (region, type) in found.copied.items():
            apart, target = self._session.handle(), self._view(region, type)
            self._session.send(c.Allocate(apart, type, device))
            outputs.append(c.OutputBinding(place, into=apart))
            copies.append(c.CopyTensor(apart, target))
        handles = (
            plan, *bindings.values(), *(one.source for one in copies), *(one.destination for one in copies)
        )  # fmt: skip
        return _Run(c.RunCommand(plan, (), tuple(outputs)), tuple(copies), handles)

    def _view(self, region: Region, type: TensorType) -> int:
        return self._session.view(self._memory[region.buffer].bytes, region.start, type)

    def _release(self, known: _KnownGraph) -> None:
        for run in known.runs or ():
            self._session.free(*run.handles)
        known.runs = None
