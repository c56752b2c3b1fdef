"""The measurements of `heliograph doctor`: frozen values, from which findings are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from heliograph.cli.common.text import usable
from heliograph_proto.devices import Link


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """Times from a request to its answer, in seconds."""

    median_seconds: float
    p90_seconds: float
    samples: int


@dataclass(frozen=True, slots=True)
class Rate:
    """Consecutive transfers of one size: the median of their times, round trip included."""

    size_bytes: int
    seconds: float
    transfers: int

    @property
    def bytes_per_second(self) -> float:
        """The rate; 0 if the numbers make no sense."""
        return self.size_bytes / self.seconds if usable(self.size_bytes) and usable(self.seconds) else 0.0


@dataclass(frozen=True, slots=True)
class Copies:
    """The copies of each byte by the code of each side; None: nothing was carried."""

    client: float | None = None
    server: float | None = None


@dataclass(frozen=True, slots=True)
class Direction:
    """One direction of a transport."""

    rate: Rate
    copies: Copies = Copies()


class TransportKind(Enum):
    """A transport of bytes."""

    GRPC = "gRPC"
    DIRECT = "direct connections"
    SHARED = "shared memory"
    MAPPED = "mapped tensor"
    LOCAL = "this process"


@dataclass(frozen=True, slots=True)
class PathMeasurement:
    """A transport to the server (up) and back (down); None if it could not be measured."""

    kind: TransportKind
    up: Direction | None = None
    down: Direction | None = None
    #: Why there is no such transport, or why it could not be measured.
    why_not: str = ""

    @property
    def best(self) -> float:
        """The rate of the faster direction, in bytes a second; 0 if none was measured."""
        return max((one.rate.bytes_per_second for one in (self.up, self.down) if one), default=0.0)


@dataclass(frozen=True, slots=True)
class DeviceSeen:
    """A device of the server."""

    name: str
    type: str
    backend: str
    description: str
    free_bytes: int = 0
    #: 0: not reported.
    total_bytes: int = 0
    features: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SideFacts:
    """The client's or the server's description of itself."""

    #: Program and version.
    program: str
    #: Named facts (ListDevicesResponse.facts); empty if they are not reported.
    facts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class MemberSeen:
    """A member of the server's pool, as the head reports it and as this client reaches it."""

    name: str
    #: The address at which the head reaches it.
    address: str
    #: "joining", "ready", "away", "draining" or "lost".
    state: str
    #: Why it is not ready, and what to do.
    why: str = ""
    advice: str = ""
    devices: tuple[str, ...] = ()
    #: Program and version; empty if unknown.
    server: str = ""
    #: True if this client reaches it, so that weights go straight to it; None: not tried.
    reached: bool | None = None
    why_not_reached: str = ""
    #: The round trip of an empty command from this client; 0: not measured.
    round_trip_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PoolSeen:
    """The members and links of a pool."""

    members: tuple[MemberSeen, ...]
    #: From the head to its members, and between members.
    links: tuple[Link, ...] = ()
    #: True if the head is this process.
    in_process: bool = False


@dataclass(frozen=True, slots=True)
class MachineRates:
    """The rates of the client's machine itself, in bytes a second; 0: not measured."""

    #: A copy in memory, by one thread.
    copy: float = 0.0
    #: TCP on the loopback interface, and a unix socket, without gRPC.
    tcp: float = 0.0
    unix: float = 0.0


@dataclass(frozen=True, slots=True)
class TransportMeasurements:
    """All measurements of a connection."""

    url: str
    #: True if the server is this process.
    in_process: bool
    #: True if the address is one of this host; a tunnel may lead from it to another host.
    local_address: bool
    client: SideFacts
    server: SideFacts
    #: The time to open a session.
    connect_seconds: float
    #: The round trips of an empty command, and of a run of a plan with one op, 64 bytes in and out.
    empty: RoundTrip
    run: RoundTrip
    transports: tuple[PathMeasurement, ...]
    #: The most bytes of one message of a transfer.
    chunk_bytes: int
    shared_memory: bool
    #: Why tensors do not go through shared memory; empty if they do.
    why_not_shared: str
    #: Why commands do not go over a unix socket; empty if they do.
    why_no_command_socket: str
    version: int
    #: Optional features that both sides support, and those of this client that the server does not.
    features: tuple[str, ...]
    missing_features: tuple[str, ...]
    devices: tuple[DeviceSeen, ...]
    #: None: the server is not the head of a pool.
    pool: PoolSeen | None = None
    #: None: the server is on another host, where these rates say nothing.
    machine: MachineRates | None = None

    def transport(self, kind: TransportKind) -> PathMeasurement | None:
        """The transport of this kind, if at least one direction was measured."""
        return next((one for one in self.transports if one.kind is kind and (one.up or one.down)), None)
