"""What a tenant of a daemon may have, and what it has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from heliograph_proto.settings import Kind, Setting
from heliograph_proto.sizes import MOST


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
