"""What the blocking and the asyncio API share: everything that does not wait.

The classes here send commands and check arguments; their subclasses in `session`, `plan`, `tensor`,
`stream` (blocking) and `aio` add the methods that wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol, TypeVar

from heliograph._arguments import refuse_pickle
from heliograph._effects import GetMemory, Procedure
from heliograph._outcome import Pending
from heliograph._procedures import Progress, compile_graph
from heliograph._running import PlanSpec
from heliograph.builder import Graph
from heliograph.protocol import ClientCore
from heliograph_proto import commands as c
from heliograph_proto.addresses import Address
from heliograph_proto.description import Capabilities, DeviceInfo, DeviceType, Memory, SessionInfo
from heliograph_proto.errors import (
    InvalidArgumentError,
    UnknownDeviceError,
    UnknownHandleError,
)

T = TypeVar("T")


class Shell(Protocol):
    """What the API needs of a shell to send commands without waiting."""

    address: Address
    info: SessionInfo
    core: ClientCore

    def advance(self, step: Callable[[], T]) -> T:
        """One step of the core, and what follows from it."""

    def release(self, handle: int) -> None:
        """Frees a handle soon; safe in destructors."""


@dataclass(frozen=True, slots=True)
class SessionStatistics:
    """What a session has done so far, at one moment."""

    #: Commands that were sent, those of them that are done, and those that wait for credit.
    sent_commands: int
    completed_commands: int
    queued_commands: int
    #: Bytes that count against Limits.in_flight_bytes.
    in_flight_bytes: int


class Handle:
    """Something of the session that has a handle, and is freed when it is collected."""

    _kind = "handle"

    def __init__(self, shell: Shell, handle: int, *, owned: bool = True) -> None:
        self._shell = shell
        self._handle = handle
        #: Whether freeing it is up to this object, and was not done yet.
        self._owned = owned
        self._freed = False

    def free(self) -> None:
        """Frees it on the server, once earlier commands no longer need it. Idempotent."""
        self._freed = True
        if self._owned:
            self._owned = False
            self._shell.release(self._handle)

    def __reduce__(self) -> NoReturn:
        advice = "pass its elements on: tensor.get()" if self._kind == "tensor" else "make it anew there"
        raise refuse_pickle(self._kind, advice)

    def __del__(self) -> None:
        if getattr(self, "_owned", False):
            self._owned = False
            self._shell.release(self._handle)

    def _used_in(self, shell: Shell) -> int:
        """The handle, for a command of a session. Raises UnknownHandleError."""
        if self._freed:
            raise UnknownHandleError(f"the {self._kind} was freed")
        if shell is not self._shell:
            raise UnknownHandleError(
                f"the {self._kind} belongs to another session", advice="handles are of one session alone"
            )
        return self._handle

    @property
    def _live_handle(self) -> int:
        return self._used_in(self._shell)

    @property
    def _state(self) -> str:
        if self._freed:
            return "freed"
        return "lost" if self._shell.core.lost is not None else "live"


def ask_memory(device: str) -> Procedure[Memory]:
    """A device's memory, now."""
    memory: Memory = yield GetMemory(device)
    return memory


class DeviceBase:
    """A device of the server."""

    def __init__(self, shell: Shell, info: DeviceInfo) -> None:
        self._shell = shell
        self._info = info

    @property
    def name(self) -> str:
        """Unique on the server, such as "cpu0"."""
        return self._info.name

    @property
    def description(self) -> str:
        """For people, such as the processor's model name."""
        return self._info.description

    @property
    def type(self) -> DeviceType:
        """The kind of hardware."""
        return self._info.type

    @property
    def backend(self) -> str:
        """The implementation behind it, such as "cpu"."""
        return self._info.backend

    @property
    def capabilities(self) -> Capabilities:
        """What it can do beyond the minimum."""
        return self._info.capabilities

    def __repr__(self) -> str:
        return f"<Device {self.name} {self.type.name}: {self.description}>"


class EventBase(Handle):
    """A mark in a stream's order."""

    _kind = "event"

    def __init__(self, shell: Shell, handle: int, pending: Pending) -> None:
        super().__init__(shell, handle)
        self._pending = pending

    def done(self) -> bool:
        """Whether it was reached: all before it on its stream is done, or has failed."""
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
        """Makes the stream wait, before its next command, until the event is reached."""
        if not isinstance(event, EventBase):
            raise InvalidArgumentError(
                f"a stream waits for events, not {event!r:.80}", advice="make one: stream.record()"
            )
        number, stream = event._used_in(self._shell), self._live_handle
        self._shell.advance(lambda: self._shell.core.send(c.Wait(number), stream=stream))

    def _record(self, kind: type[EventT]) -> EventT:
        stream, core = self._live_handle, self._shell.core

        def send() -> tuple[int, Pending]:
            handle = core.handle()
            return handle, core.send(c.Record(handle), stream=stream, observed=True)

        return kind(self._shell, *self._shell.advance(send))

    def free(self) -> None:
        """Ends the stream, once its work is done. Idempotent."""
        self._shell.core.streams.discard(self._handle)
        super().free()

    def __del__(self) -> None:
        self._shell.core.streams.discard(self._handle)
        super().__del__()

    def __repr__(self) -> str:
        return f"<Stream on {self.device} {self._state}>"


