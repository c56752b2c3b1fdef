"""Who asks: the tenant, and what it may do and have. Services find out, from tokens and certificates."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from heliograph_proto.errors import PermissionDeniedError
from heliograph_proto.settings import Kind, Setting
from heliograph_proto.sizes import MOST


class Right(StrEnum):
    """What a token allows."""

    #: Sessions, and all that happens in them.
    USE = "use"
    #: What an operator does: list and end everybody's sessions, drain, set the level of the log.
    ADMIN = "admin"
    #: What heads and members of a pool do: name other daemons with which this one is to exchange values.
    POOL = "pool"


ALL_RIGHTS = frozenset(Right)


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


def no_exchange(what: str) -> PermissionDeniedError:
    """For one without `Right.POOL`: it would have this daemon connect with any address."""
    return PermissionDeniedError(
        f"this session may not {what}", advice="show a token with the right 'pool', as heads of pools do"
    )


#: Whoever can reach a daemon that asks nobody who they are.
ANYBODY = Principal()
