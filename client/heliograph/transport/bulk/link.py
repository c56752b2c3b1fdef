"""The measured rate of the link to a server, and the transfers that are packed because of it."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, Literal, TypeAlias

from heliograph.transport.bulk.messages import Pack, as_it_is
from heliograph.transport.same_host import is_of_this_host
from heliograph_proto.addresses import Address
from heliograph_proto.codec.packing import Encoding, Packer, encodings_of, features
from heliograph_proto.errors import InvalidArgumentError
from heliograph_proto.sessions import SessionInfo
from heliograph_proto.v1 import bulk_pb2

#: Whether pieces are packed: where the link is so slow that it pays, always, or never.
CompressionArgument: TypeAlias = Literal["auto", "on", "off"]
COMPRESSION = ("auto", "on", "off")

#: Smaller transfers go as they are.
LEAST_BYTES = 2**20
#: The rate from which on a link is fast, and nothing is packed or measured.
FAST_BYTES_PER_SECOND = 250e6
#: The measurements of which the highest counts: a busy machine makes a link look slow for a while.
MEASUREMENTS = 8
#: The bytes and seconds of a measurement; it ends with both, or with many bytes.
MEASURED_BYTES, MEASURED_SECONDS, MANY_BYTES = 128 * 1024, 0.02, 4 * 2**20
#: The first bytes of a call of gRPC, which it takes into buffers of unknown size.
BUFFERED_BYTES = 4 * 2**20


def check_compression(given: CompressionArgument) -> CompressionArgument:
    """Return the argument. Raises InvalidArgumentError."""
    if given not in COMPRESSION:
        raise InvalidArgumentError(
            f"compression is {given!r:.40}", advice=f"use one of {', '.join(COMPRESSION)}"
        )
    return given


class Link:
    """The link to the server of one session. Any thread."""

    def __init__(self, address: Address, info: SessionInfo, compression: CompressionArgument) -> None:
        """Look the address up, which may take a while."""
        self.compression = compression
        self.encodings: tuple[Encoding, ...] = (
            () if compression == "off" else encodings_of({*info.features} & {*features()})
        )
        #: The same, as messages have them.
        self.numbers: list[Any] = [one.value for one in self.encodings]
        #: False if nothing is ever packed. A server on this host has no link that could be slow.
        self._is_far = bool(self.encodings) and (
            compression == "on" or (address.scheme in ("grpc", "grpcs") and not is_of_this_host(address.host))
        )
        self._ups: deque[float] = deque(maxlen=MEASUREMENTS)
        self._downs: deque[float] = deque(maxlen=MEASUREMENTS)
        #: The highest of them.
        self._up: float | None = None
        self._down: float | None = None
        self._lock = threading.Lock()
        #: Of uploads since the last measurement: short ones are measured together.
        self._sent_bytes, self._sent_seconds = 0, 0.0

    def __repr__(self) -> str:
        return f"<Link up {self._up or 0:,.0f}, down {self._down or 0:,.0f} bytes/s>"

    def _may_pack(self, size_bytes: int, rate: float | None) -> bool:
        if not self._is_far or size_bytes < LEAST_BYTES:
            return False
        return self.compression == "on" or rate is None or rate < FAST_BYTES_PER_SECOND

    @property
    def up(self) -> float | None:
        """The bytes per second to the server, for `Packer.pack`; None: not known, or fast."""
        if self.compression == "on":
            return 0.0
        return self._up if self._up is not None and self._up < FAST_BYTES_PER_SECOND else None

    def packer(self, size_bytes: int) -> Packer | None:
        """Return a packer for an upload; None if it goes as it is."""
        if not self._may_pack(size_bytes, self._up):
            return None
        return Packer(self.encodings, time.thread_time)

    def packing(self, size_bytes: int) -> tuple[Pack, CallMeter]:
        """Return the function that packs the pieces of an upload by a call, and its meter."""
        if (packer := self.packer(size_bytes)) is None:
            return as_it_is, CallMeter(None)
        return lambda piece: packer.pack(piece, self.up), CallMeter(self)

    def download_rate(self, size_bytes: int) -> int | None:
        """Return the rate to request a packed download with; None for one as it is.

        Before a download has been measured, the link counts as fast down as it is up.
        """
        rate = self._up if self._down is None else self._down
        if not self._may_pack(size_bytes, rate):
            return None
        if self.compression == "on":
            return 0
        return None if rate is None else max(1, int(rate))

    def download_request(self, session: bytes, transfer: int, size_bytes: int) -> bulk_pb2.DownloadRequest:
        """Return the request of a download by a call."""
        request = bulk_pb2.DownloadRequest(session=session, transfer=transfer)
        if (rate := self.download_rate(size_bytes)) is not None:
            request.encodings.extend(self.numbers)
            request.bytes_per_second = rate
        return request

    def receiving(self, *, is_packed: bool) -> ArrivalMeter:
        """Return the meter of a download by a call."""
        return ArrivalMeter(self, is_packed)

    def sent(self, size_bytes: int, seconds: float) -> None:
        """Record bytes to the server. They count once they are enough for a measurement."""
        with self._lock:
            self._sent_bytes += size_bytes
            self._sent_seconds += seconds
            if (rate := _rate(self._sent_bytes, self._sent_seconds)) is not None:
                self._sent_bytes, self._sent_seconds = 0, 0.0
                self._ups.append(rate)
                self._up = max(self._ups)

    def received(self, size_bytes: int, seconds: float, *, is_packed: bool = False) -> None:
        """Record bytes that came. Packed ones may have waited for the server to pack them, so the
        link is at least as fast."""
        if (rate := _rate(size_bytes, seconds)) is None:
            return
        with self._lock:
            if not is_packed or rate > (self._down or 0.0):
                self._downs.append(rate)
                self._down = max(self._downs)


def _rate(size_bytes: int, seconds: float) -> float | None:
    is_long = size_bytes >= MEASURED_BYTES and seconds >= MEASURED_SECONDS
    return size_bytes / max(seconds, 1e-9) if is_long or size_bytes >= MANY_BYTES else None


class CallMeter:
    """A measurement of an upload by a call, which takes messages when it has room for them."""

    def __init__(self, link: Link | None) -> None:
        """None: nothing is measured."""
        self._link = link
        self._buffered_bytes = BUFFERED_BYTES

    def __repr__(self) -> str:
        return f"<CallMeter of {self._link}>"

    def took(self, size_bytes: int, seconds: float) -> None:
        """Record a message that the call took after a wait."""
        self._buffered_bytes -= size_bytes
        if self._buffered_bytes <= 0 and self._link is not None:
            self._link.sent(size_bytes, seconds)


class ArrivalMeter:
    """A measurement of a download, from its first message on."""

    def __init__(self, link: Link, is_packed: bool) -> None:
        self._link, self._is_packed = link, is_packed
        self._first_bytes, self._start = 0, 0.0

    def __repr__(self) -> str:
        return f"<ArrivalMeter of {self._link}>"

    def came(self, size_bytes: int) -> None:
        """Record the bytes that have come so far."""
        now = time.monotonic()
        if not self._start:
            self._first_bytes, self._start = size_bytes, now
            return
        self._link.received(size_bytes - self._first_bytes, now - self._start, is_packed=self._is_packed)
