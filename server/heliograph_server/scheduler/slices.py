"""Parts of contents: some rows of each matrix of a weight, as bytes; and their names."""

from __future__ import annotations

import struct
from collections.abc import Collection
from dataclasses import dataclass
from typing import Self, TypeAlias

from heliograph_proto.digests import DIGEST_BYTES

_NUMBERS = struct.Struct("<3Q")


@dataclass(frozen=True, slots=True)
class Slice:
    """The bytes from `start` up to `stop` of each `period` bytes of a content."""

    start: int
    stop: int
    period: int

    def name(self, digest: bytes) -> bytes:
        """Return the name of this part of the content with that digest. It is longer than a digest,
        so it never equals one."""
        return digest + _NUMBERS.pack(self.start, self.stop, self.period)

    @classmethod
    def of(cls, name: bytes) -> Self | None:
        """Return the slice of a part's name; None if the name is a digest, that of the whole
        content."""
        return cls(*_NUMBERS.unpack(name[DIGEST_BYTES:])) if len(name) > DIGEST_BYTES else None

    def size_bytes(self, whole_bytes: int) -> int:
        """Return the size of this part of a content of `whole_bytes`."""
        return whole_bytes // self.period * (self.stop - self.start)


#: A slice that is held, and the range of it that is needed.
Section: TypeAlias = tuple[Slice, int, int]


def digest_of(name: bytes) -> bytes:
    """Return the digest of the content that a name refers to, as a whole or in part."""
    return name[:DIGEST_BYTES]


def sections(start: int, stop: int, held: Collection[Slice]) -> list[Section] | None:
    """Find the slices of one period that cover the bytes from `start` up to `stop`; None if some
    are missing."""
    found: list[Section] = []
    while start < stop:
        reaching = [one for one in held if one.start <= start < one.stop]
        if not reaching:
            return None
        best = max(reaching, key=lambda one: one.stop)
        found.append((best, start, min(stop, best.stop)))
        start = best.stop
    return found
