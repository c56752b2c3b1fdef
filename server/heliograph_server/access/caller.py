"""Whose call is being answered."""

from __future__ import annotations

from contextvars import ContextVar

from heliograph_server.core.principals import ANYBODY, Principal

_CALLER: ContextVar[Principal] = ContextVar("heliograph_caller", default=ANYBODY)


def current_principal() -> Principal:
    """Who made the call whose handler asks; ANYBODY where the daemon asks nobody. Not on other threads."""
    return _CALLER.get()


def called_by(principal: Principal) -> None:
    """From now on, this task answers a call of somebody."""
    _CALLER.set(principal)
