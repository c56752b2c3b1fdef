"""The image of a session that another daemon takes, and its contents, read where they are.

The session is held still meanwhile, so no copy of it is made: contents are read from their devices
when the other daemon asks for them. For a copy that goes ahead, the session is still only while a
few pieces are read; the copy lacks what changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from heliograph_backends.contract import host_bytes
from heliograph_proto.digests import digest_of
from heliograph_proto.errors import (
    HeliographError,
    MissingContentError,
    SessionClosedError,
    SnapshotFailedError,
    UnsupportedError,
)
from heliograph_proto.plans import CompileRequest
from heliograph_server.resources.handles import HandleStorage
from heliograph_server.session.session import Session
from heliograph_server.state.capture import PIECE_BYTES
from heliograph_server.state.image import Image, ImageOwner, ImageRename, ImageStorage, ImageWeight
from heliograph_server.state.listing import Listing
from heliograph_server.state.requests import encode_request
from heliograph_server.state.store import now_us

#: The bytes that are read at once. A session that is not still is held so for each time.
BATCH_BYTES = 8 * PIECE_BYTES
#: The threads that hash a piece.
HASH_THREADS = 2
#: Reads a content in pieces, each valid until the next one.
Read = Callable[[], Iterator[memoryview]]


@dataclass(frozen=True, slots=True)
class KnownBytes:
    """The digests of a storage's bytes when it had this version."""

    version: int
    pieces: tuple[bytes, ...]


class Departure:
    """A session as another daemon restores it."""

    def __init__(
        self,
        session: Session,
        secret_digest: bytes,
        owner: ImageOwner,
        known: Mapping[HandleStorage, KnownBytes] | None = None,
        still: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Make the image. `secret_digest`: that of the secret there. `known`: what a copy that went
        ahead had. `still` holds the session still; the default is for one that is.

        Blocks. Raises UnsupportedError for what cannot go, the error that closed the session, and
        those of `still`.
        """
        self._session = session
        self._still = still
        self._known = known or {}
        #: The digests of the storages.
        self.known: dict[HandleStorage, KnownBytes] = {}
        self._contents: dict[bytes, Read] = {}
        #: The pieces that were read last, by their digests.
        self._read: dict[bytes, memoryview] = {}
        #: The bytes of contents that were read.
        self.sent_bytes = 0
        inside = session.inside
        with still(), inside.lock:
            if inside.core.closed is not None:
                raise inside.core.closed.anew()
            listing = Listing(inside.core)
            image = listing.image(secret_digest, owner)
            versions = [one.version for one in listing.storages]
        _check(image, listing)
        storages = tuple(
            self._with_pieces(*one) for one in zip(image.storages, listing.storages, versions, strict=True)
        )
        weights = tuple(self._weight(*one) for one in inside.contents.held())
        renamed = tuple(ImageRename(*one) for one in inside.devices.names.now.items())
        image = replace(image, storages=storages, weights=weights, renamed=renamed)
        self.image = self._with_requests(image, listing)

    def __repr__(self) -> str:
        return f"<Departure of {self._session}, {len(self._contents)} contents>"

    @property
    def size_bytes(self) -> int:
        """The bytes of the session's tensors and weights."""
        image = self.image
        return sum(one.size_bytes for one in image.storages) + sum(one.size_bytes for one in image.weights)

    def with_messages(self, acknowledged: int, messages: Sequence[bytes]) -> Image:
        """Return the image, with the messages that the client has not acknowledged."""
        return replace(self.image, acknowledged=acknowledged, messages=tuple(messages), time_us=now_us())

    def read(self, digest: bytes) -> Iterator[memoryview]:
        """Read a content in pieces, each valid until the next one.

        Raises SnapshotFailedError for one that is not of this session, and MissingContentError for
        one that is gone, or has changed.
        """
        found = self._contents.get(digest)
        if found is None:
            raise SnapshotFailedError("the other daemon asks for a content that the session does not have")
        for piece in found():
            self.sent_bytes += piece.nbytes
            yield piece

    def _with_pieces(self, found: ImageStorage, storage: HandleStorage, version: int) -> ImageStorage:
        """Return a storage with the digests of its bytes, or the error with which they are read."""
        size_bytes, known = found.buffer_bytes, self._known.get(storage)
        if not size_bytes or found.error is not None:
            return found
        try:
            if known is None or known.version != version:
                batches = (
                    self._pieces(storage, version, start, size_bytes)
                    for start in range(0, size_bytes, BATCH_BYTES)
                )
                digests = (digest_of(piece, HASH_THREADS) for pieces in batches for piece in pieces)
                known = KnownBytes(version, tuple(digests))
        except (SnapshotFailedError, SessionClosedError):
            raise
        except HeliographError as error:
            return replace(found, error=error)
        self.known[storage] = known
        for place, digest in enumerate(known.pieces):
            self._contents[digest] = partial(self._read_piece, storage, known, place, size_bytes)
        return replace(found, pieces=known.pieces)

    def _read_piece(
        self, storage: HandleStorage, known: KnownBytes, place: int, size_bytes: int
    ) -> Iterator[memoryview]:
        digest = known.pieces[place]
        if digest not in self._read:
            # The next ones are asked for next.
            self._read.clear()
            pieces = self._pieces(storage, known.version, place * PIECE_BYTES, size_bytes)
            self._read.update(zip(known.pieces[place:], pieces, strict=False))
        yield self._read[digest]

    def _pieces(
        self, storage: HandleStorage, version: int, start: int, size_bytes: int
    ) -> Sequence[memoryview]:
        """Read the next pieces that a storage had at a version.

        Raises MissingContentError if it has other bytes."""
        space = host_bytes(np.empty(min(BATCH_BYTES, size_bytes - start), np.uint8))
        with self._still():
            if (closed := self._session.closed) is not None:
                raise closed.anew()
            if storage.version != version or storage.buffer is None:
                raise MissingContentError("a tensor has changed since its session was listed")
            storage.buffer.get(start, space)
        return [space[offset : offset + PIECE_BYTES] for offset in range(0, space.nbytes, PIECE_BYTES)]

    def _weight(self, digest: bytes, size_bytes: int, _: bool) -> ImageWeight:
        contents = self._session.inside.contents

        def read() -> Iterator[memoryview]:
            with contents.reading(digest) as pieces:
                yield from pieces

        self._contents[digest] = read
        return ImageWeight(digest, size_bytes)

    def _with_requests(self, image: Image, listing: Listing) -> Image:
        def digest(handle: int) -> bytes:
            request = listing.requests.get(handle)
            if request is None:
                return b""
            data = encode_request(request)
            self._contents[found := digest_of(data)] = lambda: iter((memoryview(data),))
            return found

        return replace(
            image,
            plans=tuple(replace(one, request=digest(one.handle)) for one in image.plans),
            reservations=tuple(replace(one, request=digest(one.handle)) for one in image.reservations),
        )


def _check(image: Image, listing: Listing) -> None:
    """Raise UnsupportedError for what lives in this daemon alone."""
    if any(one.is_mapped for one in image.storages):
        raise UnsupportedError(
            "the session maps memory of a tensor, which stays on this host",
            advice="free mapped tensors first",
        )
    for request in listing.requests.values():
        if isinstance(request, CompileRequest) and request.options.partition is not None:
            raise UnsupportedError(
                "the session has a plan that exchanges values with other daemons, which know this one",
                advice="free that plan first",
            )
