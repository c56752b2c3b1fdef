"""Fields of log records that name their session, given to logging as `extra`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

LogFields: TypeAlias = Mapping[str, object]
NO_FIELDS: LogFields = {}


class LogOwner:
    """Identifies one session in this process, where several hosts use the same numbers. Keeps
    nothing alive."""

    __slots__ = ()


def session_fields(owner: LogOwner, session: int, tenant: str) -> LogFields:
    """The fields of a session. `tenant` is the name given by the operator, or ""."""
    return {"owner": owner, "session": session, **({"tenant": tenant} if tenant else {})}


def run_fields(session: LogFields, run: int, trace_parent: str = "") -> LogFields:
    """The fields of a command of a session: its sequence number, and its trace id from W3C's
    traceparent."""
    parts = trace_parent.split("-")
    trace = {"trace": parts[1][:32]} if len(parts) > 2 else {}
    return {**session, "run": run, **trace}
