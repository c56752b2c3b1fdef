"""What an operator sees of a daemon: frozen dataclasses without protobuf, with the fields of admin.proto."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Annotated

from heliograph_proto.devices import DeviceInfo, MemberInfo, Memory
from heliograph_proto.errors import InvalidArgumentError
from heliograph_proto.settings import Kind, Setting
from heliograph_proto.types import MOST

MIB = 2**20
#: The most bytes that one command, or one piece of a content, may have at its place in shared memory.
PLACE_BYTES = 16 * MIB
#: Limits travel in 32 or 64 bits.
MAX_LIMIT = 2**31 - 1


def _limit(says: str, kind: Kind = "plain") -> Setting:
    return Setting(says, least=1, most=MAX_LIMIT, kind=kind)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what one session may send or keep; see Limits in session.proto for each."""

    message_bytes: Annotated[int, _limit("The largest message, encoded.", "size")] = 64 * MIB
    graph_nodes: Annotated[int, _limit("The most nodes in one graph.")] = 250_000
    graph_depth: Annotated[int, _limit("The longest path through a graph, in nodes.")] = 250_000
    tensors: Annotated[int, _limit("The most tensors that may live at once.")] = 100_000
    plans: Annotated[int, _limit("The most plans that may live at once.")] = 1_000
    #: Held for one session, both ways together.
    in_flight_bytes: Annotated[
        int,
        _limit(
            "The most bytes held at once, each: of transfers, of data in commands and results, of graphs "
            "to be compiled.",
            "size",
        ),
    ] = 256 * MIB
    in_flight_commands: Annotated[int, _limit("The most commands that may be unanswered at once.")] = 100_000
    inline_bytes: Annotated[
        int,
        _limit(
            "The most bytes of one tensor that may ride in a command or a completion; larger ones go in "
            "pieces.",
            "size",
        ),
    ] = 256 * 1024
    chunk_bytes: Annotated[int, _limit("The size of such pieces, on calls of their own.", "size")] = 1 * MIB
    attach_timeout_ms: Annotated[
        int,
        _limit("How long a session may be without its command stream after it was opened, in milliseconds."),
    ] = 10_000

    @property
    def piece_bytes(self) -> int:
        """What a client sends as one transfer, so that several fit into in_flight_bytes."""
        return max(1, min(32 * MIB, self.in_flight_bytes // 8))


@dataclass(frozen=True, slots=True)
class SharedMemoryOffer:
    """Where a client asks for memory that both sides map: one of the two is set."""

    #: A name in Linux's abstract namespace.
    abstract_name: str = ""
    #: Appended to the path of the socket by which the client came.
    path_suffix: str = ""


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """What the handshake agreed on."""

    #: The secret that names the session: not for logs.
    session: bytes = field(repr=False)
    version: int
    features: tuple[str, ...]
    limits: Limits
    incarnation: bytes
    server: str
    devices: tuple[DeviceInfo, ...]
    lease_ms: int = 0
    #: None: the server shares no memory with this client.
    shared_memory: SharedMemoryOffer | None = None
    #: Whether devices may come and go: the server is the head of a pool.
    is_head: bool = False
    #: The incarnations of all daemons whose devices are among these, through other heads too.
    daemons: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class PeerTraffic:
    """What has gone between a daemon and others since it started, as it counts it."""

    #: Bytes of tensors that other daemons pulled from it, or that it pushed.
    sent_bytes: int = 0
    #: That it pulled from others, or was pushed.
    received_bytes: int = 0
    sent_values: int = 0
    received_values: int = 0
    #: That it took from one daemon to another, which cannot reach each other.
    relayed_bytes: int = 0
    relayed_values: int = 0
    #: Capabilities that it did not accept.
    refused: int = 0


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of tensors that a session has carried by `set` and `get`, as one side of it counts them."""

    #: Into tensors.
    written_bytes: int = 0
    #: Out of tensors.
    read_bytes: int = 0
    #: Every copy that this side's code made of a byte on its way in, and out; those that gRPC and the kernel
    #: make are not among them.
    copied_in_bytes: int = 0
    copied_out_bytes: int = 0
    #: Of contents, such as weights, that came to this side; and what of them was passed on as it came.
    content_bytes: int = 0
    relayed_bytes: int = 0
    #: What has gone between the server and other daemons, for all sessions together, if it says that.
    peers: PeerTraffic = PeerTraffic()

    def plus(self, other: Traffic) -> Traffic:
        """Both together."""
        return Traffic(
            self.written_bytes + other.written_bytes,
            self.read_bytes + other.read_bytes,
            self.copied_in_bytes + other.copied_in_bytes,
            self.copied_out_bytes + other.copied_out_bytes,
            self.content_bytes + other.content_bytes,
            self.relayed_bytes + other.relayed_bytes,
            self.peers,
        )


def _at_most(says: str, kind: Kind = "plain") -> Setting:
    return Setting(says, least=0, most=MOST, kind=kind)


@dataclass(frozen=True, slots=True)
class Quota:
    """The most that a tenant may have at once, over all its sessions; 0: as much as there is."""

    sessions: Annotated[int, _at_most("Sessions.")] = 0
    plans: Annotated[int, _at_most("Compiled plans.")] = 0
    runs_in_flight: Annotated[int, _at_most("Runs that were asked for and have not ended.")] = 0
    device_memory_bytes: Annotated[
        int, _at_most("Memory, on all devices of the daemon together.", "size")
    ] = 0
    staging_bytes: Annotated[
        int, _at_most("Memory of the host, for transfers and contents on their way.", "size")
    ] = 0
    weight: Annotated[
        float,
        Setting(
            "Its share of a device that others want too: two tenants have time on it as their weights are.",
            least=0.001,
            most=1000,
        ),
    ] = 1.0


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What one tenant has of a host, now. `device_seconds` and `refused` only grow."""

    #: "": the daemon knows no tenants, and everybody is one.
    tenant: str
    sessions: int = 0
    plans: int = 0
    runs_in_flight: int = 0
    #: Of all devices together.
    device_memory_bytes: int = 0
    #: Of the host: transfers and contents on their way.
    staging_bytes: int = 0
    #: For how long it had devices, of all of them together.
    device_seconds: float = 0.0
    #: How often something was refused, because a quota was met.
    refused: int = 0
    #: The most that it may have.
    quota: Quota = field(default_factory=Quota)

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing."""
        counts = self.sessions, self.plans, self.runs_in_flight
        return not any((*counts, self.device_memory_bytes, self.staging_bytes))


#: The most that a drain may take; what is longer is a mistake.
LONGEST_DRAIN_SECONDS = 86_400.0


class DrainState(Enum):
    """Where a daemon is in its life."""

    #: New sessions are welcome.
    SERVING = 1
    #: New sessions are refused; running work goes on.
    DRAINING = 2
    #: New sessions are refused; there are no others.
    DRAINED = 3
    #: It is about to end, which nothing undoes.
    STOPPING = 4


@dataclass(frozen=True, slots=True)
class DrainStatus:
    """Whether a daemon drains, and how far it is."""

    state: DrainState = DrainState.SERVING
    #: While draining: how long running work may still go on.
    remaining_seconds: float = 0.0
    #: While draining: whether the daemon stays afterwards; else it stops.
    stay: bool = False
    #: Sessions that still have work.
    busy_sessions: int = 0


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """One device."""

    name: str
    description: str = ""
    memory: Memory = field(default_factory=Memory)
    #: For how long somebody of this daemon computed on it, since the daemon started.
    busy_seconds: float = 0.0
    #: Of the time since the snapshot before, the share in which somebody computed: 0 to 1.
    busy_share: float = 0.0
    #: Why it is lost; empty unless it is.
    lost: str = ""


@dataclass(frozen=True, slots=True)
class SessionStatus:
    """One session."""

    #: Counts the sessions of the daemon: its name for operators and logs, and no secret.
    number: int
    tenant: str = ""
    #: The name of the token or certificate by which it came; empty: none was asked for.
    credential: str = ""
    #: What the client says it is.
    client: str = ""
    age_seconds: float = 0.0
    #: Whether its command stream came.
    attached: bool = False
    #: So far.
    commands: int = 0
    commands_in_flight: int = 0
    #: Of these, runs of plans.
    runs_in_flight: int = 0
    plans: int = 0
    tensors: int = 0
    #: Of devices, by its tensors, plans and weights.
    device_bytes: int = 0
    #: Of the host, on their way.
    staged_bytes: int = 0
    #: Of tensors and weights, so far.
    received_bytes: int = 0
    sent_bytes: int = 0
    commands_per_second: float = 0.0
    received_bytes_per_second: float = 0.0
    sent_bytes_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a daemon has and does, at one moment. Rates and shares are those since the snapshot before."""

    #: Program and version.
    server: str
    #: Another one means that the daemon was restarted.
    incarnation: bytes = b""
    uptime_seconds: float = 0.0
    drain: DrainStatus = field(default_factory=DrainStatus)
    devices: tuple[DeviceStatus, ...] = ()
    sessions: tuple[SessionStatus, ...] = ()
    tenants: tuple[TenantUsage, ...] = ()
    #: Of the server's pool; none unless it is the head of one.
    members: tuple[MemberInfo, ...] = ()
    log_level: str = ""


#: From the least one.
LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class LogLine:
    """One event."""

    #: Seconds since 1970.
    time: float
    #: One of LEVELS.
    level: str
    #: Which part of the server says it.
    logger: str
    message: str
    #: The sequence number of the command that it is about; 0: none.
    run: int = 0
    #: The id of the command's trace; "": none.
    trace: str = ""
    #: How many lines before it are missing, since nobody read them in time.
    dropped: int = 0


def check_level(level: str) -> str:
    """The level. Raises InvalidArgumentError for one that there is not."""
    if level not in LEVELS:
        levels = ", ".join(LEVELS)
        raise InvalidArgumentError(f"there is no level {level!r:.40}", advice=f"take one of {levels}")
    return level


def after_dropped(lines: Sequence[LogLine], dropped: int) -> list[LogLine]:
    """Lines of which the first says how many before it were dropped."""
    return [replace(one, dropped=0 if number else dropped) for number, one in enumerate(lines)]
