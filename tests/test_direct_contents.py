"""Contents on their way to other daemons, when announcing them fails in the middle."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from heliograph_backends.contract import Admittance, Buffer, Intake, News
from heliograph_backends.contract.intake import Tell
from heliograph_backends.cpu import CpuDevice
from heliograph_proto.errors import UnavailableError
from heliograph_server.core.contents import Contents
from heliograph_server.core.deadlines import Deadlines
from heliograph_server.core.direct import DirectContents
from heliograph_server.core.room import Room


class BreaksOff(Intake):
    """A daemon that has the first content already, and is gone before it has heard of all."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []

    def admit(self, wanted: Sequence[tuple[bytes, Buffer]], tell: Tell) -> Admittance:
        self.buffers = [buffer for _, buffer in wanted]
        tell(0, News(self.buffers[0].size_bytes, is_over=True))
        raise UnavailableError("the connection broke")


class Elsewhere(CpuDevice):
    """A device whose contents go to such a daemon."""

    taking = BreaksOff()

    @property
    def intake(self) -> Intake:
        return self.taking


def test_a_content_that_came_before_its_daemon_was_lost_is_the_sessions_and_not_freed() -> None:
    device, room, deadlines = Elsewhere(threads=1, native=False), Room(), Deadlines()
    contents = Contents(lambda: [device], room)
    direct = DirectContents(contents, room, deadlines)
    try:
        with pytest.raises(UnavailableError):
            direct.place({digest * 32: (device.buffer_type, 64) for digest in (b"a", b"b")})
        first, second = device.taking.buffers
        assert "freed" not in repr(first) and "freed" in repr(second)
        assert contents.missing((b"a" * 32, b"b" * 32)) == (b"b" * 32,)
    finally:
        contents.close(UnavailableError("over"))
        deadlines.close()
        device.close()
