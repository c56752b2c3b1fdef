"""Direct uploads of contents to a member, by tickets that the member issues for our clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import heliograph as hg
from heliograph.head import members
from heliograph.transport.bulk.tickets import Announcement, TicketUpload
from heliograph_backends.contract import Admittance, Buffer, Intake, Relay, UploadNews
from heliograph_proto.errors import HeliographError
from heliograph_proto.plans import ContentOffer
from heliograph_server.pool.remote.memory import RemoteBuffer

if TYPE_CHECKING:
    from heliograph_server.pool.member import Member

#: The most contents announced in one call.
MOST_AT_ONCE = 10_000


class RemoteIntake(Intake):
    """The direct uploads to one member."""

    def __init__(self, member: Member) -> None:
        self._member = member

    def __repr__(self) -> str:
        return f"<RemoteIntake of {self._member.name}>"

    def admit(
        self, contents: Sequence[tuple[bytes, Buffer]], tell: Callable[[int, UploadNews], None]
    ) -> RemoteAdmittance:
        made: list[Announcement] = []
        try:
            with self._member.edge():
                for first in range(0, len(contents), MOST_AT_ONCE):
                    some = [(digest, _whole(one)) for digest, one in contents[first : first + MOST_AT_ONCE]]
                    made.append(members.announce(self._member.session, some, _telling(tell, first)))
        except BaseException:
            for one in made:
                one.cancel()
            raise
        tickets = [ticket for one in made for ticket in one.tickets]
        offers = tuple(self._offer(digest, one) for (digest, _), one in zip(contents, tickets, strict=True))
        sizes = [buffer.size_bytes for _, buffer in contents]
        return RemoteAdmittance(self._member, offers, sizes, made)

    def _offer(self, digest: bytes, ticket: bytes) -> ContentOffer:
        address = self._member.url.partition("#")[0]
        return ContentOffer(digest, address, self._member.incarnation, ticket)


class RemoteAdmittance(Admittance):
    """Contents for which a member has issued tickets."""

    def __init__(
        self,
        member: Member,
        offers: tuple[ContentOffer, ...],
        sizes: Sequence[int],
        announcements: Sequence[Announcement],
    ) -> None:
        self.offers = offers
        self._member = member
        self._sizes, self._announcements = sizes, announcements

    def __repr__(self) -> str:
        return f"<RemoteAdmittance of {len(self.offers)} contents>"

    def relay(self, place: int) -> Relay:
        offer = self.offers[place]
        with _loss_first(self._member):
            # The connection of the session's bulk data reaches the member.
            upload = members.bring(self._member.session, offer, self._sizes[place])
            try:
                upload.begin()
            except BaseException:
                upload.cancel()
                raise
        return RemoteRelay(self._member, upload)

    def cancel(self) -> None:
        for one in self._announcements:
            one.cancel()


class RemoteRelay(Relay):
    """An upload by a ticket, as a client would do it."""

    def __init__(self, member: Member, upload: TicketUpload) -> None:
        self._member = member
        self._upload = upload
        self.received_bytes = upload.received_bytes

    def write(self, data: memoryview) -> None:
        with _loss_first(self._member):
            self._upload.write(data)

    def finish(self) -> None:
        with _loss_first(self._member):
            self._upload.finish()

    def cancel(self) -> None:
        self._upload.cancel()


@contextmanager
def _loss_first(member: Member) -> Iterator[None]:
    """A context that raises MemberLostError in place of an upload's error if the member is lost.

    Uploads have a connection of their own; its errors say less than those of the member.
    """
    try:
        yield
    except HeliographError:
        member.check()
        raise


def _whole(buffer: Buffer) -> hg.Tensor:
    assert isinstance(buffer, RemoteBuffer), "a buffer of another device"
    return buffer.whole


def _telling(tell: Callable[[int, UploadNews], None], first: int) -> Callable[..., None]:
    def report(place: int, received_bytes: int, is_over: bool, error: HeliographError | None) -> None:
        tell(first + place, UploadNews(received_bytes, is_over, error))

    return report
