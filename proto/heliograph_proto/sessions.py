"""Sessions, limits, quotas and the status of a daemon, as frozen dataclasses.

session.proto and admin.proto document the fields.
"""

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
#: The maximum bytes in shared memory for one command, or for one piece of a content.
PLACE_BYTES = 16 * MIB
#: Limits travel in 32 or 64 bits.
MAX_LIMIT = 2**31 - 1


def _limit(says: str, kind: Kind = "plain") -> Setting:
    return Setting(says, least=1, most=MAX_LIMIT, kind=kind)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what one session may send or keep, documented as Limits in session.proto."""

    message_bytes: Annotated[int, _limit("The largest message, encoded.", "size")] = 4 * MIB
    graph_bytes: Annotated[
        int,
        _limit("The largest request with a graph, encoded; it goes in several messages.", "size"),
    ] = 64 * MIB
    graph_nodes: Annotated[int, _limit("The maximum nodes in one graph.")] = 250_000
    graph_depth: Annotated[int, _limit("The longest path through a graph, in nodes.")] = 250_000
    tensors: Annotated[int, _limit("The maximum tensors at once.")] = 100_000
    plans: Annotated[int, _limit("The maximum plans at once.")] = 1_000
    #: Held for one session, in both directions together.
    in_flight_bytes: Annotated[
        int,
        _limit(
            "The maximum bytes held at once for each of: transfers, data in commands and results, "
            "graphs to compile.",
            "size",
        ),
    ] = 256 * MIB
    in_flight_commands: Annotated[int, _limit("The maximum unanswered commands at once.")] = 100_000
    inline_bytes: Annotated[
        int,
        _limit(
            "The maximum bytes of a tensor inside a command or a completion; larger ones go in pieces.",
            "size",
        ),
    ] = 256 * 1024
    chunk_bytes: Annotated[int, _limit("The size of such pieces.", "size")] = 1 * MIB
    attach_timeout_ms: Annotated[
        int,
        _limit("The time to attach the command stream after a session opens, in milliseconds."),
    ] = 10_000
    upload_idle_ms: Annotated[
        int,
        _limit(
            "The time without bytes of an upload after which it ends, and twice which its command waits for "
            "it, in milliseconds."
        ),
    ] = 60_000
    calls: Annotated[int, _limit("The maximum calls at once.")] = 2_000

    @property
    def decoded_bytes(self) -> int:
        """The maximum memory of one decoded request."""
        return max(1536 * self.graph_nodes, 16 * MIB)

    @property
    def most_request_bytes(self) -> int:
        """The maximum memory of the requests of a session that come or wait: one of the largest,
        decoded, at least."""
        return max(self.in_flight_bytes, self.graph_bytes + self.decoded_bytes)

    @property
    def piece_bytes(self) -> int:
        """The maximum bytes of one transfer of a client: several fit into in_flight_bytes."""
        return max(1, min(32 * MIB, self.in_flight_bytes // 8))


@dataclass(frozen=True, slots=True)
class SharedMemoryOffer:
    """The socket from which a client gets memory that both sides map. One field is set."""

    #: A name in Linux's abstract namespace.
    abstract_name: str = ""
    #: A suffix of the path of the socket to which the client connected.
    path_suffix: str = ""


@dataclass(frozen=True, slots=True)
class DirectOffer:
    """The port of a session's connections beside gRPC's, and what each side shows the other there."""

    port: int
    #: Secrets of the session; must not be logged.
    ticket: bytes = field(repr=False)
    proof: bytes = field(repr=False)
    #: The ports at which the server takes gRPC.
    own_ports: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Offers:
    """A daemon's offers of ways for commands and bytes beside gRPC, to one client."""

    shared_memory: SharedMemoryOffer | None = None
    direct: DirectOffer | None = None


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """The result of the handshake."""

    #: The secret that names the session; must not be logged.
    session: bytes = field(repr=False)
    version: int
    features: tuple[str, ...]
    limits: Limits
    incarnation: bytes
    server: str
    devices: tuple[DeviceInfo, ...]
    #: None: the server shares no memory with this client.
    shared_memory: SharedMemoryOffer | None = None
    #: True if the server is the head of a pool, whose devices may appear and disappear.
    is_head: bool = False
    #: The incarnations of all daemons behind these devices, including those behind other heads.
    daemons: tuple[bytes, ...] = ()
    #: None: the server takes no other connections of this session.
    direct: DirectOffer | None = None
    #: The time for which it outlives a broken connection; 0: not at all.
    lease_ms: int = 0
    #: True if snapshots of the session are taken.
    durable: bool = False

    @property
    def lease_seconds(self) -> float:
        """The lease in seconds."""
        return self.lease_ms / 1e3


@dataclass(frozen=True, slots=True)
class SessionSnapshot:
    """A snapshot of a session on the server's disk."""

    #: The last command whose effects it has.
    sequence: int
    #: The bytes of the session's tensors and weights.
    size_bytes: int
    #: Those of them that were written, since they were not on disk.
    written_bytes: int
    #: The time that it took, in seconds.
    seconds: float
    #: The part of that time for which no command began.
    still_seconds: float
    #: The digest of the image, which names the snapshot.
    digest: bytes


