"""Lines of a server's log, to messages and back."""

from __future__ import annotations

from collections.abc import Sequence

from heliograph_proto.log_lines import LEVELS, LogLine, after_dropped
from heliograph_proto.v1 import session_pb2


def encode_lines(lines: Sequence[LogLine], dropped: int) -> session_pb2.FollowLogResponse:
    """Lines, before which so many were dropped."""
    return session_pb2.FollowLogResponse(lines=map(_encode, lines), dropped=dropped)


def _encode(line: LogLine) -> session_pb2.LogLine:
    return session_pb2.LogLine(
        time_us=int(line.time * 1e6),
        level=line.level,
        logger=line.logger,
        message=line.message,
        run=line.run,
        trace=line.trace,
    )


def decode_lines(message: session_pb2.FollowLogResponse) -> list[LogLine]:
    """The lines; the first one says how many are missing before it."""
    return after_dropped([_decode(one) for one in message.lines], message.dropped)


def _decode(line: session_pb2.LogLine) -> LogLine:
    level = line.level if line.level in LEVELS else "info"
    return LogLine(line.time_us / 1e6, level, line.logger, line.message, line.run, line.trace)
