"""Contents that come to a daemon by tickets: who announces them, who brings them, and who must not."""

from __future__ import annotations

import logging
import queue
import socket
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from content_clients import content, host_with
from daemon_urls import DaemonUrls

import heliograph as hg
from heliograph.core.effects import UnreachableError
from heliograph.head import members
from heliograph.transport.bulk.tickets import Announcement, Channels, TicketUpload
from heliograph_backends.contract import UploadNews
from heliograph_proto import commands as c
from heliograph_proto.addresses import parse_address
from heliograph_proto.digests import digest_of
from heliograph_proto.errors import CancelledError, PermissionDeniedError
from heliograph_proto.plans import ContentOffer
from heliograph_proto.types import tensor_type
from heliograph_server.runtime.host import Host
from heliograph_server.runtime.upload_tickets import IDLE_SECONDS, Admission, Admissions, Announced
from heliograph_server.session.session import Session

OWN = parse_address("grpc://127.0.0.1:1")
SIZE = 3 * 2**20 + 17
SECONDS = 30


class Announcer:
    """A session that announces contents, as a head does, and hears what becomes of them."""

    def __init__(self, url: str) -> None:
        self.session = hg.connect(url)
        self.channel = grpc.insecure_channel(url.removeprefix("grpc://"))
        self.heard: queue.Queue[tuple[int, int, bool, hg.HeliographError | None]] = queue.Queue()
        self.tensors: list[hg.Tensor] = []
        self.announcement: Announcement | None = None

    def announce(self, *contents: bytes) -> list[ContentOffer]:
        self.tensors = [self.session.empty((len(one),), "u8") for one in contents]
        for tensor in self.tensors:
            tensor.get()
        wanted = list(zip(map(digest_of, contents), self.tensors, strict=True))
        self.announcement = members.announce(self.session, wanted, lambda *news: self.heard.put(news))
        return [
            ContentOffer(digest, self.session.address, self.session.info.incarnation, ticket)
            for (digest, _), ticket in zip(wanted, self.announcement.tickets, strict=True)
        ]

    def upload(self, offer: ContentOffer, size_bytes: int = SIZE) -> TicketUpload:
        """Begun, as a client without a session does it."""
        upload = TicketUpload(self.channel, offer, size_bytes)
        try:
            upload.begin()
        except BaseException:
            upload.cancel()
            raise
        return upload

    def news(self) -> tuple[int, int, bool, hg.HeliographError | None]:
        return self.heard.get(timeout=SECONDS)

    def close(self) -> None:
        self.channel.close()
        self.session.close()


@pytest.fixture
def announcer(daemon: DaemonUrls) -> Iterator[Announcer]:
    """On a daemon whose memory is as before afterwards."""
    with hg.connect(daemon.tcp) as watcher:
        before = watcher.devices[0].memory()
        made = Announcer(daemon.tcp)
        yield made
        made.close()
        assert any(watcher.devices[0].memory() == before for _ in range(5_000))


def test_bytes_come_straight_into_the_tensor_and_who_announced_them_hears_of_it(announcer: Announcer) -> None:
    first, second = content(1, SIZE), content(2, SIZE)
    offers = announcer.announce(first, second)
    for offer, data in zip(offers, (first, second), strict=True):
        upload = announcer.upload(offer)
        upload.write(memoryview(data))
        upload.finish()
    assert [announcer.news() for _ in offers] == [(0, SIZE, True, None), (1, SIZE, True, None)]
    assert [one.get().tobytes() for one in announcer.tensors] == [first, second]
    assert announcer.session.server_traffic().content_bytes == 0


def test_an_upload_that_broke_off_goes_on_at_its_byte(announcer: Announcer) -> None:
    data = content(3, SIZE)
    (offer,) = announcer.announce(data)
    upload = announcer.upload(offer)
    upload.write(memoryview(data)[: 2**20])
    upload.cancel()
    place, received, is_over, error = announcer.news()
    assert (place, is_over, error) == (0, False, None)
    again = announcer.upload(offer)
    assert again.received_bytes == received
    again.write(memoryview(data)[received:])
    again.finish()
    assert announcer.news() == (0, SIZE, True, None)
    assert announcer.tensors[0].get().tobytes() == data


