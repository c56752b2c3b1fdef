"""Takes images of sessions: what they hold between two commands, or two steps of a loop.

The session is held still only while its handles are listed and the bytes that changed since the
last image are copied in memory. They are hashed and written while its runs go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from heliograph_proto.errors import HeliographError, MissingContentError, SnapshotFailedError
from heliograph_proto.sessions import SessionSnapshot
from heliograph_server.resources.handles import HandleStorage
from heliograph_server.session.parts.edges import LoopState
from heliograph_server.session.parts.inside import SessionInside
from heliograph_server.session.session import Session
from heliograph_server.state.files import Copies, touch
from heliograph_server.state.image import Image, ImageLoop, ImageOutput, ImageOwner, ImageRename, ImageWeight
from heliograph_server.state.listing import Listing
from heliograph_server.state.requests import Request, encode_request
from heliograph_server.state.store import Pins, StateStore, now_us

logger = logging.getLogger(__name__)

#: The size of the pieces of a storage: what one changed byte costs at most.
PIECE_BYTES = 4 * 2**20


T = TypeVar("T")


@dataclass(slots=True)
class _Known:
    """The digests of a storage's bytes when it had this version."""

    version: int
    pieces: tuple[bytes, ...]


@dataclass(slots=True)
class _Taken:
    """An image without contents, and what they are made of."""

    image: Image
    listing: Listing
    versions: list[int]
    #: The storages that a loop under way writes, and the states of loops.
    written: frozenset[HandleStorage]
    loops: dict[int, LoopState]
    #: Copies of the storages that changed, by their place.
    copies: dict[int, memoryview] = field(default_factory=dict)


class Capture:
    """Takes images of one session. `owner` is part of each. One thread at a time."""

    def __init__(self, session: Session, store: StateStore, secret_digest: bytes, owner: ImageOwner) -> None:
        self._session = session
        self._store = store
        self._secret_digest = secret_digest
        self._owner = owner
        self._known: dict[HandleStorage, _Known] = {}
        #: The losses of the store after which these were written.
        self._losses = store.medium.losses
        #: True after an attempt that commands under way did not let begin.
        self._was_busy = False
        #: Requests of plans and reservations, with the digests of their encodings, by handle.
        self._requests: dict[int, tuple[Request, bytes]] = {}

    def __repr__(self) -> str:
        return f"<Capture of {self._session}>"

    def take(self, wait_seconds: float) -> SessionSnapshot:
        """Take an image and write it, once the commands received so far have ended.

        Raises SnapshotFailedError if they have not within `wait_seconds`, or for a full or broken
        disk; the image before it stays.
        """
        # Before the session is held still for nothing.
        self._store.check()
        with self._store.copies.snapshot():
            return self._take(wait_seconds)

    def _take(self, wait_seconds: float) -> SessionSnapshot:
        began = time.monotonic()
        inside, losses = self._session.inside, self._store.medium.losses
        if losses != self._losses:
            self._known.clear()
        # An attempt that is made again and again does not cost that each time.
        spaces = {} if self._was_busy else self._spaces(inside)
        self._was_busy = True
        with held_still(inside, wait_seconds):
            self._was_busy, stilled = False, time.monotonic()
            taken = self._picture(inside)
            self._copy(taken, spaces)
        del spaces
        still_seconds = time.monotonic() - stilled
        with self._store.pinned() as pins:
            image = self._write(taken, pins, inside)
            digest = self._store.commit(image, pins)
        self._remember(taken, image)
        self._losses = losses
        size_bytes = sum(one.size_bytes for one in image.storages)
        size_bytes += sum(one.size_bytes for one in image.weights)
        seconds, written = time.monotonic() - began, pins.written_bytes
        return SessionSnapshot(image.last_sequence, size_bytes, written, seconds, still_seconds, digest)

    def _spaces(self, inside: SessionInside) -> dict[HandleStorage, memoryview]:
        """Make the memory for copies of what has changed so far, while runs go on: fresh memory
        takes longer than the copy."""
        with inside.lock:
            changed = [one for one in inside.core.resources.storages if self._may_differ(one)]
            spaces = {one: _space_for(one, self._store.copies) for one in changed if one.buffer is not None}
        for space in spaces.values():
            touch(space)
        return spaces

    def _may_differ(self, storage: HandleStorage) -> bool:
        """True if a storage may have other bytes than in the last image."""
        known = self._known.get(storage)
        return known is None or known.version != storage.version or storage.is_mapped

    # Still

    def _picture(self, inside: SessionInside) -> _Taken:
        with inside.lock:
            if inside.core.closed is not None:
                raise inside.core.closed.anew()
            listing, executor = Listing(inside.core), inside.executor
            held = executor.stillness.held
            run = inside.core.run_under_way(held) if held else None
            image = listing.image(self._secret_digest, self._owner, () if run is None else run.makes)
            states = executor.resumable.states()
        if run is not None:
            states[held] = executor.edges.held(held).state()
            # Its command comes again, and what it makes is made then.
            image = replace(image, last_sequence=held - 1)
        weights = tuple(ImageWeight(*one) for one in inside.contents.held())
        keep = self._session.keep_messages
        acknowledged, messages = self._session.kept_messages if keep is None else keep()
        renamed = tuple(ImageRename(*one) for one in inside.devices.names.now.items())
        image = replace(image, weights=weights, messages=messages, acknowledged=acknowledged)
        image = replace(image, time_us=now_us(), renamed=renamed)
        written = frozenset() if run is None else run.writes
        return _Taken(image, listing, [one.version for one in listing.storages], written, states)

    def _copy(self, taken: _Taken, spaces: dict[HandleStorage, memoryview]) -> None:
        """Copy the storages that may have changed since the last image."""
        for place, storage in enumerate(taken.listing.storages):
            # The version is that of a loop's beginning.
            if storage.buffer is None or not (self._may_differ(storage) or storage in taken.written):
                continue
            copy = spaces.pop(storage, None) or _space_for(storage, self._store.copies)
            try:
                storage.buffer.get(0, copy)
            except HeliographError as error:
                taken.image = _without(taken.image, place, error)
            else:
                taken.copies[place] = copy

    # While runs go on

    def _write(self, taken: _Taken, pins: Pins, inside: SessionInside) -> Image:
        # Threads write them, and each copy is freed once its pieces are written.
        written = {place: _add(taken.copies.pop(place), pins) for place in list(taken.copies)}
        storages = list(taken.image.storages)
        for place, storage in enumerate(taken.listing.storages):
            if (adding := written.get(place)) is not None:
                pieces = _all(adding)
            elif (known := self._known.get(storage)) is not None and storages[place].error is None:
                pieces = known.pieces
                if not pins.keep(pieces):
                    self._known.clear()
                    raise SnapshotFailedError(
                        f"something is gone from {self._store.medium.shown}",
                        advice="the next snapshot is whole",
                    )
            else:
                continue
            storages[place] = replace(storages[place], pieces=pieces)
        loops = tuple(self._write_loop(*one, pins) for one in taken.loops.items())
        image = replace(taken.image, storages=tuple(storages), loops=loops)
        writing = [pins.threads.submit(_write_weight, one, pins, inside) for one in image.weights]
        weights = tuple(one for one, is_here in zip(image.weights, _all(writing), strict=True) if is_here)
        return self._with_requests(replace(image, weights=weights), taken.listing, pins)

    def _write_loop(self, sequence: int, state: LoopState, pins: Pins) -> ImageLoop:
        outputs = tuple(
            ImageOutput(place, _all(_add(memoryview(data), pins))) for place, data in state.outputs.items()
        )
        return ImageLoop(sequence, state.steps, outputs, state.unsent)

    def _with_requests(self, image: Image, listing: Listing, pins: Pins) -> Image:
        before, self._requests = self._requests, {}
        adding: dict[int, Future[bytes]] = {}
        for handle, request in listing.requests.items():
            known = before.get(handle)
            if known is not None and known[0] is request and pins.keep((known[1],)):
                self._requests[handle] = known
            else:
                adding[handle] = pins.add(memoryview(encode_request(request)))
        self._requests |= {handle: (listing.requests[handle], one.result()) for handle, one in adding.items()}

        def digest(handle: int) -> bytes:
            return self._requests[handle][1] if handle in self._requests else b""

        return replace(
            image,
            plans=tuple(replace(one, request=digest(one.handle)) for one in image.plans),
            reservations=tuple(replace(one, request=digest(one.handle)) for one in image.reservations),
        )

    def _remember(self, taken: _Taken, image: Image) -> None:
        """Remember the digests of an image that was written."""
        self._known = {
            storage: _Known(version, found.pieces)
            for storage, version, found in zip(
                taken.listing.storages, taken.versions, image.storages, strict=True
            )
            if found.pieces and storage not in taken.written
        }


