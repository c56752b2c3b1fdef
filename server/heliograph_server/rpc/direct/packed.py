"""Packed transfers on a direct connection: pieces with headers. See `direct.proto`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from heliograph_proto.codec.packing import (
    HEADER,
    PIECE_BYTES,
    Encoding,
    Packer,
    check_piece,
    unpack,
)
from heliograph_proto.errors import HeliographError, ProtocolError
from heliograph_server.weights.uploads import IncomingUpload


class PackedUpload:
    """The pieces of one upload. Plain ones go to their place as the bytes of other uploads do.

    At most one packed piece is held, and as much again while it is unpacked.
    """

    def __init__(self, upload: IncomingUpload, agreed: Collection[Encoding]) -> None:
        self._upload, self._agreed = upload, agreed
        self._header = bytearray(HEADER.size)
        #: Memory that is being filled, and its bytes so far: the header, or a packed piece.
        self._filling, self._filled_bytes = memoryview(self._header), 0
        self._encoding = 0
        #: The plain bytes of the piece that are still to come.
        self._plain_bytes = 0

    def __repr__(self) -> str:
        return f"<PackedUpload of {self._upload}>"

    def receive(self, into: Callable[[memoryview], int], most_bytes: int) -> int:
        """As `IncomingUpload.receive`; the bytes are those of pieces and headers."""
        upload = self._upload
        if self._plain_bytes and self._encoding == Encoding.PLAIN:
            count = upload.receive(into, min(most_bytes, self._plain_bytes))
            self._plain_bytes -= count
            return count
        count = into(self._filling[self._filled_bytes :])
        self._filled_bytes += count
        if self._filled_bytes == self._filling.nbytes:
            try:
                self._filled()
            except HeliographError as error:
                upload.abort(error)
                raise
        return count

    def _filled(self) -> None:
        upload = self._upload
        if self._plain_bytes:
            plain = memoryview(unpack(self._encoding, self._filling, self._plain_bytes))

            def copy(place: memoryview) -> int:
                place[:] = plain[: place.nbytes]
                return place.nbytes

            # Not by `write`: plain pieces before this one may lie in memory that is not full yet.
            while plain:
                plain = plain[upload.receive(copy, plain.nbytes) :]
            self._filling, self._filled_bytes, self._plain_bytes = memoryview(self._header), 0, 0
            return
        self._encoding, self._plain_bytes, packed_bytes = HEADER.unpack(self._header)
        self._filled_bytes = 0
        left = upload.size_bytes - upload.received_bytes
        if self._encoding != Encoding.PLAIN:
            check_piece(self._encoding, self._plain_bytes, packed_bytes, min(PIECE_BYTES, left), self._agreed)
            self._filling = memoryview(bytearray(packed_bytes))
        elif not 0 < self._plain_bytes == packed_bytes <= left:
            raise ProtocolError(f"a piece of {packed_bytes:,} bytes, where {left:,} are left")


class PackedDownload:
    """The pieces of one download, at the rate that its client measured."""

    def __init__(self, encodings: Collection[Encoding], bytes_per_second: int) -> None:
        self._packer = Packer(encodings, time.thread_time)
        self._rate = float(bytes_per_second)

    def __repr__(self) -> str:
        return f"<PackedDownload for {self._rate:,.0f} bytes/s>"

    def piece(self, data: memoryview) -> memoryview:
        """Return a copy of bytes as they are sent, with their header."""
        encoding, packed = self._packer.pack(data, self._rate)
        return memoryview(HEADER.pack(encoding, data.nbytes, len(packed)) + packed)