def test_wrong_bytes_are_refused_and_the_ticket_is_void_then(announcer: Announcer) -> None:
    data = content(4, SIZE)
    (offer,) = announcer.announce(data)
    upload = announcer.upload(offer)
    upload.write(memoryview(bytes(SIZE)))
    with pytest.raises(hg.ContentMismatchError):
        upload.finish()
    _, _, is_over, error = announcer.news()
    assert is_over and isinstance(error, hg.ContentMismatchError)
    with pytest.raises(PermissionDeniedError):
        announcer.upload(offer)


def test_a_ticket_that_was_used_or_made_up_is_refused(announcer: Announcer) -> None:
    data = content(5, SIZE)
    (offer,) = announcer.announce(data)
    halves = (offer.ticket[:16] + bytes(16), bytes(16) + offer.ticket[16:], offer.ticket[:16], b"", bytes(32))
    for made_up in halves:
        with pytest.raises(PermissionDeniedError, match="not valid"):
            announcer.upload(ContentOffer(offer.digest, offer.address, offer.incarnation, made_up))
    upload = announcer.upload(offer)
    upload.write(memoryview(data))
    upload.finish()
    with pytest.raises(PermissionDeniedError, match="not valid"):
        announcer.upload(offer)


def test_an_upload_waits_for_another_one_of_the_same_content_and_then_has_nothing_to_send(
    announcer: Announcer,
) -> None:
    data = content(6, SIZE)
    (offer,) = announcer.announce(data)
    first = announcer.upload(offer)
    second = TicketUpload(announcer.channel, offer, SIZE)
    first.write(memoryview(data))
    first.finish()
    second.begin()
    assert second.received_bytes == SIZE
    second.finish()


def test_a_head_does_not_wait_for_ever_for_who_takes_nothing(announcer: Announcer) -> None:
    (offer,) = announcer.announce(bytes(SIZE))
    first = announcer.upload(offer)
    late = TicketUpload(announcer.channel, offer, SIZE, patience_seconds=0.25)
    with pytest.raises(hg.UnavailableError, match="took no bytes of a content"):
        late.begin()
    first.cancel()


def test_another_size_than_was_announced_is_refused(announcer: Announcer) -> None:
    (offer,) = announcer.announce(content(7, SIZE))
    with pytest.raises(hg.UnavailableError, match="were announced"):
        announcer.upload(offer, SIZE - 1)


def test_another_daemon_than_was_meant_gets_no_bytes(announcer: Announcer) -> None:
    (offer,) = announcer.announce(content(8, SIZE))
    with pytest.raises(hg.UnavailableError, match="another daemon"):
        announcer.upload(ContentOffer(offer.digest, offer.address, bytes(16), offer.ticket))


def test_tickets_are_void_when_who_announced_the_contents_is_gone(announcer: Announcer) -> None:
    (offer,) = announcer.announce(content(9, SIZE))
    upload = announcer.upload(offer)
    announcer.session.close()
    with pytest.raises(hg.HeliographError):
        upload.write(memoryview(bytes(SIZE)))
        upload.finish()
    with pytest.raises(PermissionDeniedError):
        announcer.upload(offer)


@pytest.mark.parametrize("url", ["grpc://127.0.0.1:1", "unix:///no/such/socket", "local:", "nonsense://x"])
def test_an_address_where_nobody_is_cannot_be_reached(url: str) -> None:
    channels = Channels(OWN)
    with pytest.raises(UnreachableError):
        channels.connected(ContentOffer(bytes(32), url, bytes(16), bytes(32)))
    channels.close()


def test_who_accepts_and_says_nothing_is_waited_for_two_seconds() -> None:
    channels = Channels(OWN)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"grpc://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(UnreachableError, match="within 2 s"):
            channels.connected(ContentOffer(bytes(32), url, bytes(16), bytes(32)))
    channels.close()


