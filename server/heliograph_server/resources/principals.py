"""The caller of a request: its tenant, rights and quota, from tokens and certificates."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum

from heliograph_proto.errors import PermissionDeniedError
from heliograph_proto.sessions import Quota


class Right(StrEnum):
    """A permission of a token."""

    #: Sessions, and everything in them.
    USE = "use"
    #: Operations: list and end all sessions, drain, set the log level.
    ADMIN = "admin"
    #: Heads and members of a pool: name other daemons with which this one exchanges values.
    POOL = "pool"


ALL_RIGHTS = frozenset(Right)


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller, as the daemon knows it."""

    #: The name given by the operator. "": the daemon has no tenants, and all callers are one.
    tenant: str = ""
    rights: frozenset[Right] = ALL_RIGHTS
    quota: Quota = field(default_factory=Quota)
    #: The name of the token or certificate, for the log.
    shown: str = ""
    #: The hash of its token, which finds the caller again when tokens are revoked.
    key: str = field(default="", repr=False)
    #: True for the daemon itself, which no token or certificate identifies.
    is_daemon: bool = False

    def may(self, right: Right) -> bool:
        """True if it has a right."""
        return right in self.rights

    def may_see(self, tenant: str) -> bool:
        """True if it may see what the sessions of a tenant do: its own, or with `Right.ADMIN`
        all."""
        return tenant == self.tenant or self.may(Right.ADMIN)


def no_exchange(what: str) -> PermissionDeniedError:
    """The error for a caller without `Right.POOL`, which could make this daemon connect to any
    address."""
    return PermissionDeniedError(
        f"this session may not {what}", advice="use a token with the right 'pool', as heads of pools do"
    )


#: Any caller of a daemon without access control.
ANYBODY = Principal()


_CALLER: ContextVar[Principal] = ContextVar("heliograph_caller", default=ANYBODY)


def current_principal() -> Principal:
    """The caller of the request that this task answers. Anonymous on a daemon without access
    control."""
    return _CALLER.get()


def called_by(principal: Principal) -> None:
    """Set the caller of the request that this task answers."""
    _CALLER.set(principal)