@contextmanager
def held_still(inside: SessionInside, seconds: float) -> Iterator[None]:
    """A context in which a session begins no command and no compile.

    Raises SnapshotFailedError if the commands received so far have not ended within `seconds`.
    """
    end = time.monotonic() + seconds
    if not inside.compiler.busy.acquire(timeout=seconds):
        raise _busy("a graph is being compiled")
    try:
        stillness = inside.executor.stillness
        if not stillness.reach(max(0.0, end - time.monotonic())):
            raise _busy("commands are under way")
        try:
            yield
        finally:
            stillness.go_on()
    finally:
        inside.compiler.busy.release()


def _space_for(storage: HandleStorage, copies: Copies) -> memoryview:
    try:
        return copies.take(storage.buffer.size_bytes)
    except MemoryError:
        raise SnapshotFailedError(
            f"no memory for a copy of {storage.size_bytes:,} bytes that changed",
            advice="take snapshots more often, or give the daemon more memory",
        ) from None


def _add(data: memoryview, pins: Pins) -> list[Future[bytes]]:
    return [pins.add(data[start : start + PIECE_BYTES]) for start in range(0, data.nbytes, PIECE_BYTES)]


def _write_weight(weight: ImageWeight, pins: Pins, inside: SessionInside) -> bool:
    """Write a weight, unless it is here. False if no plan uses it, and its memory was reclaimed."""
    if weight.is_in_model or pins.keep((weight.digest,)):
        return True
    try:
        with inside.contents.reading(weight.digest) as pieces:
            pins.add_checked(weight.digest, weight.size_bytes, pieces)
    except MissingContentError:
        return False
    return True


def _all(begun: Iterable[Future[T]]) -> tuple[T, ...]:
    return tuple(one.result() for one in begun)


def _busy(why: str) -> SnapshotFailedError:
    return SnapshotFailedError(
        f"no image of the session was taken: {why}",
        advice="take it between runs: wait for their results, or for the end of a loop",
    )


def _without(image: Image, place: int, error: HeliographError) -> Image:
    """An image in which a storage has no bytes, since they cannot be read."""
    storages = list(image.storages)
    storages[place] = replace(storages[place], error=error)
    return replace(image, storages=tuple(storages))
