"""Takes snapshots of the durable sessions of a host: when asked, and by themselves.

A session is due when its time is over, or so many runs have begun since the last snapshot, if it
received commands meanwhile. One thread takes what is due; a snapshot that is asked for is taken on
the caller's thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

from heliograph_backends.contract import Device
from heliograph_proto.digests import digest_of
from heliograph_proto.errors import (
    DrainingError,
    HeliographError,
    SessionClosedError,
    SnapshotFailedError,
    UnsupportedError,
)
from heliograph_proto.sessions import SessionSnapshot
from heliograph_server.resources.failures import typed
from heliograph_server.resources.membership import Membership
from heliograph_server.session.session import Session
from heliograph_server.state.capture import Capture
from heliograph_server.state.image import Image, ImageOwner
from heliograph_server.state.kept_memory import KeptMemory, wanted_of
from heliograph_server.state.medium import MediumLostError
from heliograph_server.state.places import devices_of
from heliograph_server.state.restore import Restore
from heliograph_server.state.store import StateStore

logger = logging.getLogger(__name__)

#: The time that a snapshot waits for commands under way to end: one that was asked for, and one that
#: is due, which is tried again.
ASKED_SECONDS = 30.0
DUE_SECONDS = 2.0
#: The pause after a snapshot that failed.
PAUSE_SECONDS = 5.0
#: A snapshot is due before its time once so many bytes of tensors were written.
MOST_BYTES = 64 * 2**20
#: The time between two looks at what is due.
LOOK_SECONDS = 0.25


@dataclass(slots=True)
class SnapshotCounts:
    """Totals since the daemon began."""

    taken: int = 0
    failed: int = 0
    seconds: float = 0.0
    still_seconds: float = 0.0
    restored: int = 0
    broken: int = 0


@dataclass(frozen=True, slots=True)
class SnapshotFigures:
    """The snapshots of a host at one moment."""

    counts: SnapshotCounts = field(default_factory=SnapshotCounts)
    #: Bytes that were written to the store.
    written_bytes: int = 0
    #: The time since the last snapshot of the session whose last one is the oldest.
    oldest_seconds: float = 0.0
    #: How often everything that was kept was lost.
    losses: int = 0
    #: True if the place of the snapshots answers, and no other daemon has taken it over.
    is_reachable: bool = True


@dataclass(slots=True, eq=False)
class _Durable:
    """A durable session."""

    session: Session
    capture: Capture
    secret_digest: bytes
    #: The time between snapshots; 0: only when asked.
    seconds: float
    #: Held while a snapshot is taken.
    taking: threading.Lock = field(default_factory=threading.Lock)
    due_at: float = 0.0
    #: The end of the pause after one that failed.
    not_before: float = 0.0
    #: Bytes of tensors that its client had written at the last one.
    written_bytes: int = 0
    #: The commands that it had received then.
    commands: int = 0
    last: SessionSnapshot | None = None
    #: When the last one was complete, or the session was restored from it.
    taken_at: float = field(default_factory=time.monotonic)
    #: The last error, so that it is logged once.
    why: str = ""
    has_left: bool = False
    #: True once the daemon ends, or is drained: the session then stays on disk.
    is_kept: bool = False
    #: True while images may be left that newer ones have replaced. A daemon that was killed leaves
    #: some, too; a full disk would have no room for another one beside them.
    is_untidy: bool = True
    #: The losses of the store after which the last one was taken.
    after_losses: int = 0


class Snapshots:
    """The snapshots of a host's sessions, in a store, which it closes. Thread-safe."""

    def __init__(self, store: StateStore, seconds: float = 30.0, runs: int = 0) -> None:
        """`seconds` and `runs` between the snapshots that are taken by themselves; 0: none."""
        self.store = store
        self.counts = SnapshotCounts()
        #: Memory that members kept for the sessions that are restored.
        self.kept = KeptMemory()
        self._seconds = seconds
        self._runs = runs
        self._changed = threading.Condition()
        self._durable: dict[Session, _Durable] = {}
        self._closed = False
        #: True if the thread has something to do before its next look.
        self._is_woken = False
        #: The secrets' digests of the sessions that have ended here, and stay on disk.
        self._kept: set[bytes] = set()
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<Snapshots of {len(self._durable)} sessions in {self.store.medium.where}>"

    def figures(self) -> SnapshotFigures:
        """Return the figures of this moment."""
        now = time.monotonic()
        with self._changed:
            ages = [now - one.taken_at for one in self._durable.values()]
            counts = replace(self.counts)
        medium, oldest = self.store.medium, max(ages, default=0.0)
        is_reachable = medium.is_reachable and not medium.is_taken_over
        return SnapshotFigures(
            counts, self.store.statistics.written_bytes, oldest, medium.losses, is_reachable
        )

    def age_seconds(self, session: Session) -> float | None:
        """Return the time since the last snapshot of a session; None for one without any."""
        with self._changed:
            found = self._durable.get(session)
        return None if found is None else time.monotonic() - found.taken_at

    # Sessions

    def enter(self, session: Session, secret_digest: bytes, owner: ImageOwner) -> None:
        """Take snapshots of a session from now on."""
        seconds = owner.snapshot_ms / 1e3 if owner.snapshot_ms else self._seconds
        made = _Durable(session, Capture(session, self.store, secret_digest, owner), secret_digest, seconds)
        made.due_at = time.monotonic() + seconds
        made.after_losses = self.store.medium.losses
        with self._changed:
            self._durable[session] = made
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="heliograph-snapshots", daemon=True)
                self._thread.start()

    @contextmanager
    def paused(self, session: Session) -> Iterator[None]:
        """A context in which no snapshot of a session is taken."""
        with self._changed:
            found = self._durable.get(session)
        with found.taking if found is not None else nullcontext():
            yield

    def covers(self, session: Session) -> bool:
        """True if snapshots of a session are taken."""
        with self._changed:
            return session in self._durable

    def keep_on_disk(self, session: Session) -> Callable[[], None]:
        """Keep what is on disk of a session that is about to end here, since another daemon has it.

        Return what removes it."""
        with self._changed:
            found = self._durable.pop(session, None)
        if found is None:
            return lambda: None
        found.has_left = True
        return partial(self.store.forget, found.secret_digest)

    def leave(self, session: Session) -> None:
        """A session has ended: what is on disk of it is removed, unless the daemon ends too."""
        with self._changed:
            found = self._durable.pop(session, None)
        if found is None:
            return
        found.has_left = True
        if not found.is_kept:
            with found.taking:
                self.store.forget(found.secret_digest)

    def begin(self, session: Session) -> None:
        """Take the first snapshot of a session, so that everything after can be done again.

        A session of which none can be taken is closed, and the error raised."""
        try:
            self.take(session)
        except BaseException as error:
            session.close(typed(error, "opening a durable session"))
            raise

    def restore(self, image: Image, session: Session) -> None:
        """Restore an image into a new session. Raises SnapshotFailedError."""
        for problem in Restore(session, image, self.store, self.kept).run():
            logger.warning("%s: something is lost: %s", session, problem, extra=session.log_fields)
        with self._changed:
            self.counts.restored += 1

    # Snapshots

    def take(self, session: Session, wait_seconds: float = ASKED_SECONDS) -> SessionSnapshot:
        """Take a snapshot of a session now. Blocks.

        Raises UnsupportedError for a session that is not durable, SnapshotFailedError, or the error
        that closed the session.
        """
        with self._changed:
            found = self._durable.get(session)
        if found is None:
            raise not_durable()
        with found.taking:
            return self._take(found, wait_seconds)

    def _take(self, found: _Durable, wait_seconds: float) -> SessionSnapshot:
        if found.has_left:
            raise SessionClosedError("the session has ended", advice="open another")
        written_bytes, commands = found.session.traffic.written_bytes, found.session.commands
        losses = self.store.medium.losses
        self._tidy(found)
        try:
            made = found.capture.take(wait_seconds)
        except BaseException:
            found.not_before = time.monotonic() + PAUSE_SECONDS
            with self._changed:
                self.counts.failed += 1
            raise
        found.last, found.why = made, ""
        found.written_bytes, found.commands, found.after_losses = written_bytes, commands, losses
        found.taken_at = time.monotonic()
        found.due_at = found.taken_at + found.seconds
        with self._changed:
            self.counts.taken += 1
            self.counts.seconds += made.seconds
            self.counts.still_seconds += made.still_seconds
        found.session.tell_durable(made.sequence)
        with self._changed:
            # The thread does it: removing takes long, and the client waits for the snapshot alone.
            found.is_untidy = self._is_woken = True
            self._changed.notify_all()
        return made

    def _tidy(self, found: _Durable) -> None:
        """Remove what the last snapshot replaced. Under `taking`."""
        if found.is_untidy and not found.has_left:
            found.is_untidy = False
            self.store.tidy(found.secret_digest)

    def _run(self) -> None:
        while not self._closed:
            with self._changed:
                self._is_woken = False
                untidy = [one for one in self._durable.values() if one.is_untidy]
            for found in untidy:
                if found.taking.acquire(blocking=False):
                    try:
                        self._tidy(found)
                    finally:
                        found.taking.release()
            for found in self._due():
                self._take_due(found)
            self.store.copies.rest()
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._is_woken, LOOK_SECONDS)

    def _due(self) -> list[_Durable]:
        now = time.monotonic()
        with self._changed:
            return [one for one in self._durable.values() if self._is_due(one, now)]

    def _is_due(self, found: _Durable, now: float) -> bool:
        commands = found.session.commands
        if now < found.not_before:
            return False
        if found.after_losses != self.store.medium.losses:
            # The client keeps nothing from before its last snapshot, so there must be one.
            return True
        # A loop under way is after the last command of a snapshot.
        if commands == (found.last.sequence if found.last is not None else 0):
            return False
        is_late = bool(found.seconds) and now >= found.due_at
        written_bytes = found.session.traffic.written_bytes - found.written_bytes
        has_much = bool(self._seconds) and written_bytes >= MOST_BYTES
        return is_late or has_much or bool(self._runs and commands - found.commands >= self._runs)

    def _take_due(self, found: _Durable) -> None:
        if not found.taking.acquire(blocking=False):
            return
        try:
            self._take(found, DUE_SECONDS)
            # Before those that are due with it, so that one session at a time needs more room.
            self._tidy(found)
        except Exception as error:
            why = error.message if isinstance(error, HeliographError) else repr(error)
            if why != found.why and not found.has_left:
                found.why = why
                logger.warning("%s: %s", found.session, why, extra=found.session.log_fields)
        finally:
            found.taking.release()

    # The end

    def keep_all(self, pool: Membership | None = None, wait_seconds: float = DUE_SECONDS) -> None:
        """Take the last snapshots of the sessions, before they end and stay on disk: for the next
        daemon, or for `restore_kept`.

        The members of its pool then keep their memory, which the next head takes up."""
        with self._changed:
            left = list(self._durable.values())
            for found in left:
                found.is_kept = True
            self._kept.update(one.secret_digest for one in left)
        for found in left:
            with found.taking:
                try:
                    self._take(found, wait_seconds)
                except Exception as error:
                    logger.warning("%s: %s", found.session, error, extra=found.session.log_fields)
        if self._kept and pool is not None:
            pool.let_go()

    def has_kept(self, secret_digest: bytes) -> bool:
        """True if a session that has ended here stays on disk."""
        return secret_digest in self._kept

    def restore_kept(self, reopen: Reopen) -> None:
        """Restore the sessions that have ended and stay on disk, since the daemon goes on. Blocks."""
        for digest in tuple(self._kept):
            image, problems = self.store.newest(digest)
            if image is None:
                self.tell_broken(digest.hex(), problems[0] if problems else _not_there())
            elif not self.reopen(image, reopen):
                return
            self._kept.discard(digest)

    def reopen(self, image: Image, reopen: Reopen) -> bool:
        """Restore a session, or report that it is broken. False if the daemon drains.

        Raises MediumLostError."""
        began = time.monotonic()
        try:
            session = reopen(image)
        except DrainingError:
            return False
        except MediumLostError:
            raise
        except Exception as error:
            self.tell_broken(image.secret_digest.hex(), error)
            return True
        took = time.monotonic() - began
        logger.info("%s was restored after command %d in %.2f s", session, image.last_sequence, took)
        return True

    def tell_broken(self, name: str, error: Exception) -> None:
        """Report a session that cannot be restored, by its name."""
        self.counts.broken += 1
        logger.error("session %s cannot be restored: %s", name[:16], error)

    def close(self) -> None:
        """End the thread, and let another daemon use the store. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(ASKED_SECONDS)
        self.store.close()


def digest_of_secret(secret: bytes) -> bytes:
    """The name of a session on disk."""
    return digest_of(b"session" + secret)


def not_durable() -> UnsupportedError:
    """Return the error of a session of which no snapshots are taken."""
    return UnsupportedError(
        "no snapshots are taken of this session",
        advice="connect with durable=True to a daemon that keeps state: heliograph serve --state DIR, or "
        "--state grpc://OTHER:7070",
    )


def _not_there() -> SnapshotFailedError:
    return SnapshotFailedError("its snapshots are gone", advice="connect again")


#: Restores an image, and returns the session.
Reopen = Callable[[Image], Session]


def _take_up(snapshots: Snapshots, pool: Membership, own: Sequence[Device], images: Sequence[Image]) -> None:
    """Wait for the members on which images have something, and take up what they kept."""
    names = {one.name for one in own}
    needed = devices_of(images, snapshots.store) - names
    if needed:
        pool.await_devices(needed)
    wanted = wanted_of(images, names) if needed else ()
    for place, buffer in pool.take_up(wanted):
        snapshots.kept.add(wanted[place], buffer)


def recover(snapshots: Snapshots, pool: Membership | None, own: Sequence[Device], reopen: Reopen) -> None:
    """Restore every session in the store, each alone: one that is broken is reported, and hurts no
    other. `own`: the devices of this host; its pool has others.

    Raises MediumLostError if the store cannot be read now."""
    images, broken = snapshots.store.load()
    for one in broken:
        snapshots.tell_broken(one.name, one.error)
    if pool is not None:
        _take_up(snapshots, pool, own, images)
    for image in images:
        snapshots.reopen(image, reopen)
    snapshots.kept.free()
