"""Contents on their way to other daemons, when announcing them fails in the middle."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from heliograph_backends.contract import Admittance, Buffer, Intake, Relay, UploadNews
from heliograph_backends.contract.remote import Tell
from heliograph_backends.cpu import CpuDevice
from heliograph_proto.errors import UnavailableError
from heliograph_proto.plans import ContentOffer
from heliograph_proto.sessions import Quota
from heliograph_server.resources.quotas import Account
from heliograph_server.resources.reclaim import MemoryReclaim
from heliograph_server.resources.timers import Deadlines
from heliograph_server.weights.direct_upload import DirectContents
from heliograph_server.weights.session_weights import SessionWeights


class BreaksOff(Intake):
    """A daemon that has the first content already, and is gone before it has heard of all."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []

    def admit(self, wanted: Sequence[tuple[bytes, Buffer]], tell: Tell) -> Admittance:
        self.buffers = [buffer for _, buffer in wanted]
        tell(0, UploadNews(self.buffers[0].size_bytes, is_over=True))
        raise UnavailableError("the connection broke")


class Elsewhere(CpuDevice):
    """A device whose contents go to such a daemon."""

    taking = BreaksOff()

    @property
    def intake(self) -> Intake:
        return self.taking


class Taken(Admittance):
    """What such a daemon takes."""

    def __init__(self, offers: tuple[ContentOffer, ...]) -> None:
        self.offers = offers

    def relay(self, place: int) -> Relay:
        raise NotImplementedError

    def cancel(self) -> None:
        pass


class Waits(BreaksOff):
    """A daemon that takes all, and is told later what came."""

    tell: Tell

    def admit(self, wanted: Sequence[tuple[bytes, Buffer]], tell: Tell) -> Admittance:
        self.buffers = [buffer for _, buffer in wanted]
        self.tell = tell
        return Taken(tuple(ContentOffer(digest, "", b"", b"") for digest, _ in wanted))


@pytest.mark.parametrize("comes", [True, False])
def test_contents_on_their_way_are_memory_of_the_tenant_which_its_quota_bounds(comes: bool) -> None:
    device, room, deadlines = Elsewhere(threads=1, native=False), MemoryReclaim(), Deadlines()
    intake = device.taking = Waits()
    account = Account("alice", Quota(device_memory_bytes=100))
    contents = SessionWeights(lambda: [device], room, account=account)
    direct = DirectContents(contents, room, deadlines)
    first, second = b"a" * 32, b"b" * 32
    try:
        (offer,) = direct.place(dict.fromkeys((first, second), (device.buffer_type, 64)))
        assert offer.digest == first
        assert account.usage().device_memory_bytes == 64
        if comes:
            intake.tell(0, UploadNews(64, is_over=True))
            assert account.usage().device_memory_bytes == 64
            assert not direct.place({second: (device.buffer_type, 64)})
    finally:
        direct.close(UnavailableError("over"))
        contents.close(UnavailableError("over"))
        deadlines.close()
        device.close()
    assert account.usage().is_idle


def test_a_content_that_came_before_its_daemon_was_lost_is_the_sessions_and_not_freed() -> None:
    device, room, deadlines = Elsewhere(threads=1, native=False), MemoryReclaim(), Deadlines()
    contents = SessionWeights(lambda: [device], room)
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
