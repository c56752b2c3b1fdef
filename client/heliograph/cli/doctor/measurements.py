"""The measurements of `heliograph doctor`: frozen numbers, from which findings are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from heliograph.cli.common.text import usable
from heliograph_proto.devices import Link


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """Times from a question to its answer, in seconds."""

    median_seconds: float
    p90_seconds: float
    samples: int


@dataclass(frozen=True, slots=True)
class Rate:
    """Transfers of one size, one after another: the median of their times, round trip included."""

    size_bytes: int
    seconds: float
    transfers: int

    @property
    def bytes_per_second(self) -> float:
        """0 where the numbers make no sense."""
        return self.size_bytes / self.seconds if usable(self.size_bytes) and usable(self.seconds) else 0.0


@dataclass(frozen=True, slots=True)
class Copies:
    """How often each byte was copied by the code of each side; None: nothing was carried."""

    client: float | None = None
    server: float | None = None


@dataclass(frozen=True, slots=True)
class Direction:
    """One way of a transport."""

    rate: Rate
    copies: Copies = Copies()


class TransportKind(Enum):
    """By which transport bytes go."""

    GRPC = "gRPC"
    SHARED = "shared memory"
    MAPPED = "mapped tensor"
    LOCAL = "this process"


@dataclass(frozen=True, slots=True)
class PathMeasurement:
    """A transport, to the server (up) and back (down); None where it could not be measured."""

    kind: TransportKind
    up: Direction | None = None
    down: Direction | None = None
    #: Why there is no such transport, or why it could not be measured, in words.
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class DeviceSeen:
    """A device of the server."""

    name: str
    type: str
    backend: str
    description: str
    free_bytes: int = 0
    #: 0: it does not tell.
    total_bytes: int = 0
    features: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SideFacts:
    """What one side is."""

    #: Program and version.
    program: str
    #: Named facts (ListDevicesResponse.facts); empty where they are not told.
    facts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class MemberSeen:
    """A member of the server's pool: what the head tells of it, and whether this client reaches it."""

    name: str
    #: Where the head reaches it.
    address: str
    #: "joining", "ready" or "lost".
    state: str
    #: Unless it is ready: why not, and what to do, in words.
    why: str = ""
    advice: str = ""
    devices: tuple[str, ...] = ()
    #: Program and version; empty where that is not known.
    server: str = ""
    #: Whether this client reaches it, so that weights go straight to it; None: nobody tried.
    reached: bool | None = None
    why_not_reached: str = ""
    #: Of an empty command from this client; 0: not measured.
    round_trip_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PoolSeen:
    """What is behind the head of a pool."""

    members: tuple[MemberSeen, ...]
    #: From the head to its members, and between these.
    links: tuple[Link, ...] = ()
    #: Whether the head is this process.
    in_process: bool = False


@dataclass(frozen=True, slots=True)
class TransportMeasurements:
    """All of them."""

    url: str
    #: Whether the server is this process.
    in_process: bool
    #: Whether the address is one of this host; another one's may stand behind it, through a tunnel.
    local_address: bool
    client: SideFacts
    server: SideFacts
    #: From nothing to a session.
    connect_seconds: float
    #: Of an empty command, and of a run of a plan with one op, 64 bytes in and out.
    empty: RoundTrip
    run: RoundTrip
    transports: tuple[PathMeasurement, ...]
    #: The most bytes of one message of a transfer.
    chunk_bytes: int
    shared_memory: bool
    #: Why tensors do not go through shared memory; empty if they do.
    why_not_shared: str
    version: int
    #: Optional features that both sides speak, and those of this client that the server does not.
    features: tuple[str, ...]
    missing_features: tuple[str, ...]
    devices: tuple[DeviceSeen, ...]
    #: None: the server is no head of a pool.
    pool: PoolSeen | None = None

    def transport(self, kind: TransportKind) -> PathMeasurement | None:
        """A transport that was measured, at least one way."""
        return next((one for one in self.transports if one.kind is kind and (one.up or one.down)), None)
