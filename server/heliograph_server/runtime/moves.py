"""Sessions that go to another daemon, and those that come from one.

The daemon that has a session decides. It holds the session still, has the other daemon restore it
under a new secret, and only then gives the session up; from that moment it tells its client where
the session is, with the proof from which the client alone makes that secret. Until then the other
daemon's copy cannot be used by anyone, and ends with its lease.

    here ── still, image, contents ──▸ there, unclaimed ── given up here ──▸ claimed by the client
      └── any error: goes on here                └── no client comes: its lease ends

A copy may go ahead, while commands go on. The session itself then takes the copy's memory, where
that has the same bytes, and only what changed since is sent while it is still.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Protocol

from heliograph_proto import MOVE
from heliograph_proto.addresses import parse_address
from heliograph_proto.digests import moved_secret
from heliograph_proto.errors import (
    HeliographError,
    InvalidArgumentError,
    LimitExceededError,
    MovedError,
    SessionClosedError,
    SnapshotFailedError,
    UnsupportedError,
)
from heliograph_proto.sessions import Limits, SessionMove, SessionOutcome
from heliograph_server.resources.handles import HandleStorage
from heliograph_server.resources.principals import Principal
from heliograph_server.runtime.whereabouts import Departures
from heliograph_server.session.parts.leaving import check_between_commands, messages_held, why_bound
from heliograph_server.session.session import Session
from heliograph_server.state.capture import held_still
from heliograph_server.state.departure import Departure, KnownBytes
from heliograph_server.state.image import Image, ImageOwner, encode_image
from heliograph_server.state.restore import ContentSource
from heliograph_server.state.snapshots import ASKED_SECONDS, digest_of_secret

if TYPE_CHECKING:
    from heliograph_server.runtime.host import Host

logger = logging.getLogger(__name__)

#: The time that a session without a connection has for the end of its commands, at each attempt.
DETACHED_SECONDS = 1.0
#: Limits that bound waits of the server alone.
_TIMES = ("attach_timeout_ms", "upload_idle_ms")
#: Smaller sessions send nothing ahead: they are still for a moment as it is.
LEAST_AHEAD_BYTES = 4 * 2**20
#: The time that a copy waits altogether for moments without a command under way.
AHEAD_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Handing:
    """The way in which a session is given to another daemon."""

    is_durable: bool = False
    #: True for a copy of a session that goes on where it is.
    is_ahead: bool = False
    #: The digest of the secret of the copy that went ahead, before this one too; empty: none did.
    ahead: bytes = b""


@dataclass(slots=True)
class _Ahead:
    """The copy of a session that goes, or has gone, ahead to an address."""

    address: str
    #: Set at the end, whichever that is.
    ended: threading.Event = field(default_factory=threading.Event)
    #: The digest of its secret; empty: nothing is there.
    secret_digest: bytes = b""
    known: dict[HandleStorage, KnownBytes] = field(default_factory=dict)
    sent_bytes: int = 0


class Give(Protocol):
    """The link over which sessions go."""

    def __call__(
        self,
        address: str,
        image: bytes,
        read: Callable[[bytes], Iterator[memoryview]],
        limits: Limits,
        how: Handing,
    ) -> None:
        """Give a session away, or a copy. Raises the errors of SessionService.Move; then it is not."""


class Moves:
    """The sessions of a host that go and come. Thread-safe."""

    def __init__(self, host: Host) -> None:
        self._host = host
        #: Gives the file of an image, and contents, to the daemon at an address.
        self.give: Give = _no_links
        #: The daemon to which an operator sends all sessions; empty: none.
        self.target = ""
        self._lock = threading.Lock()
        #: The outcomes of sessions that an operator sends away, by number; and the numbers of those
        #: whose client was asked, and of those that stay for good.
        self._outcomes: dict[int, SessionOutcome] = {}
        self._asked: set[int] = set()
        self._stays: set[int] = set()
        self._departures = Departures()
        #: The copies that went ahead.
        self._ahead: dict[Session, _Ahead] = {}

    def __repr__(self) -> str:
        return f"<Moves: {self._departures}>"

    # The places of sessions

    def check(self, session: Session) -> None:
        """Raise UnavailableError while a session is on its way, so that nothing attaches to it."""
        with self._lock:
            self._departures.check(session)

    def where(self, token: bytes, principal: Principal | None) -> MovedError | None:
        """Return the error that tells the client of a session where it is now; None: not elsewhere."""
        with self._lock:
            tenant = None if principal is None else principal.tenant
            return self._departures.where(token, tenant, time.monotonic())

    @property
    def untold(self) -> int:
        """The number of sessions elsewhere whose clients have not heard of it, and may still come."""
        with self._lock:
            return self._departures.untold(time.monotonic())

    # A drain

    @property
    def outcomes(self) -> tuple[SessionOutcome, ...]:
        """The outcomes of the sessions that an operator sends away, by number."""
        with self._lock:
            return tuple(self._outcomes[number] for number in sorted(self._outcomes))

    def send_to(self, address: str) -> None:
        """Send all sessions to the daemon at an address; empty: none. Raises InvalidArgumentError."""
        target = parse_address(address) if address else None
        if target is not None and (target.scheme == "local" or target.token):
            raise InvalidArgumentError(
                f"{target} is no plain address of a daemon",
                advice="use grpc://host:port, without a token: clients show theirs there",
            )
        with self._lock:
            self.target = "" if target is None else target.plain
            self._outcomes, self._asked, self._stays = {}, set(), set()

    def send_all(self, pause_seconds: float) -> bool:
        """Send every session that can go now, or ask its client to. Return True once all are gone,
        or stay for good, and the clients of those that are gone know it; otherwise after a pause.
        Blocks."""
        if not self.target:
            return True
        for session in self._left():
            self._send(session)
        if self._left() or self.untold:
            time.sleep(pause_seconds)
            return False
        return True

    def _left(self) -> list[Session]:
        """The sessions that may still go."""
        return [one for one in self._host.sessions if one.number not in self._stays and one.closed is None]

    def _send(self, session: Session) -> None:
        if not self._may_move(session):
            self._stay(session, _bound().message)
        elif session.is_attached and not session.is_detached:
            if session.number not in self._asked:
                self._asked.add(session.number)
                self._note(session, "its client has not moved it so far")
                session.inside.executor.tell(move_to=self.target)
        elif (token := self._host.token_of(session)) is None:
            self._stay(session, "its client has not come since this daemon was restarted")
        elif why := why_bound(session):
            self._stay(session, why)
        else:
            self._send_detached(session, token)

    def _send_detached(self, session: Session, token: bytes) -> None:
        try:
            self.move(session, token, self.target, DETACHED_SECONDS)
        except SnapshotFailedError as error:
            # Its commands may end before the drain does.
            self._note(session, error.message)
        except HeliographError as error:
            self._stay(session, error.message)

    def _note(self, session: Session, why: str) -> None:
        with self._lock:
            self._outcomes[session.number] = SessionOutcome(session.number, session.client, False, why)

    def _stay(self, session: Session, why: str) -> None:
        self._note(session, why)
        self._stays.add(session.number)

    # Going ahead

    def prepare(self, session: Session, address: str) -> int:
        """Send a copy of a session ahead to the daemon at an address, and return its bytes. Blocks.

        Raises the errors of SessionService.PrepareMove. If one is being sent, waits for its end.
        """
        owner = self._host.images.owners.get(session)
        if owner is None or not self._may_move(session):
            raise _bound()
        if _size_bytes(session) < LEAST_AHEAD_BYTES:
            return 0
        made = _Ahead(address)
        with self._lock:
            # After another attempt, only what changed since is sent.
            before = self._take_ahead(session, address)
            under_way = self._ahead.setdefault(session, made)
        if under_way is not made:
            under_way.ended.wait(session.lease_seconds)
            return under_way.sent_bytes
        try:
            self._send_ahead(session, owner, made, before)
        finally:
            made.ended.set()
            with self._lock:
                if session.closed is not None:
                    self._ahead.pop(session, None)
        return made.sent_bytes

    def _send_ahead(self, session: Session, owner: ImageOwner, made: _Ahead, before: _Ahead) -> None:
        # No client gets the secret.
        digest = digest_of_secret(secrets.token_bytes(32))
        departure = Departure(session, digest, owner, before.known, _Moments(session).still)
        data = encode_image(departure.with_messages(0, ()))
        how = Handing(is_ahead=True, ahead=before.secret_digest)
        self.give(made.address, data, departure.read, session.limits, how)
        made.known, made.sent_bytes, made.secret_digest = departure.known, departure.sent_bytes, digest
        message = "a copy of %s is at %s; %d bytes were sent"
        logger.debug(message, session, made.address, made.sent_bytes, extra=session.log_fields)

    def forget(self, session: Session) -> None:
        """Forget a session that has ended."""
        with self._lock:
            self._ahead.pop(session, None)

    def _take_ahead(self, session: Session, address: str) -> _Ahead:
        """Take the copy of a session that is at an address; an empty one if there is none.

        Under the lock."""
        found = self._ahead.get(session)
        if found is None or not found.ended.is_set():
            return _Ahead(address)
        del self._ahead[session]
        return found if found.address == address else _Ahead(address)

    # Going

    def move_asked(self, session: Session, token: bytes, address: str, *wait_seconds: float) -> SessionMove:
        """As `move`, for a client that asks for it. Its failure is the outcome of a drain."""
        try:
            return self.move(session, token, address, *wait_seconds)
        except HeliographError as error:
            if address == self.target and session.closed is None:
                self._stay(session, error.message)
            raise

    def move(
        self, session: Session, token: bytes, address: str, wait_seconds: float = ASKED_SECONDS
    ) -> SessionMove:
        """Hand a session to the daemon at an address. Blocks.

        Raises the errors of SessionService.Move; the session then goes on here.
        """
        owner = self._host.images.owners.get(session)
        if owner is None or not self._may_move(session):
            raise _bound()
        proof = secrets.token_bytes(16)
        began = time.monotonic()
        with self._leaving(session), held_still(session.inside, wait_seconds):
            stilled = time.monotonic()
            check_between_commands(session)
            with self._lock:
                ahead = self._take_ahead(session, address)
            digest = digest_of_secret(moved_secret(token, proof))
            departure = Departure(session, digest, owner, ahead.known)
            with messages_held(session) as (acknowledged, messages):
                image = departure.with_messages(acknowledged, messages)
                how = Handing(self._host.images.is_durable(session), ahead=ahead.secret_digest)
                self.give(address, encode_image(image), departure.read, session.limits, how)
                self._give_up(session, token, address, proof)
        now = time.monotonic()
        sent_bytes = ahead.sent_bytes + departure.sent_bytes
        found = SessionMove(image.last_sequence, departure.size_bytes, sent_bytes, now - stilled)
        message = "%s went to %s in %.2f s; %d bytes were sent"
        logger.info(message, session, address, now - began, found.sent_bytes, extra=session.log_fields)
        return found

    def _may_move(self, session: Session) -> bool:
        owner = self._host.images.owners.get(session)
        return owner is not None and MOVE in owner.features and session.lease_seconds > 0

    @contextmanager
    def _leaving(self, session: Session) -> Iterator[None]:
        with self._lock:
            self._departures.begin(session)
        try:
            with ExitStack() as stack:
                if (snapshots := self._host.snapshots) is not None:
                    stack.enter_context(snapshots.paused(session))
                yield
        finally:
            with self._lock:
                self._departures.end(session)

    def _give_up(self, session: Session, token: bytes, address: str, proof: bytes) -> None:
        """Leave a session to the other daemon, for good."""
        error = MovedError(
            f"the session is at {address} now", advice="a client of this version follows it by itself"
        ).to(address, proof)
        until = time.monotonic() + session.lease_seconds
        with self._lock:
            if session.closed is not None:
                raise SessionClosedError("the session was closed while it was on its way")
            if self.target:
                self._outcomes[session.number] = SessionOutcome(session.number, session.client, True)
            tenant, is_told = session.principal.tenant, not session.is_detached
            self._departures.give_up(token, error, tenant, until, is_told=is_told)
        if (snapshots := self._host.snapshots) is not None:
            # If this daemon is killed before, a client that has not heard of the move goes on here.
            self._host.after(session.lease_seconds, snapshots.keep_on_disk(session))
        session.end(error)
        # Only now: until its end the session takes no command but to keep it.
        session.inside.executor.stillness.forget()

    # Coming

    def receive(self, image: Image, limits: Limits, contents: ContentSource, how: Handing) -> Session:
        """Restore a session, or a copy, that another daemon gives. It waits for its client. Blocks.

        Raises the errors of SessionService.Move; nothing stays then.
        """
        self._check(image, limits, is_durable=how.is_durable)
        images = self._host.images
        if how.is_ahead:
            return images.take_copy(image, contents, how.ahead)
        session = images.take_in(image, contents, how.ahead, is_durable=how.is_durable)
        logger.info("%s came from another daemon", session, extra=session.log_fields)
        return session

    def _check(self, image: Image, limits: Limits, *, is_durable: bool) -> None:
        """Raise the error of a session that cannot be here."""
        if not self._host.lease_seconds:
            raise UnsupportedError("this daemon gives no leases", advice="start it with --lease SECONDS")
        if is_durable and self._host.snapshots is None:
            raise UnsupportedError(
                "the session is durable, and this daemon keeps no state",
                advice="start it with a folder for it: heliograph serve --state DIR",
            )
        missing = set(image.owner.features) - set(self._host.features)
        if missing:
            raise UnsupportedError(
                f"the session uses features that this daemon lacks: {', '.join(sorted(missing))}",
                advice="move it to a daemon of the same version and settings",
            )
        for name in (one.name for one in fields(Limits) if one.name not in _TIMES):
            if getattr(self._host.limits, name) < getattr(limits, name):
                raise LimitExceededError(
                    f"this daemon's limit {name} is lower than that of the session",
                    advice="configure both daemons alike",
                )


def _bound() -> UnsupportedError:
    """Return the error of a session that cannot move."""
    return UnsupportedError(
        "the session belongs to its connection: it has no lease, or its client is older",
        advice="connect with reconnect=True, and a client of this version",
    )


def _size_bytes(session: Session) -> int:
    """The bytes of a session's tensors and weights."""
    inside = session.inside
    with inside.lock:
        tensors = sum(one.size_bytes for one in inside.core.resources.storages)
    return tensors + sum(size_bytes for _, size_bytes, _ in inside.contents.held())


class _Moments:
    """The moments in which a session that goes on is held still."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._left_seconds = AHEAD_SECONDS

    @contextmanager
    def still(self) -> Iterator[None]:
        """A context in which the session begins no command. Raises SnapshotFailedError."""
        began = time.monotonic()
        with held_still(self._session.inside, self._left_seconds):
            self._left_seconds = max(0.0, self._left_seconds - (time.monotonic() - began))
            check_between_commands(self._session)
            yield


def _no_links(*_: object, **__: object) -> None:
    raise UnsupportedError("this process is no daemon, so its sessions stay", advice="heliograph serve")
