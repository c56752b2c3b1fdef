"""What the tenants of a host have: for their quotas, and for whoever looks on."""

from __future__ import annotations

from dataclasses import dataclass, field

from heliograph_server.core.principals import Quota


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What one tenant has of a host, now. The last two only grow."""

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
