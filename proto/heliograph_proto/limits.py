"""What a server accepts, in one place. The handshake tells it to every client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from heliograph_proto.settings import Kind, Setting

MIB = 2**20
#: The most bytes that one command, or one piece of a content, may have at its place in shared memory.
PLACE_BYTES = 16 * MIB
#: Limits travel in 32 or 64 bits.
MAX_LIMIT = 2**31 - 1


def _limit(says: str, kind: Kind = "plain") -> Setting:
    return Setting(says, least=1, most=MAX_LIMIT, kind=kind)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what one session may send or keep; see Limits in session.proto for each."""

    message_bytes: Annotated[int, _limit("The largest message, encoded.", "size")] = 64 * MIB
    graph_nodes: Annotated[int, _limit("The most nodes in one graph.")] = 250_000
    graph_depth: Annotated[int, _limit("The longest path through a graph, in nodes.")] = 250_000
    tensors: Annotated[int, _limit("The most tensors that may live at once.")] = 100_000
    plans: Annotated[int, _limit("The most plans that may live at once.")] = 1_000
    #: Held for one session, both ways together.
    in_flight_bytes: Annotated[
        int,
        _limit(
            "The most bytes held at once, each: of transfers, of data in commands and results, of graphs "
            "to be compiled.",
            "size",
        ),
    ] = 256 * MIB
    in_flight_commands: Annotated[int, _limit("The most commands that may be unanswered at once.")] = 100_000
    inline_bytes: Annotated[
        int,
        _limit(
            "The most bytes of one tensor that may ride in a command or a completion; larger ones go in "
            "pieces.",
            "size",
        ),
    ] = 256 * 1024
    chunk_bytes: Annotated[int, _limit("The size of such pieces, on calls of their own.", "size")] = 1 * MIB
    attach_timeout_ms: Annotated[
        int,
        _limit("How long a session may be without its command stream after it was opened, in milliseconds."),
    ] = 10_000

    @property
    def piece_bytes(self) -> int:
        """What a client sends as one transfer, so that several fit into in_flight_bytes."""
        return max(1, min(32 * MIB, self.in_flight_bytes // 8))