@dataclass(frozen=True, slots=True)
class SessionMove:
    """A session that went to another daemon."""

    #: The last command whose effects it has.
    sequence: int
    #: The bytes of the session's tensors and weights.
    size_bytes: int
    #: The bytes that were sent: those of them that the other daemon did not have, and graphs.
    sent_bytes: int
    #: The time for which no command began, in seconds.
    still_seconds: float


@dataclass(frozen=True, slots=True)
class WantedBytes:
    """The bytes of a buffer that an earlier session may have."""

    #: The handle of the buffer, if they are found.
    buffer: int
    size_bytes: int
    #: The size of each piece but the last.
    piece_bytes: int
    #: The digest of each piece, in order.
    digests: tuple[bytes, ...]
    #: Empty for any device.
    device: str = ""


@dataclass(frozen=True, slots=True)
class TakenBytes:
    """A buffer with wanted bytes."""

    buffer: int
    device: str
    buffer_type: str


@dataclass(frozen=True, slots=True)
class PeerTraffic:
    """The traffic between a daemon and other daemons since it started, as it counts it."""

    #: Bytes of tensors that other daemons pulled from it, or that it pushed.
    sent_bytes: int = 0
    #: Bytes of tensors that it pulled from others, or that they pushed.
    received_bytes: int = 0
    sent_values: int = 0
    received_values: int = 0
    #: Bytes of tensors that it relayed between daemons that cannot reach each other.
    relayed_bytes: int = 0
    relayed_values: int = 0
    #: Rejected capabilities.
    refused: int = 0


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of tensors transferred by `set` and `get` in a session, as one side counts them."""

    #: Into tensors.
    written_bytes: int = 0
    #: Out of tensors.
    read_bytes: int = 0
    #: Every copy of a byte that this side's code made, inbound and outbound; copies by gRPC and the
    #: kernel are not counted.
    copied_in_bytes: int = 0
    copied_out_bytes: int = 0
    #: Contents, such as weights, that this side received; and the part that it forwarded unchanged.
    content_bytes: int = 0
    relayed_bytes: int = 0
    #: The server's traffic with other daemons, of all sessions together, if it reports that.
    peers: PeerTraffic = PeerTraffic()

    def plus(self, other: Traffic) -> Traffic:
        """Return the sum; `peers` are those of `self`."""
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
    """The maximum that a tenant may have at once, over all its sessions; 0: unlimited."""

    sessions: Annotated[int, _at_most("Sessions.")] = 64
    plans: Annotated[int, _at_most("Compiled plans.")] = 0
    runs_in_flight: Annotated[int, _at_most("Runs that were requested and have not ended.")] = 0
    device_memory_bytes: Annotated[int, _at_most("Memory on all devices of the daemon together.", "size")] = 0
    staging_bytes: Annotated[
        int,
        _at_most(
            "Host memory for transfers, contents, and data in commands, results and loops, in flight; "
            "0: half of `staging_size`.",
            "size",
        ),
    ] = 0
    calls: Annotated[int, _at_most("Calls that have not ended.")] = 4_096
    kept_state_bytes: Annotated[
        int,
        _at_most(
            "Memory for the state of its daemons that this one keeps; 0: all of `kept_state_size`.", "size"
        ),
    ] = 0
    weight: Annotated[
        float,
        Setting(
            "Its share of contended devices: tenants get device time in proportion to their weights.",
            least=0.001,
            most=1000,
        ),
    ] = 1.0


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """The current usage of one tenant. `device_seconds` and `refused` only grow."""

    #: "": the daemon has no tenants configured, and all clients share one.
    tenant: str
    sessions: int = 0
    plans: int = 0
    runs_in_flight: int = 0
    #: On all devices together.
    device_memory_bytes: int = 0
    #: Host memory for transfers and contents in flight.
    staging_bytes: int = 0
    #: Calls that have not ended.
    calls: int = 0
    #: Device time, summed over all devices.
    device_seconds: float = 0.0
    #: Requests refused because of a quota.
    refused: int = 0
    quota: Quota = field(default_factory=Quota)

    @property
    def is_idle(self) -> bool:
        """True if the tenant holds nothing."""
        counts = self.sessions, self.plans, self.runs_in_flight
        return not any((*counts, self.device_memory_bytes, self.staging_bytes))


#: The maximum lease of a session.
LONGEST_LEASE_SECONDS = 86_400.0
#: The maximum duration of a drain; a longer one is a mistake.
LONGEST_DRAIN_SECONDS = 86_400.0


class DrainState(Enum):
    """The state of a daemon."""

    #: New sessions are accepted.
    SERVING = 1
    #: New sessions are refused; running work continues.
    DRAINING = 2
    #: New sessions are refused; none is left.
    DRAINED = 3
    #: It is about to exit, irrevocably.
    STOPPING = 4


@dataclass(frozen=True, slots=True)
class SessionOutcome:
    """The outcome for a session that was to move to another daemon."""

    number: int
    client: str
    #: True if the other daemon has it.
    moved: bool
    #: Otherwise why not, so far.
    why: str = ""


@dataclass(frozen=True, slots=True)
class StayingSession:
    """A session of a head whose values stay on a daemon that drains."""

    #: Its number at the head.
    number: int
    client: str
    #: Why they stay, so far.
    why: str
    #: True if no other device can take them, so that the daemon need not wait.
    final: bool = False


@dataclass(frozen=True, slots=True)
class DrainStatus:
    """The progress of a daemon's drain."""

    state: DrainState = DrainState.SERVING
    #: While draining: the time left for running work.
    remaining_seconds: float = 0.0
    #: While draining: True if the daemon keeps running afterwards; else it stops.
    stay: bool = False
    #: Sessions with running work, or with a command in the last second.
    busy_sessions: int = 0
    #: Once the drain is over: sessions whose work did not end in time and was interrupted.
    interrupted_sessions: int = 0
    #: The daemon's process: its id in its own PID namespace, and its start in clock ticks since the
    #: start of the system (0: not known).
    process: int = 0
    process_started: int = 0
    #: If sessions were to move to another daemon: the outcome for each, by number.
    moves: tuple[SessionOutcome, ...] = ()
    #: The sessions of heads whose values stay here so far, and why.
    staying: tuple[StayingSession, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """The status of a device."""

    name: str
    description: str = ""
    memory: Memory = field(default_factory=Memory)
    #: The time it was busy with this daemon's work, since the daemon started.
    busy_seconds: float = 0.0
    #: The share of the time since the previous snapshot in which it was busy: 0 to 1.
    busy_share: float = 0.0
    #: The reason why it is lost; empty unless it is.
    lost: str = ""


@dataclass(frozen=True, slots=True)
class SessionStatus:
    """The status of a session."""

    #: Its number on the daemon, for operators and logs; not a secret.
    number: int
    tenant: str = ""
    #: The name of its token or certificate; empty if the daemon requires none.
    credential: str = ""
    #: The client's own description.
    client: str = ""
    age_seconds: float = 0.0
    #: True if its command stream is attached.
    attached: bool = False
    #: Since it opened.
    commands: int = 0
    commands_in_flight: int = 0
    #: Of these, runs of plans.
    runs_in_flight: int = 0
    plans: int = 0
    tensors: int = 0
    #: Device memory of its tensors, plans and weights.
    device_bytes: int = 0
    #: Host memory for transfers and contents in flight.
    staged_bytes: int = 0
    #: Of tensors and weights, since it opened.
    received_bytes: int = 0
    sent_bytes: int = 0
    commands_per_second: float = 0.0
    received_bytes_per_second: float = 0.0
    sent_bytes_per_second: float = 0.0
    #: The time for which it outlives a broken connection; 0: not at all.
    lease_seconds: float = 0.0
    #: Of a session whose connection broke: the time until it ends.
    lease_left_seconds: float | None = None
    #: Of a durable session: the time since its last snapshot.
    snapshot_age_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class KeptStateStatus:
    """The state of another daemon's durable sessions, which this one keeps in host memory."""

    #: The name that its owner chose.
    name: str
    tenant: str = ""
    #: The memory that it takes.
    size_bytes: int = 0
    files: int = 0
    #: True while its owner is there.
    held: bool = False
    #: The time since its owner went; 0 while it is there.
    away_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The status of a daemon at one moment. Rates and shares are since the previous snapshot."""

    #: Program and version.
    server: str
    #: It differs after a restart of the daemon.
    incarnation: bytes = b""
    uptime_seconds: float = 0.0
    drain: DrainStatus = field(default_factory=DrainStatus)
    devices: tuple[DeviceStatus, ...] = ()
    sessions: tuple[SessionStatus, ...] = ()
    tenants: tuple[TenantUsage, ...] = ()
    #: The members of its pool; none unless it is a head.
    members: tuple[MemberInfo, ...] = ()
    log_level: str = ""
    #: The states of other daemons in its memory.
    kept_states: tuple[KeptStateStatus, ...] = ()


#: By severity, lowest first.
LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class LogLine:
    """A log event."""

    #: Seconds since 1970.
    time: float
    #: One of LEVELS.
    level: str
    #: The part of the server that logged it.
    logger: str
    message: str
    #: The sequence number of its command; 0: none.
    run: int = 0
    #: The id of the command's trace; "": none.
    trace: str = ""
    #: The number of lines lost before it, since they were not read in time.
    dropped: int = 0


def check_level(level: str) -> str:
    """Return the level. Raises InvalidArgumentError for an unknown one."""
    if level not in LEVELS:
        levels = ", ".join(LEVELS)
        raise InvalidArgumentError(f"unknown log level {level!r:.40}", advice=f"use one of {levels}")
    return level


def after_dropped(lines: Sequence[LogLine], dropped: int) -> list[LogLine]:
    """Return the lines with the count of dropped lines in the first one."""
    return [replace(one, dropped=0 if number else dropped) for number, one in enumerate(lines)]
