"""Whose a line of the log is: what is given to logging as `extra`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

LogFields: TypeAlias = Mapping[str, object]
NOBODY: LogFields = {}


class LogOwner:
    """Stands for one session in this process, where hosts number theirs alike; keeps nothing alive."""

    __slots__ = ()


def session_fields(owner: LogOwner, session: int, tenant: str) -> LogFields:
    """Of a session; `tenant`: the name that the operator gave it, or ""."""
    return {"owner": owner, "session": session, **({"tenant": tenant} if tenant else {})}


def run_fields(session: LogFields, run: int, trace_parent: str = "") -> LogFields:
    """Of a command of a session: its sequence number, and the id of its trace from W3C's traceparent."""
    parts = trace_parent.split("-")
    trace = {"trace": parts[1][:32]} if len(parts) > 2 else {}
    return {**session, "run": run, **trace}
