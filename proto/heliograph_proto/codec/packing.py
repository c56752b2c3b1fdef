"""Packed pieces of transfers: see `Encoding` in bulk.proto.

Floating-point weights hardly compress as they are. Sorted into planes, the bytes with exponents lie
side by side and do. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from enum import IntEnum
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from struct import Struct
from typing import Any, TypeAlias

import numpy as np

from heliograph_proto import PACKING, ZSTD
from heliograph_proto.errors import ProtocolError

Bytes: TypeAlias = "bytes | memoryview"

#: The most plain bytes of a packed piece on a direct connection.
PIECE_BYTES = 2**20
#: The same by gRPC, where `Limits.chunk_bytes` may be less. Larger pieces go as they are.
LARGEST_PIECE_BYTES = 16 * 2**20
#: A piece's header on a direct connection: encoding, plain bytes, following bytes.
HEADER = Struct("<BII")
#: The level of zstd. Higher ones take more time than they save with weights.
LEVEL = 1
#: The largest window of zstd that is unpacked, as a power of two.
WINDOW_LOG = 21
#: The bytes of a piece that are packed to find out whether all are worth it.
SAMPLE_BYTES = 64 * 1024
#: The pieces after which another sample is taken.
SAMPLED_PIECES = 16
#: Dropping halves runs at the speed of memory, and needs no sample.
HALVES_BYTES_PER_SECOND = 4e9
#: The rates at which the other side unpacks.
UNPACKED_BYTES_PER_SECOND = {1: 2e9, 2: 0.8e9}


class Encoding(IntEnum):
    """The form of a piece."""

    PLAIN = 0
    UPPER_HALVES = 1
    PLANES_ZSTD = 2


def features() -> tuple[str, ...]:
    """Return the features of the handshake for what can be packed here."""
    return (PACKING, ZSTD) if _zstd_module() else (PACKING,)


def encodings_of(agreed: Collection[str]) -> tuple[Encoding, ...]:
    """Return the encodings that features of a handshake allow."""
    if PACKING not in agreed:
        return ()
    return (Encoding.UPPER_HALVES, *((Encoding.PLANES_ZSTD,) if ZSTD in agreed else ()))


def encodings_from(numbers: Iterable[int], agreed: Collection[Encoding]) -> tuple[Encoding, ...]:
    """Return the encodings that the other side wants, of those agreed on."""
    wanted = set(numbers)
    return tuple(one for one in agreed if one in wanted)


@cache
def _zstd_module() -> str:
    """Return the name of the module for zstd, Python's or the package for older ones, or ""."""
    for package in ("compression", "backports"):
        # A module of that name may be another program's.
        with suppress(ImportError, ValueError):
            if find_spec(f"{package}.zstd") is not None:
                return f"{package}.zstd"
    return ""


@cache
def _zstd() -> Any:
    """The module, imported when the first piece needs it."""
    return import_module(_zstd_module())


def pack(encoding: Encoding, data: memoryview) -> Bytes | None:
    """Return the packed bytes; None if they would not be fewer."""
    packed: Bytes | None = data
    if encoding is Encoding.UPPER_HALVES:
        packed = _upper_halves(data)
    elif encoding is Encoding.PLANES_ZSTD:
        packed = _zstd().compress(_planes(data), LEVEL)
    return packed if packed is not None and len(packed) < data.nbytes else None


