"""What a server accepts, in one place. The handshake tells it to every client."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 2**20
#: The most bytes that one command, or one piece of a content, may have at its place in shared memory.
PLACE_BYTES = 16 * MIB


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what one session may send or keep; see Limits in session.proto for each."""

    message_bytes: int = 64 * MIB
    graph_nodes: int = 250_000
    graph_depth: int = 250_000
    tensors: int = 100_000
    plans: int = 1_000
    #: Held for one session, both ways together.
    in_flight_bytes: int = 256 * MIB
    in_flight_commands: int = 100_000
    inline_bytes: int = 256 * 1024
    chunk_bytes: int = 1 * MIB
    attach_timeout_ms: int = 10_000

    @property
    def piece_bytes(self) -> int:
        """What a client sends as one transfer, so that several fit into in_flight_bytes."""
        return max(1, min(32 * MIB, self.in_flight_bytes // 8))
