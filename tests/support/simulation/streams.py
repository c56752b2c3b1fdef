"""Connections of simulated clients with the real core, and what these send."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from heliograph.core.protocol import ClientCore
from heliograph_proto.codec.inline_runs import CommandReader, encode_commands
from heliograph_proto.sessions import Limits
from simulation.world import Wire, World

LIMITS = Limits(in_flight_bytes=8192, in_flight_commands=60, inline_bytes=64, chunk_bytes=64)
LEASE_SECONDS = 20.0
MESSAGE_BYTES = 600


class Stream:
    """One connection: a wire each way, and the calls to its client."""

    def __init__(self, world: World, deliver: Callable[..., None], end: Callable[..., None]) -> None:
        self.up, self.down = Wire(world, 0.3), Wire(world, 0.3)
        self.deliver, self.end = partial(deliver, self), partial(end, self)
        self.reader = CommandReader()
        self.is_over = False

    def cut(self) -> None:
        self.up.is_cut = self.down.is_cut = True


def send_all(core: ClientCore, stream: Stream, receive: Callable[[Stream, bytes], None]) -> None:
    """Send what may leave, in messages that arrive or not."""
    while core.lost is None and core.has_output:
        commands = core.take(MESSAGE_BYTES)
        told = core.take_acknowledgement(commands)
        if not commands and told is None:
            break
        stream.up.send(partial(receive, stream, encode_commands(commands, told)))
