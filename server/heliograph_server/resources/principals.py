"""Who asks: the tenant, and what it may do and have. Services find out, from tokens and certificates."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum

from heliograph_proto.errors import PermissionDeniedError
from heliograph_proto.sessions import Quota


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


_CALLER: ContextVar[Principal] = ContextVar("heliograph_caller", default=ANYBODY)


def current_principal() -> Principal:
    """The caller of the call that this task answers; ANYBODY on a daemon without access control."""
    return _CALLER.get()


def called_by(principal: Principal) -> None:
    """Marks this task as one that answers a call of `principal`."""
    _CALLER.set(principal)
