"""What an operator sees of a daemon: frozen dataclasses without protobuf, with the fields of admin.proto."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from heliograph_proto.description import Memory
from heliograph_proto.membership import MemberInfo
from heliograph_proto.quotas import TenantUsage

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
