"""Which span a run is, known before anybody makes it: what it asks of other daemons belongs to it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from hashlib import blake2b
from typing import Protocol

from heliograph_proto.traces import below


class Tracing(Protocol):
    """Makes spans of what a host does."""

    @property
    def life(self) -> bytes:
        """Of the host, so that no two runs anywhere have the same span."""

    def call(self, name: str, trace_parent: str, session: int) -> AbstractContextManager[str]:
        """The span of a call, while it is answered, of a caller with this traceparent; gives its own. Where
        that is "", there is no span, and nothing is given."""


class RunSpans:
    """Of one session."""

    def __init__(self, session: int, tracing: Tracing | None) -> None:
        self._session = session
        self._tracing = tracing

    def below(self, trace_parent: str, sequence: int) -> str:
        """The traceparent of what a run asks of others. Where nobody makes spans here, it is the run's own,
        so that there is no gap."""
        if self._tracing is None:
            return trace_parent
        return below(trace_parent, span_of_run(self._tracing.life, self._session, sequence))


def span_of_run(life: bytes, session: int, sequence: int) -> str:
    """16 hexadecimal digits, the same each time, not all of them 0."""
    found = blake2b(b"%d.%d" % (session, sequence), digest_size=8, key=life)
    return found.hexdigest() if any(found.digest()) else "1" * 16
