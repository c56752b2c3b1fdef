"""How the bytes of one read or write are cut into transfers that a server stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from heliograph_proto.commands import Chunks


@dataclass(frozen=True, slots=True)
class Piece:
    """The bytes of one transfer."""

    #: Where they begin here, in bytes of the whole.
    start: int
    size_bytes: int
    #: Where they begin over there, from where the whole begins.
    offset_bytes: int
    #: How they lie over there; None: one behind the other.
    chunks: Chunks | None = None

    def of(self, data: memoryview) -> memoryview:
        """The part of the whole that it carries."""
        return data[self.start : self.start + self.size_bytes]


def pieces(size_bytes: int, chunks: Chunks | None, piece_bytes: int, item_bytes: int) -> Iterator[Piece]:
    """The transfers of so many bytes, each of whole items, or of whole chunks where one fits."""
    if chunks is None:
        for offset, size in split_pieces(size_bytes, piece_bytes, item_bytes):
            yield Piece(offset, size, offset)
    elif chunks.size_bytes > piece_bytes:
        yield from _rows(chunks, piece_bytes)
    else:
        yield from _groups(chunks, piece_bytes)


def _rows(chunks: Chunks, piece_bytes: int) -> Iterator[Piece]:
    """Chunks that are larger than a piece go one by one, in pieces of their own."""
    for row in range(chunks.count):
        for offset, size in split_pieces(chunks.size_bytes, piece_bytes, 1):
            yield Piece(row * chunks.size_bytes + offset, size, row * chunks.stride_bytes + offset)


def _groups(chunks: Chunks, piece_bytes: int) -> Iterator[Piece]:
    together = piece_bytes // chunks.size_bytes
    for first in range(0, chunks.count, together):
        count = min(together, chunks.count - first)
        part = Chunks(chunks.size_bytes, count, chunks.stride_bytes)
        yield Piece(first * chunks.size_bytes, part.total_bytes, first * chunks.stride_bytes, part)


def split_pieces(size_bytes: int, piece_bytes: int, item_bytes: int) -> list[tuple[int, int]]:
    """(offset, size) of the pieces of a large transfer, each of whole items."""
    step = max(item_bytes, piece_bytes // item_bytes * item_bytes)
    return [(offset, min(step, size_bytes - offset)) for offset in range(0, size_bytes, step)]
