"""Who asks: the tenant, and what it may do and have. Services find out, from tokens and certificates."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Right(StrEnum):
    """What a token allows."""

    #: Sessions, and all that happens in them.
    USE = "use"
    #: What an operator does: list and end everybody's sessions, drain, set the level of the log.
    ADMIN = "admin"
    #: What heads and members of a pool do: name other daemons with which this one is to exchange values.
    POOL = "pool"


ALL_RIGHTS = frozenset(Right)


@dataclass(frozen=True, slots=True)
class Quota:
    """The most that a tenant may have at once, over all its sessions; 0: as much as there is."""

    sessions: int = 0
    plans: int = 0
    runs_in_flight: int = 0
    #: On all devices of the daemon together.
    device_memory_bytes: int = 0
    #: Of the host: transfers and contents on their way.
    staging_bytes: int = 0
    #: Its share of a device that others want too: two tenants have time on it as their weights are.
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Principal:
    """Whoever asks, as the daemon knows it."""

    #: The name that the operator gave it; "": the daemon knows no tenants, and everybody is one.
    tenant: str = ""
    rights: frozenset[Right] = ALL_RIGHTS
    quota: Quota = field(default_factory=Quota)
    #: The name of the token or certificate, for the log.
    shown: str = ""
    #: The hash of its token, by which it is found again when tokens are taken back.
    key: str = field(default="", repr=False)

    def may(self, right: Right) -> bool:
        """Whether it has a right."""
        return right in self.rights


#: Whoever can reach a daemon that asks nobody who they are.
ANYBODY = Principal()
