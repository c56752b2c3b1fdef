"""The image of a session that another daemon takes, and its contents, read where they are.

The session is held still meanwhile, so nothing is copied: each content is read from its device when
the other daemon asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from heliograph_backends.contract import host_bytes
from heliograph_proto.digests import digest_of
from heliograph_proto.errors import HeliographError, SnapshotFailedError, UnsupportedError
from heliograph_proto.plans import CompileRequest
from heliograph_server.resources.handles import HandleStorage
from heliograph_server.session.session import Session
from heliograph_server.state.capture import PIECE_BYTES
from heliograph_server.state.image import Image, ImageOwner, ImageRename, ImageStorage, ImageWeight
from heliograph_server.state.listing import Listing
from heliograph_server.state.requests import encode_request
from heliograph_server.state.store import now_us

#: The threads that hash a piece.
HASH_THREADS = 2
#: Reads a content in pieces, each valid until the next one.
Read = Callable[[], Iterator[memoryview]]


class Departure:
    """A session that is held still, as another daemon restores it."""

    def __init__(self, session: Session, secret_digest: bytes, owner: ImageOwner) -> None:
        """Make the image. `secret_digest`: that of the secret there.

        Blocks. Raises UnsupportedError for what cannot go, and the error that closed the session.
        """
        self._session = session
        self._contents: dict[bytes, Read] = {}
        #: The bytes of contents that were read.
        self.sent_bytes = 0
        inside = session.inside
        with inside.lock:
            if inside.core.closed is not None:
                raise inside.core.closed.anew()
            listing = Listing(inside.core)
            image = listing.image(secret_digest, owner)
        _check(image, listing)
        storages = tuple(
            self._with_pieces(one, storage)
            for one, storage in zip(image.storages, listing.storages, strict=True)
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

        Raises SnapshotFailedError for one that is not of this session, and MissingContentError.
        """
        found = self._contents.get(digest)
        if found is None:
            raise SnapshotFailedError("the other daemon asks for a content that the session does not have")
        for piece in found():
            self.sent_bytes += piece.nbytes
            yield piece

    def _with_pieces(self, found: ImageStorage, storage: HandleStorage) -> ImageStorage:
        """Return a storage with the digests of its bytes."""
        if storage.buffer is None or found.error is not None:
            return found
        buffer, digests = storage.buffer, []
        space = host_bytes(np.empty(min(PIECE_BYTES, max(1, buffer.size_bytes)), np.uint8))
        try:
            for start in range(0, buffer.size_bytes, PIECE_BYTES):
                piece = space[: min(PIECE_BYTES, buffer.size_bytes - start)]
                buffer.get(start, piece)
                digests.append(digest_of(piece, HASH_THREADS))
                self._contents[digests[-1]] = _reader_of(storage, start, piece.nbytes)
        except HeliographError as error:
            return replace(found, error=error)
        return replace(found, pieces=tuple(digests))

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


def _reader_of(storage: HandleStorage, start: int, size_bytes: int) -> Read:
    def read() -> Iterator[memoryview]:
        space = host_bytes(np.empty(size_bytes, np.uint8))
        storage.buffer.get(start, space)
        yield space

    return read


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
