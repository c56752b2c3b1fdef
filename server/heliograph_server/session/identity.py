"""The owner of a session, and the memory that a session gives away."""

from __future__ import annotations

from dataclasses import dataclass

from heliograph_proto.codec.packing import Encoding
from heliograph_server.resources.principals import Principal


@dataclass(frozen=True, slots=True)
class FileOfMemory:
    """Memory that a client of this host may map."""

    #: Closed by the receiver.
    descriptor: int
    size_bytes: int
    #: The offset of a tensor in it.
    offset_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SessionIdentity:
    """The owner of a session."""

    #: Numbers the sessions of the host, for logs. Clients name a session by a secret instead.
    number: int
    client: str
    principal: Principal
    #: True if its client receives device changes.
    watches: bool = False
    #: The encodings of packed pieces that were agreed on.
    encodings: tuple[Encoding, ...] = ()
    #: The time for which it outlives a broken connection; 0: not at all.
    lease_seconds: float = 0.0
