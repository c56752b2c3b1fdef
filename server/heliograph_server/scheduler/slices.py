"""Parts of contents: some rows of each matrix of a weight, as bytes; and the names that they have."""

from __future__ import annotations

import struct
from collections.abc import Collection
from dataclasses import dataclass
from typing import Self, TypeAlias

from heliograph_proto.digests import DIGEST_BYTES

_NUMBERS = struct.Struct("<3Q")


@dataclass(frozen=True, slots=True)
class Slice:
    """Of every `period` bytes of a content those from `start` to before `stop`."""

    start: int
    stop: int
    period: int

    def name(self, digest: bytes) -> bytes:
        """What this part of the content with that digest is known by: longer than a digest, so never one."""
        return digest + _NUMBERS.pack(self.start, self.stop, self.period)

    @classmethod
    def of(cls, name: bytes) -> Self | None:
        """The slice of a part's name; None: the name is a digest, that of the whole."""
        return cls(*_NUMBERS.unpack(name[DIGEST_BYTES:])) if len(name) > DIGEST_BYTES else None

    def size_bytes(self, whole_bytes: int) -> int:
        """Of a part of a content of so many bytes."""
        return whole_bytes // self.period * (self.stop - self.start)


#: A slice that there is, and from where to where it is wanted.
Section: TypeAlias = tuple[Slice, int, int]


def digest_of(name: bytes) -> bytes:
    """The digest of the content that a name is of, or of a part of which it is."""
    return name[:DIGEST_BYTES]


def sections(start: int, stop: int, held: Collection[Slice]) -> list[Section] | None:
    """From which slices of one period the bytes from `start` to before `stop` come; None: some lack."""
    found: list[Section] = []
    while start < stop:
        reaching = [one for one in held if one.start <= start < one.stop]
        if not reaching:
            return None
        best = max(reaching, key=lambda one: one.stop)
        found.append((best, start, min(stop, best.stop)))
        start = best.stop
    return found
