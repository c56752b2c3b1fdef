"""Which span a run is, known before anybody makes it: what it asks of other daemons belongs to it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from hashlib import blake2b
from typing import Protocol


class Tracing(Protocol):
    """Makes spans of what a host does."""

    @property
    def life(self) -> bytes:
        """Of the host, so that no two runs anywhere have the same span."""

    def call(self, name: str, trace_parent: str, session: int) -> AbstractContextManager[str]:
        """The span of a call, while it is answered, of a caller with this traceparent; gives its own. Where
        that is "", there is no span, and nothing is given."""


def span_of_run(life: bytes, session: int, sequence: int) -> str:
    """16 hexadecimal digits, the same each time, not all of them 0."""
    found = blake2b(b"%d.%d" % (session, sequence), digest_size=8, key=life)
    return found.hexdigest() if any(found.digest()) else "1" * 16
