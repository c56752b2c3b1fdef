"""Gives the memory of an earlier session to another one of its owner, where it has wanted bytes.

A head that was restarted knows the digests of what its members held (`image.py`). The earlier
session ends first, so nothing writes its memory while it is compared.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from heliograph_backends.contract import Buffer
from heliograph_proto.digests import DIGEST_BYTES, hasher
from heliograph_proto.errors import (
    HeliographError,
    InvalidArgumentError,
    LimitExceededError,
    SessionClosedError,
)
from heliograph_proto.sessions import TakenBytes, WantedBytes
from heliograph_server.resources.handles import BufferHandle, HandleStorage, whole
from heliograph_server.resources.quotas import QuotaKind
from heliograph_server.session.session import Session

#: The most wants of one call.
MOST_WANTED = 100_000
#: The smallest piece that has a digest of its own.
LEAST_PIECE_BYTES = 4096
#: The most sizes of pieces for buffers of one size: how often memory is read at most.
MOST_CUTS = 2
#: The size of one read.
READ_BYTES = 2**20

#: Buffers with the same bytes on one device ("" for any) that are still wanted.
_Wants: TypeAlias = "defaultdict[tuple[str, tuple[bytes, ...]], list[WantedBytes]]"


def take_up(session: Session, earlier: Session, wanted: Sequence[WantedBytes]) -> tuple[TakenBytes, ...]:
    """End the earlier session, and return the buffers that the session got. Blocks.

    Raises InvalidArgumentError, HandleExistsError and LimitExceededError, after which nothing has
    ended.
    """
    _check(session, earlier, wanted)
    gone = SessionClosedError("the session was taken up by a later one of its owner", advice="connect again")
    kept = close_keeping(earlier, gone)
    return tuple(_Taking(session, wanted).run(kept))


def close_keeping(session: Session, error: HeliographError) -> list[tuple[HandleStorage, Buffer]]:
    """Close a session, and return its storages with their buffers, which the caller owns.

    Those with good bytes, if the session's work ends in time; others are freed.
    """
    kept: list[tuple[HandleStorage, Buffer]] = []
    releases = session.inside.executor.releases
    with session.inside.lock:
        releases.kept = kept
    session.close(error)
    with session.inside.lock:
        releases.kept = None
    return kept


def _check(session: Session, earlier: Session, wanted: Sequence[WantedBytes]) -> None:
    if session is earlier:
        raise InvalidArgumentError("a session cannot take up itself")
    if len(wanted) > MOST_WANTED:
        raise LimitExceededError(f"{len(wanted):,} buffers are wanted; {MOST_WANTED:,} are the most at once")
    if len({one.buffer for one in wanted}) < len(wanted):
        raise InvalidArgumentError("two wanted buffers have the same handle")
    for one in wanted:
        pieces = -(-one.size_bytes // one.piece_bytes) if one.piece_bytes >= LEAST_PIECE_BYTES else -1
        if not one.size_bytes or pieces != len(one.digests) or {*map(len, one.digests)} != {DIGEST_BYTES}:
            raise InvalidArgumentError(
                f"a buffer of {one.size_bytes:,} bytes in pieces of {one.piece_bytes:,} has "
                f"{len(one.digests)} digests",
                advice=f"one BLAKE3 digest for each piece, of {LEAST_PIECE_BYTES} bytes or more",
            )
    if any(count > MOST_CUTS for count in Counter(size for size, _ in _cuts(wanted)).values()):
        raise InvalidArgumentError(f"buffers of one size are cut in more than {MOST_CUTS} ways")
    with session.inside.lock:
        for one in wanted:
            session.inside.core.handles.check_new(one.buffer, BufferHandle, more=0)


def _cuts(wanted: Sequence[WantedBytes]) -> set[tuple[int, int]]:
    return {(one.size_bytes, one.piece_bytes) for one in wanted}


class _Taking:
    """The wants of one call that are not met yet."""

    def __init__(self, session: Session, wanted: Sequence[WantedBytes]) -> None:
        self._inside = session.inside
        #: By the size of the buffer and of its pieces.
        self._wanted: dict[tuple[int, int], _Wants] = {}
        for one in wanted:
            same = self._wanted.setdefault((one.size_bytes, one.piece_bytes), defaultdict(list))
            same[one.device, one.digests].append(one)

    def run(self, kept: Sequence[tuple[HandleStorage, Buffer]]) -> Iterator[TakenBytes]:
        """Give what is wanted, and free the rest."""
        for storage, buffer in kept:
            taken = None
            try:
                want = self._want_for(storage, buffer)
                taken = None if want is None else self._give(want, storage, buffer)
            except HeliographError:
                # No room in the quota or the table, or a device that fails: it is restored otherwise.
                pass
            finally:
                if taken is None:
                    buffer.free()
            if taken is not None:
                yield taken

    def _want_for(self, storage: HandleStorage, buffer: Buffer) -> WantedBytes | None:
        for (size_bytes, piece_bytes), wants in self._wanted.items():
            if size_bytes != storage.size_bytes or not any(wants.values()):
                continue
            digests = tuple(_digests(buffer, size_bytes, piece_bytes))
            for device in (storage.device, ""):
                if same := wants.get((device, digests)):
                    return same.pop()
        return None

    def _give(self, want: WantedBytes, storage: HandleStorage, buffer: Buffer) -> TakenBytes:
        name = buffer.buffer_type.name
        made = HandleStorage(storage.size_bytes, storage.device, buffer, name, storage.usage)
        self._inside.holding.take(QuotaKind.MEMORY, made.size_bytes)
        made.is_charged = True
        core = self._inside.core
        try:
            with self._inside.lock:
                if core.closed is not None:
                    raise core.closed.anew()
                core.handles.check_new(want.buffer, BufferHandle)
                core.resources.storages[made] = None
                core.handles.add(want.buffer, BufferHandle((whole(made),)))
        except BaseException:
            self._inside.holding.give(QuotaKind.MEMORY, made.size_bytes)
            raise
        return TakenBytes(want.buffer, made.device, name)


def _digests(buffer: Buffer, size_bytes: int, piece_bytes: int) -> Iterator[bytes]:
    """The digests of a buffer's bytes, by pieces."""
    space = memoryview(bytearray(min(READ_BYTES, size_bytes)))
    for start in range(0, size_bytes, piece_bytes):
        end, taken = min(start + piece_bytes, size_bytes), hasher()
        for offset in range(start, end, READ_BYTES):
            piece = space[: min(READ_BYTES, end - offset)]
            buffer.get(offset, piece)
            taken.update(piece)
        yield taken.digest()