def unpack(encoding: int, packed: memoryview, plain_bytes: int) -> Bytes:
    """Return the plain bytes; never more memory than these is taken. Raises ProtocolError."""
    if encoding == Encoding.UPPER_HALVES and packed.nbytes * 2 == plain_bytes and plain_bytes % 4 == 0:
        plain = np.zeros((plain_bytes // 4, 2), np.uint16)
        plain[:, 1] = np.frombuffer(packed, np.uint16)
        return plain.reshape(-1).data.cast("B")
    if encoding == Encoding.PLANES_ZSTD and _zstd_module():
        return _from_planes(_unzip(packed, plain_bytes))
    raise ProtocolError(f"a packed piece of {packed.nbytes:,} bytes in encoding {encoding} cannot be read")


def check_piece(
    encoding: int, plain_bytes: int, packed_bytes: int, most_bytes: int, agreed: Collection[int]
) -> None:
    """Check a packed piece before memory is taken for it: its sizes, and whether its encoding is
    one of those agreed on. Raises ProtocolError."""
    if encoding not in agreed:
        raise ProtocolError(f"a piece is packed in encoding {encoding}, which was not agreed on")
    most_bytes = min(most_bytes, LARGEST_PIECE_BYTES)
    if not 0 < packed_bytes < plain_bytes <= most_bytes:
        raise ProtocolError(
            f"a piece of {plain_bytes:,} bytes packed into {packed_bytes:,} in encoding {encoding}; the "
            f"most is {most_bytes:,}"
        )


def _upper_halves(data: memoryview) -> memoryview | None:
    if data.nbytes % 4:
        return None
    halves = np.frombuffer(data, np.uint16)
    return None if halves[::2].any() else halves[1::2].copy().data.cast("B")


def _planes(data: memoryview) -> Bytes:
    plain = np.frombuffer(data, np.uint8)
    whole = plain.size // 4 * 4
    if whole == plain.size:
        return np.ascontiguousarray(plain.reshape(-1, 4).T).reshape(-1).data
    return plain[:whole].reshape(-1, 4).T.tobytes() + plain[whole:].tobytes()


def _from_planes(planes: bytes) -> memoryview:
    found = np.frombuffer(planes, np.uint8)
    whole = found.size // 4 * 4
    plain = np.empty(found.size, np.uint8)
    plain[:whole].reshape(-1, 4)[:] = found[:whole].reshape(4, -1).T
    plain[whole:] = found[whole:]
    return plain.data


def _unzip(packed: memoryview, plain_bytes: int) -> bytes:
    zstd = _zstd()
    reader = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: WINDOW_LOG})
    try:
        # One byte more shows that there is more.
        plain: bytes = reader.decompress(packed, plain_bytes + 1)
    except (zstd.ZstdError, EOFError):
        raise ProtocolError("a packed piece is no frame of zstd that this side reads") from None
    if len(plain) != plain_bytes or not reader.eof or reader.unused_data:
        raise ProtocolError(f"a packed piece does not have the {plain_bytes:,} bytes that it announces")
    return plain


class Packer:
    """The choice, piece by piece, of an encoding that has the bytes there sooner. One transfer's.

    `clock` gives the seconds of the processor that packing takes.
    """

    def __init__(self, encodings: Collection[Encoding], clock: Callable[[], float]) -> None:
        self._encodings, self._clock = encodings, clock
        self._chosen = Encoding.PLAIN
        #: The pieces for which the choice still holds.
        self._left = 0

    def __repr__(self) -> str:
        return f"<Packer {self._chosen.name}>"

    def pack(self, piece: memoryview, bytes_per_second: float | None) -> tuple[Encoding, Bytes]:
        """Return a piece as it goes over a link of this rate.

        With 0 it goes as small as it gets, and with None, an unknown rate, as it is.
        """
        if bytes_per_second is None or not 0 < piece.nbytes <= LARGEST_PIECE_BYTES:
            return Encoding.PLAIN, piece
        if not self._left:
            self._chosen, self._left = self._best(piece, max(bytes_per_second, 1.0)), SAMPLED_PIECES
        self._left -= 1
        if self._chosen is not Encoding.PLAIN:
            if (packed := pack(self._chosen, piece)) is not None:
                return self._chosen, packed
            self._left = 0
        return Encoding.PLAIN, piece

    def _best(self, piece: memoryview, rate: float) -> Encoding:
        """Return the encoding with the shortest time for packing and sending, by a sample."""
        begin = max(0, piece.nbytes - SAMPLE_BYTES) // 2 // 4 * 4
        sample = piece[begin : begin + SAMPLE_BYTES]
        best, least = Encoding.PLAIN, sample.nbytes / rate
        for encoding in self._encodings:
            start = self._clock()
            packed = pack(encoding, sample)
            seconds = self._clock() - start
            if encoding is Encoding.UPPER_HALVES:
                seconds = sample.nbytes / HALVES_BYTES_PER_SECOND
            seconds += sample.nbytes / UNPACKED_BYTES_PER_SECOND[encoding]
            if packed is not None and (needed := seconds + len(packed) / rate) < least:
                best, least = encoding, needed
        return best
