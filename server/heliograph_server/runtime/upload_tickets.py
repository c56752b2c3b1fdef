"""Uploads straight into tensors of a session, by tickets: the member's side.

    add ──▸ waiting ◂──(interrupted)── uploading ──(all bytes, right digest)──▸ over
               │                           │
               └──(no bytes for ten minutes, wrong bytes, or cancelled)──▸ over, with an error

A ticket is 32 random bytes, valid until its content is over. One upload at a time uses it; others
wait.

Everything here may be called from any thread.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from heliograph_backends.contract import Tensor, UploadNews
from heliograph_proto.digests import DIGEST_BYTES, hasher
from heliograph_proto.errors import (
    CancelledError,
    ContentMismatchError,
    HeliographError,
    InvalidArgumentError,
    LimitExceededError,
    PermissionDeniedError,
    ProtocolError,
)
from heliograph_server.resources.principals import Principal, Right
from heliograph_server.resources.timers import Deadlines
from heliograph_server.session.session import Session
from heliograph_server.weights.uploads import BREAKS, IncomingUpload

logger = logging.getLogger(__name__)

TICKET_BYTES = 32
#: The length of the prefix for look-ups. The rest is compared in constant time.
NAME_BYTES = 16
#: The most contents announced in one call, and the most unfinished contents of all sessions.
MOST_AT_ONCE = 10_000
MOST_IN_ALL = 100_000
#: The longest time without bytes of a content.
IDLE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Announced:
    """An expected content: its digest, and the handle of its tensor."""

    tensor: int
    size_bytes: int
    digest: bytes


class Admission:
    """One announced content. Thread-safe; `tell` is called outside of any lock."""

    def __init__(
        self,
        session: Session,
        content: Announced,
        tensor: Tensor,
        tell: Callable[[UploadNews], None],
        over: Callable[[Admission], None],
        clock: Callable[[], float],
    ) -> None:
        self.ticket = secrets.token_bytes(TICKET_BYTES)
        self.session = session
        self.size_bytes = content.size_bytes
        self.received_bytes = 0
        #: The time of its last bytes.
        self.active = clock()
        self._digest, self._tensor, self._tell, self._over = content.digest, tensor, tell, over
        self._clock = clock
        self._hash: Any = hasher()
        self._lock = threading.Lock()
        self._upload: AdmittedUpload | None = None
        self._waiting: deque[Future[AdmittedUpload]] = deque()
        self._is_over = False
        self._error: HeliographError | None = None

    def __repr__(self) -> str:
        return f"<Admission {self.received_bytes:,} of {self.size_bytes:,} bytes>"

    @property
    def name(self) -> bytes:
        """The prefix of the ticket by which it is looked up."""
        return self.ticket[:NAME_BYTES]

    def begin(self) -> Future[AdmittedUpload]:
        """Begin an upload from `received_bytes` on, when no other one is in progress."""
        future: Future[AdmittedUpload] = Future()
        with self._lock:
            self._waiting.append(future)
        self._next()
        return future

    def _next(self) -> None:
        """Start the next upload if none is in progress; if the content is over, start all that
        wait."""
        while True:
            with self._lock:
                if not self._waiting or (self._upload is not None and not self._is_over):
                    return
                future = self._waiting.popleft()
                error = self._error
                upload = AdmittedUpload(self) if error is None else None
                if not self._is_over:
                    self._upload = upload
            if not future.set_running_or_notify_cancel():
                if upload is not None:
                    self.broke(upload)
            elif upload is not None:
                future.set_result(upload)
            elif error is not None:
                future.set_exception(error.anew())

    def write(self, upload: AdmittedUpload, data: memoryview) -> None:
        """Write the next bytes, under the upload's lock. Raises ProtocolError if they are not
        needed."""
        with self._lock:
            if self._upload is not upload:
                raise ProtocolError("the upload is over")
        self._tensor.buffer.set(self._tensor.offset_bytes + self.received_bytes, data)
        self._hash.update(data)
        self.received_bytes += data.nbytes
        self.active = self._clock()

    def finish(self, upload: AdmittedUpload) -> None:
        """Check the complete content. Raises ContentMismatchError, or the reason why it is not
        needed."""
        with self._lock:
            if self._is_over and self._error is None:
                return  # another upload completed it meanwhile
            if self._upload is not upload:
                raise self._error.anew() if self._error is not None else ProtocolError("the upload is over")
        if self._hash.digest() != self._digest:
            raise ContentMismatchError(
                "the bytes do not match the announced digest", advice="send them again"
            )
        self.end(None)

    def broke(self, upload: AdmittedUpload) -> None:
        """Interrupt an upload. Its bytes stay."""
        with self._lock:
            if self._upload is not upload or self._is_over:
                return
            self._upload = None
            self.active = self._clock()
        self._tell(UploadNews(self.received_bytes, is_over=False))
        self._next()

    def is_idle(self, before: float) -> bool:
        """True if no bytes have arrived since then."""
        return self.active <= before

    def end(self, error: HeliographError | None) -> None:
        """End the content, with an error if it will not arrive. Aborts an upload in progress.
        Idempotent."""
        with self._lock:
            if self._is_over:
                return
            self._is_over, self._error = True, error
            upload, self._upload = self._upload, None
        self._over(self)
        if error is not None and upload is not None:
            # Waits for a piece that is being written; no write follows.
            upload.abort(error)
        self._tell(UploadNews(self.received_bytes, is_over=True, error=error))
        self._next()


class AdmittedUpload(IncomingUpload):
    """An upload of an announced content, straight into its tensor and hashed on the way."""

    def __init__(self, admission: Admission) -> None:
        super().__init__(admission.size_bytes, lambda _upload: None)
        self.session = admission.session
        self.received_bytes = admission.received_bytes
        self._admission = admission
        self._aborted: HeliographError | None = None

    def _write(self, data: memoryview) -> None:
        if self._aborted is not None:
            raise self._aborted
        self._admission.write(self, data)

    def _finish(self) -> None:
        if self._aborted is not None:
            raise self._aborted
        self._admission.finish(self)

    def _abort(self, error: HeliographError) -> None:
        if self._aborted is not None:
            return
        self._aborted = error
        if isinstance(error, BREAKS):
            self._admission.broke(self)
        else:
            self._admission.end(error)


class Admissions:
    """The announced contents of a host. Thread-safe."""

    def __init__(
        self,
        idle_seconds: float = IDLE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timers = Deadlines()
        self._idle_seconds = idle_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._by_name: dict[bytes, Admission] = {}
        self._is_armed = False
        self._has_logged = False

    def __repr__(self) -> str:
        return f"<Admissions of {len(self._by_name)} contents>"

    def admit(
        self, session: Session, contents: Sequence[Announced], tell: Callable[[int, UploadNews], None]
    ) -> list[Admission]:
        """Announce contents, all or none. `tell` is called with the index of a content, from any
        thread.

        Raises LimitExceededError, InvalidArgumentError, UnknownHandleError, or the error of a
        closed session.
        """
        self._check(contents)
        made: list[Admission] = []
        try:
            for place, one in enumerate(contents):
                made.append(self._admit(session, one, partial(tell, place)))
        except HeliographError as error:
            for admission in made:
                admission.end(error)
            raise
        return made

    def _check(self, contents: Sequence[Announced]) -> None:
        if len(contents) > MOST_AT_ONCE or len(self._by_name) + len(contents) > MOST_IN_ALL:
            raise LimitExceededError(
                f"{len(contents):,} contents are announced, and {len(self._by_name):,} are unfinished; "
                f"this server allows {MOST_AT_ONCE:,} at once and {MOST_IN_ALL:,} in all",
                advice="announce fewer",
            )
        for one in contents:
            if len(one.digest) != DIGEST_BYTES or not one.size_bytes:
                raise InvalidArgumentError(
                    f"a content of {one.size_bytes} bytes with a digest of {len(one.digest)}: it must have "
                    f"bytes, and BLAKE3 has {DIGEST_BYTES}"
                )

    def _admit(self, session: Session, content: Announced, tell: Callable[[UploadNews], None]) -> Admission:
        tensor, release = session.hold_bytes(content.tensor, content.size_bytes)

        def over(admission: Admission) -> None:
            with self._lock:
                self._by_name.pop(admission.name, None)
            session.when_closing.pop(admission, None)

        def report(news: UploadNews) -> None:
            if news.is_over:
                # No write to the tensor follows.
                release()
            tell(news)

        made = Admission(session, content, tensor, report, over, self._clock)
        with self._lock:
            self._by_name[made.name] = made
            self._arm()
        session.when_closing[made] = made.end
        if (closed := session.closed) is not None:
            made.end(closed)
            raise closed.anew()
        return made

    def now(self, most: int) -> tuple[Admission, ...]:
        """Return the unfinished contents, at most so many."""
        with self._lock:
            return tuple(islice(self._by_name.values(), most))

    def find(self, ticket: bytes, principal: Principal | None = None) -> Admission:
        """Return the content of a ticket that this principal may use. Raises
        PermissionDeniedError."""
        with self._lock:
            found = self._by_name.get(ticket[:NAME_BYTES])
        # A ticket of another length differs too. The time does not reveal how much of it is right.
        is_good = hmac.compare_digest(found.ticket if found is not None else bytes(TICKET_BYTES), ticket)
        if (
            found is not None
            and is_good
            and _may_bring(found.session, principal)
            and not found.is_idle(self._clock() - self._idle_seconds)
        ):
            return found
        if not self._has_logged:
            self._has_logged = True
            logger.warning("an upload presented an invalid ticket; further ones are not logged")
        raise PermissionDeniedError(
            "the ticket is not valid: it is unknown, was used, or has expired",
            advice="request another one from the server that issued it",
        )

    def close(self) -> None:
        """End the timer thread, after the sessions have ended."""
        self._timers.close()

    def _arm(self) -> None:
        if not self._is_armed:
            self._is_armed = True
            self._timers.after(self._idle_seconds, self.expire)

    def expire(self) -> None:
        """End the contents without bytes for too long."""
        before = self._clock() - self._idle_seconds
        with self._lock:
            due = [one for one in self._by_name.values() if one.is_idle(before)]
            self._is_armed = False
            if len(due) < len(self._by_name):
                self._arm()
        if due:
            # A piece may be on its way to memory; the timer thread must not wait for it.
            threading.Thread(target=_expire_all, args=(due,), name="heliograph-expiry", daemon=True).start()


def _expire_all(admissions: Sequence[Admission]) -> None:
    error = PermissionDeniedError(
        "no bytes arrived in time; the ticket has expired", advice="request another one"
    )
    for one in admissions:
        one.end(error)


def given_up() -> CancelledError:
    """The error of contents whose announcement was cancelled."""
    return CancelledError("the announcement of the content was cancelled")


def _may_bring(session: Session, principal: Principal | None) -> bool:
    """True if a principal may use a session's tickets.

    Heads of pools give tickets to their own clients, which this daemon knows by other names.
    Tickets of other sessions are only valid for their tenant.
    """
    owner = session.principal
    return principal is None or owner.may(Right.POOL) or owner.tenant == principal.tenant