# The core, with a clock of the test's


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def host() -> Iterator[Host]:
    with host_with() as made:
        yield made


class Holder:
    """A session of a host with a tensor, and a content announced for it."""

    def __init__(self, host: Host, admissions: Admissions, data: bytes) -> None:
        self.session: Session = host.session(host.open_session("test").session)
        self.session.attach(lambda batch: None)
        self.session.submit([c.Command(1, c.Allocate(7, tensor_type("u8", (len(data),))))])
        self.session.when_written([7]).result(SECONDS)
        self.news: list[UploadNews] = []
        what = Announced(7, len(data), digest_of(data))
        (self.admission,) = admissions.admit(
            self.session, [what], lambda _place, news: self.news.append(news)
        )


def begun(admission: Admission) -> Any:
    return admission.begin().result(SECONDS)


def test_a_ticket_is_void_when_nothing_came_for_ten_minutes(host: Host) -> None:
    clock, data = Clock(), content(1)
    admissions = Admissions(clock=clock)
    holder = Holder(host, admissions, data)
    ticket = holder.admission.ticket
    clock.seconds += IDLE_SECONDS - 1
    upload = begun(admissions.find(ticket))
    upload.write(0, data[:100])
    clock.seconds += IDLE_SECONDS - 1
    assert admissions.find(ticket) is holder.admission
    clock.seconds += 2
    with pytest.raises(PermissionDeniedError):
        admissions.find(ticket)
    holder.admission.end(PermissionDeniedError("void"))
    with pytest.raises(PermissionDeniedError):
        upload.write(100, data[100:])
    assert [one.is_over for one in holder.news] == [True]
    admissions.close()


def test_what_broke_off_waits_for_the_next_one_and_tells_how_far_it_came(host: Host) -> None:
    data = content(2)
    admissions = Admissions()
    holder = Holder(host, admissions, data)
    first, waiting = begun(holder.admission), holder.admission.begin()
    first.write(0, data[:1000])
    assert not waiting.done()
    first.abort(CancelledError("the connection broke"))
    second = waiting.result(SECONDS)
    assert second.received_bytes == 1000 and holder.news == [UploadNews(1000, is_over=False)]
    second.write(1000, data[1000:])
    assert second.finish() == len(data) and holder.news[-1] == UploadNews(len(data), is_over=True)
    admissions.close()


def test_a_hole_in_the_bytes_ends_the_content(host: Host) -> None:
    data = content(3)
    admissions = Admissions()
    holder = Holder(host, admissions, data)
    with pytest.raises(hg.ProtocolError):
        begun(holder.admission).write(10, data[10:])
    assert isinstance(holder.news[-1].error, hg.ProtocolError)
    admissions.close()


def test_refused_tickets_are_logged_once(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    admissions = Admissions()
    with caplog.at_level(logging.WARNING):
        for number in range(100):
            with pytest.raises(PermissionDeniedError):
                admissions.find(bytes([number]) * 32)
    assert len([one for one in caplog.records if "ticket" in one.message]) == 1
    admissions.close()


def test_contents_are_announced_all_or_none_and_bounded(host: Host) -> None:
    data = content(4)
    admissions = Admissions()
    holder = Holder(host, admissions, data)
    good, bad = Announced(7, len(data), digest_of(data)), Announced(8, len(data), digest_of(data))
    for wanted in ([good, bad], [Announced(7, 5, digest_of(data))], [Announced(7, len(data), b"short")]):
        with pytest.raises((hg.UnknownHandleError, hg.InvalidArgumentError)):
            admissions.admit(holder.session, wanted, lambda _place, _news: None)
    with pytest.raises(hg.LimitExceededError):
        admissions.admit(holder.session, [good] * 10_001, lambda _place, _news: None)
    assert repr(admissions) == "<Admissions of 1 contents>"
    holder.session.close()
    assert repr(admissions) == "<Admissions of 0 contents>"
    admissions.close()
