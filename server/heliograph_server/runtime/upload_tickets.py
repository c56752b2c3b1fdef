"""Contents that others bring straight into tensors of a session, by tickets: a member's side.

    add ──▸ waiting ◂──(broke off)── coming ──(all bytes, right digest)──▸ over
               │                        │
               └──(void, or void of bytes for ten minutes, or wrong bytes)──▸ over, with an error

A ticket is 32 random bytes. It is good until its content is over; one upload at a time has it, others wait.

Any thread.
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
#: By how many of them one is looked up; the others are compared in constant time.
NAME_BYTES = 16
#: The most contents that are announced in one call, and the most of all sessions that are not over.
MOST_AT_ONCE = 10_000
MOST_IN_ALL = 100_000
#: How long nothing may come of a content.
IDLE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Announced:
    """A content to come: its digest, and the handle of the tensor to which it goes."""

    tensor: int
    size_bytes: int
    digest: bytes


class Admission:
    """One announced content. Thread-safe; `tell` is called outside of any lock."""

    def __init__(
        self,
        session: Session,
        what: Announced,
        tensor: Tensor,
        tell: Callable[[UploadNews], None],
        over: Callable[[Admission], None],
        clock: Callable[[], float],
    ) -> None:
        self.ticket = secrets.token_bytes(TICKET_BYTES)
        self.session = session
        self.size_bytes = what.size_bytes
        self.received_bytes = 0
        #: When something of it came last.
        self.active = clock()
        self._digest, self._tensor, self._tell, self._over = what.digest, tensor, tell, over
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
        """What of the ticket it is looked up by."""
        return self.ticket[:NAME_BYTES]

    def begin(self) -> Future[AdmittedUpload]:
        """An upload from `received_bytes` on, once nobody else has one."""
        future: Future[AdmittedUpload] = Future()
        with self._lock:
            self._waiting.append(future)
        self._next()
        return future

    def _next(self) -> None:
        """Lets the next one upload, if nobody does; all that wait, if there is nothing more to upload."""
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
                future.set_exception(error)

    def write(self, upload: AdmittedUpload, data: memoryview) -> None:
        """The next bytes; under the upload's lock. Raises ProtocolError when they are not wanted any more."""
        with self._lock:
            if self._upload is not upload:
                raise ProtocolError("the upload is over")
        self._tensor.buffer.set(self._tensor.offset_bytes + self.received_bytes, data)
        self._hash.update(data)
        self.received_bytes += data.nbytes
        self.active = self._clock()

    def finish(self, upload: AdmittedUpload) -> None:
        """All bytes came. Raises ContentMismatchError, or why they are not wanted any more."""
        with self._lock:
            if self._is_over and self._error is None:
                return  # another upload brought it meanwhile
            if self._upload is not upload:
                raise self._error.anew() if self._error is not None else ProtocolError("the upload is over")
        if self._hash.digest() != self._digest:
            raise ContentMismatchError("the bytes do not have the digest announced", advice="send them again")
        self.end(None)

    def broke(self, upload: AdmittedUpload) -> None:
        """An upload ended before its end; what came stays."""
        with self._lock:
            if self._upload is not upload or self._is_over:
                return
            self._upload = None
            self.active = self._clock()
        self._tell(UploadNews(self.received_bytes, is_over=False))
        self._next()

    def is_idle(self, before: float) -> bool:
        """Whether nothing came since then."""
        return self.active <= before

    def end(self, error: HeliographError | None) -> None:
        """The content is there, or will not come. An upload that is under way is told so. Idempotent."""
        with self._lock:
            if self._is_over:
                return
            self._is_over, self._error = True, error
            upload, self._upload = self._upload, None
        self._over(self)
        if error is not None and upload is not None:
            # Waits for a piece that is being written: afterwards nobody writes there.
            upload.abort(error)
        self._tell(UploadNews(self.received_bytes, is_over=True, error=error))
        self._next()


