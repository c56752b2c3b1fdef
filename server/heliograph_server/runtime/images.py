"""The sessions of a host that are restored from images: those that an earlier daemon left on disk,
and those that another daemon hands over. Any thread.

Each waits, under a place that cannot be guessed, for a client that shows its secret.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from heliograph_proto.errors import HeliographError
from heliograph_server.resources.failures import typed
from heliograph_server.runtime.opening import Opening
from heliograph_server.runtime.whereabouts import Arrivals
from heliograph_server.session.session import Session
from heliograph_server.state.image import Image, ImageOwner
from heliograph_server.state.kept_memory import Copied, KeptMemory, memory_of_copy
from heliograph_server.state.owners import principal_of
from heliograph_server.state.restore import ContentSource, Restore
from heliograph_server.state.snapshots import digest_of_secret

if TYPE_CHECKING:
    from heliograph_server.runtime.host import Host


class SessionImages:
    """The restored sessions of a host, and the owners of all."""

    def __init__(self, host: Host) -> None:
        self._host = host
        #: The owners of sessions, for their images.
        self.owners: dict[Session, ImageOwner] = {}
        self._lock = threading.Lock()
        self._arrivals = Arrivals()
        #: The copies of sessions of other daemons that came ahead, by the digests of their secrets.
        self._copies: dict[bytes, Copied] = {}

    def __repr__(self) -> str:
        return f"<SessionImages, {self._arrivals}>"

    def reopen(self, image: Image) -> Session:
        """Restore a session of an earlier daemon. Raises the errors of opening one, and
        SnapshotFailedError."""
        snapshots = self._host.snapshots
        assert snapshots is not None
        restore = partial(snapshots.restore, image)
        session, place = self._restored(image, restore, image.owner.lease_ms / 1e3, is_durable=True)
        snapshots.enter(session, image.secret_digest, image.owner)
        self._offer(image, place)
        return session

    def take_copy(self, image: Image, contents: ContentSource, ahead: bytes = b"") -> Session:
        """Restore a copy of another daemon's session, whose memory `take_in` takes. Blocks.

        Raises as `reopen`. The copy lacks what cannot be restored. `ahead`: as there."""
        with self._copy_of(ahead, image) as (kept, name):

            def copy(session: Session) -> None:
                restore = Restore(session, image, contents, kept)
                restore.run()
                with self._lock:
                    self._copies[image.secret_digest] = Copied(session, image, restore.storages)

            session, place = self._restored(image, copy, self._lease_seconds(image), name, is_durable=False)
        if session.closed is not None:
            # Perhaps before its entry.
            self.forget(session, place)
            raise session.closed.anew()
        self._offer(image, place)
        return session

    def take_in(
        self, image: Image, contents: ContentSource, ahead: bytes = b"", *, is_durable: bool
    ) -> Session:
        """Restore a session of another daemon. Blocks. Raises as `reopen`, and the first error of
        an object that cannot be restored. `ahead` is the digest of the secret of a copy that ends."""
        with self._copy_of(ahead, image) as (kept, name):

            def restore(session: Session) -> None:
                problems: list[HeliographError] = Restore(session, image, contents, kept).run()
                if problems:
                    raise problems[0].anew()

            seconds = self._lease_seconds(image)
            session, place = self._restored(image, restore, seconds, name, is_durable=is_durable)
        session.has_moved_here = True
        if is_durable and self._host.snapshots is not None:
            self._host.snapshots.enter(session, image.secret_digest, image.owner)
            self._host.snapshots.begin(session)
        self._offer(image, place)
        return session

    @contextmanager
    def _copy_of(self, ahead: bytes, image: Image) -> Iterator[tuple[KeptMemory, bytes]]:
        """A context with what an image needs of the copy that went ahead, whose session ends: its
        memory, and the name of its contents."""
        with self._lock:
            found = self._copies.get(ahead)
            if found is not None and found.image.owner == image.owner:
                del self._copies[ahead]
            else:
                found = None
        if found is None:
            yield KeptMemory(), b""
            return
        with found.session.inside.contents.lent() as name:
            kept = memory_of_copy(found, image)
            try:
                yield kept, name
            finally:
                kept.free()

    def _lease_seconds(self, image: Image) -> float:
        return min(image.owner.lease_ms / 1e3, self._host.lease_seconds)

    def _restored(
        self,
        image: Image,
        restore: Callable[[Session], None],
        lease_seconds: float,
        contents: bytes = b"",
        *,
        is_durable: bool,
    ) -> tuple[Session, bytes]:
        """Open a session and restore it. Return it with its place.

        `contents`: the name of those that it takes over, if it has no tenant."""
        owner, place = image.owner, secrets.token_bytes(32)
        opening = Opening(
            place,
            owner.client,
            owner.tenant,
            owner.features,
            principal_of(owner),
            lease_seconds,
            is_durable,
            is_restored=True,
            contents=contents,
        )
        session = self._host.add_session(opening)
        try:
            restore(session)
        except BaseException as error:
            session.close(typed(error, "restoring a session"))
            raise
        self.owners[session] = owner
        self._host.after(opening.attach_seconds(self._host.limits), partial(self._host.reap, session))
        return session, place

    def _offer(self, image: Image, place: bytes) -> None:
        with self._lock:
            self._arrivals.offer(image.secret_digest, place)

    def claim(self, token: bytes) -> bytes | None:
        """Return the place of the session with a secret, for the client that shows it; None: it is
        not a restored one, or was claimed before."""
        if not self._arrivals:
            return None
        with self._lock:
            return self._arrivals.claim(digest_of_secret(token))

    def is_unclaimed(self, place: bytes) -> bool:
        """True if the session at a place has had no client here."""
        with self._lock:
            return self._arrivals.is_unclaimed(place)

    def forget(self, session: Session, place: bytes) -> None:
        """Forget a session that has ended."""
        self.owners.pop(session, None)
        with self._lock:
            self._arrivals.forget(place)
            self._copies = {digest: one for digest, one in self._copies.items() if one.session is not session}

    def is_durable(self, session: Session) -> bool:
        """True if the session outlives its daemon."""
        return self._host.snapshots is not None and self._host.snapshots.covers(session)