StreamT = TypeVar("StreamT", bound=StreamBase)
DeviceArgument = DeviceBase | str | None


def make_stream(shell: Shell, device: str, kind: type[StreamT]) -> StreamT:
    """A new stream of a device."""
    core = shell.core

    def send() -> int:
        handle = core.handle()
        core.send(c.CreateStream(handle, device))
        core.streams.add(handle)
        return handle

    return kind(shell, shell.advance(send), device)


class SessionBase:
    """A session's names and counts."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        # Work goes in the order of the default stream, which is one of the URL's device.
        device = device_name(shell, None)
        if device != shell.info.devices[0].name:
            self._stream = make_stream(shell, device, StreamBase)
            shell.core.default_stream = self._stream._handle

    def __reduce__(self) -> NoReturn:
        raise refuse_pickle("session", "connect anew there: hg.connect(session.address)")

    def _compiling(
        self,
        graph: Graph,
        devices: Sequence[DeviceBase | str] | DeviceBase | str | None,
        fusion: bool,
        progress: Progress | None,
    ) -> Procedure[PlanSpec]:
        """Compiles a graph under a new handle."""
        if not isinstance(graph, Graph):
            raise InvalidArgumentError(
                f"compile takes a graph, not {graph!r:.200}",
                advice="name the value as an output, g.output('y', y), and compile its graph: compile(g)",
            )
        core, names = self._shell.core, device_names(self._shell, devices)

        def procedure() -> Procedure[PlanSpec]:
            handle = core.handle()
            info = yield from compile_graph(core, graph, handle, names, fusion, progress)
            return PlanSpec(handle, info, graph.source_of)

        return procedure()

    def _all_streams(self) -> tuple[int, ...]:
        return (c.DEFAULT_STREAM, *sorted(self._shell.core.streams))

    @property
    def address(self) -> str:
        """The URL of the daemon."""
        return str(self._shell.address)

    @property
    def info(self) -> SessionInfo:
        """What the handshake agreed on: version, features, limits, the daemon's incarnation."""
        return self._shell.info

    @property
    def closed(self) -> bool:
        """Whether the session has ended."""
        return self._shell.core.lost is not None

    def statistics(self) -> SessionStatistics:
        """Counts, now."""
        found = self._shell.advance(self._shell.core.statistics)
        return SessionStatistics(
            found.sent_commands, found.completed_commands, found.queued_commands, found.in_flight_bytes
        )

    def __repr__(self) -> str:
        devices = ", ".join(device.name for device in self._shell.info.devices)
        return f"<Session {self.address} {'closed' if self.closed else 'open'}: {devices}>"


def device_name(shell: Shell, device: DeviceArgument) -> str:
    """A device's name; the URL's, or the server's first, for None. Raises UnknownDeviceError."""
    known = [one.name for one in shell.info.devices]
    name = device.name if isinstance(device, DeviceBase) else device or shell.address.device or known[0]
    if name not in known:
        raise UnknownDeviceError(f"no device is named {name!r}", advice=f"there are: {', '.join(known)}")
    return name


def device_names(
    shell: Shell, devices: Sequence[DeviceBase | str] | DeviceBase | str | None
) -> tuple[str, ...]:
    """The names of the devices of a plan, by priority."""
    if devices is None or isinstance(devices, DeviceBase | str):
        return (device_name(shell, devices),)
    if not isinstance(devices, Iterable):
        raise UnknownDeviceError(
            f"{devices!r:.80} is no device", advice="a device, its name, or a sequence of them by priority"
        )
    return tuple(device_name(shell, device) for device in devices)


def stream_handle(shell: Shell, stream: StreamBase | None) -> int | None:
    """The handle of the stream that a command names; None for the session's own."""
    if stream is None:
        return None
    if not isinstance(stream, StreamBase):
        raise InvalidArgumentError(
            f"stream is {stream!r:.80}", advice="make one: session.stream() or session.devices[0].stream()"
        )
    return stream._used_in(shell)