class AdmittedUpload(IncomingUpload):
    """Bytes of an announced content, straight into its tensor, and hashed on the way."""

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
    """All of a host. Thread-safe."""

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
        self._was_told = False

    def __repr__(self) -> str:
        return f"<Admissions of {len(self._by_name)} contents>"

    def admit(
        self, session: Session, wanted: Sequence[Announced], tell: Callable[[int, UploadNews], None]
    ) -> list[Admission]:
        """Announces contents; `tell` is called with the place of each, from any thread. All or none.

        Raises LimitExceededError, InvalidArgumentError, UnknownHandleError, or why the session is closed.
        """
        self._check(wanted)
        made: list[Admission] = []
        try:
            for place, one in enumerate(wanted):
                made.append(self._admit(session, one, _telling(tell, place)))
        except HeliographError as error:
            for admission in made:
                admission.end(error)
            raise
        return made

    def _check(self, wanted: Sequence[Announced]) -> None:
        if len(wanted) > MOST_AT_ONCE or len(self._by_name) + len(wanted) > MOST_IN_ALL:
            raise LimitExceededError(
                f"{len(wanted):,} contents are announced, beside {len(self._by_name):,} that have not come; "
                f"this server takes {MOST_AT_ONCE:,} at once and {MOST_IN_ALL:,} in all",
                advice="announce fewer",
            )
        for one in wanted:
            if len(one.digest) != DIGEST_BYTES or not one.size_bytes:
                raise InvalidArgumentError(
                    f"a content of {one.size_bytes} bytes with a digest of {len(one.digest)}: it must have "
                    f"bytes, and BLAKE3 has {DIGEST_BYTES}"
                )

    def _admit(self, session: Session, what: Announced, tell: Callable[[UploadNews], None]) -> Admission:
        tensor, let_go = session.hold_bytes(what.tensor, what.size_bytes)

        def over(admission: Admission) -> None:
            with self._lock:
                self._by_name.pop(admission.name, None)
            session.when_closing.pop(admission, None)

        def told(news: UploadNews) -> None:
            if news.is_over:
                # Only now does nobody write there any more.
                let_go()
            tell(news)

        made = Admission(session, what, tensor, told, over, self._clock)
        with self._lock:
            self._by_name[made.name] = made
            self._arm()
        session.when_closing[made] = made.end
        if (closed := session.closed) is not None:
            made.end(closed)
            raise closed
        return made

    def find(self, ticket: bytes, principal: Principal | None = None) -> Admission:
        """The content that a ticket is for; where it matters who asks, one that may be theirs. Raises
        PermissionDeniedError."""
        with self._lock:
            found = self._by_name.get(ticket[:NAME_BYTES])
        # A ticket of another length differs as well; nobody learns how much of one is right.
        is_good = hmac.compare_digest(found.ticket if found is not None else bytes(TICKET_BYTES), ticket)
        if (
            found is not None
            and is_good
            and _may_bring(found.session, principal)
            and not found.is_idle(self._clock() - self._idle_seconds)
        ):
            return found
        if not self._was_told:
            self._was_told = True
            logger.warning("an upload showed a ticket that is not valid; further ones are not logged")
        raise PermissionDeniedError(
            "the ticket is not valid: it was never given out, was used, or is void",
            advice="ask the server that gave it for another",
        )

    def close(self) -> None:
        """Ends the thread of its timers. After the sessions."""
        self._timers.close()

    def _arm(self) -> None:
        if not self._is_armed:
            self._is_armed = True
            self._timers.after(self._idle_seconds, self.expire)

    def expire(self) -> None:
        """Ends those of which nothing came for as long as it may."""
        before = self._clock() - self._idle_seconds
        with self._lock:
            due = [one for one in self._by_name.values() if one.is_idle(before)]
            self._is_armed = False
            if len(due) < len(self._by_name):
                self._arm()
        if due:
            # A piece may be on its way to memory, for which the timer thread must not wait.
            threading.Thread(target=_void, args=(due,), name="heliograph-expiry", daemon=True).start()


def _void(admissions: Sequence[Admission]) -> None:
    error = PermissionDeniedError("nothing came for too long, so the ticket is void", advice="ask again")
    for one in admissions:
        one.end(error)


def _telling(tell: Callable[[int, UploadNews], None], place: int) -> Callable[[UploadNews], None]:
    return lambda news: tell(place, news)


def given_up() -> CancelledError:
    """The error of contents that nobody waits for any more."""
    return CancelledError("who announced the content does not wait for it any more")


def _may_bring(session: Session, principal: Principal | None) -> bool:
    """Whether somebody may use a session's tickets. Heads of pools give theirs to clients of their own, whom
    this daemon knows by other names; everybody else's are good for their tenant alone."""
    owner = session.principal
    return principal is None or owner.may(Right.POOL) or owner.tenant == principal.tenant
