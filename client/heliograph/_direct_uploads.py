"""A blocking session's uploads to other daemons than its own, each on a thread."""

from __future__ import annotations

import threading

from heliograph._effects import Upload
from heliograph._tickets import Channels, TicketUpload
from heliograph_proto.description import ContentOffer
from heliograph_proto.errors import CancelledError, UnavailableError


class DirectUpload:
    """One content, by the ticket of an offer."""

    def __init__(self, upload: Upload, offer: ContentOffer) -> None:
        self._upload, self._offer = upload, offer
        self._lock = threading.Lock()
        self._sending: TicketUpload | None = None
        self._is_cancelled = False

    def run(self, channels: Channels) -> None:
        """Carries the bytes. Raises UnreachableError before any was sent, and what an upload does."""
        channel = channels.connected(self._offer)
        data = self._upload.data
        with self._lock:
            if self._is_cancelled:
                raise CancelledError("the upload was cancelled")
            sending = self._sending = TicketUpload(channel, self._offer, data.nbytes)
        try:
            sending.begin()
            self._tell(sending.received_bytes - self._upload.offset_bytes)
            for offset in range(sending.received_bytes, data.nbytes, sending.chunk_bytes):
                piece = data[offset : offset + sending.chunk_bytes]
                sending.write(piece)
                self._tell(piece.nbytes)
            sending.finish()
        except UnavailableError:
            channels.doubt(channel)
            raise
        finally:
            sending.cancel()

    def _tell(self, taken_bytes: int) -> None:
        if taken_bytes and self._upload.progress is not None:
            self._upload.progress(taken_bytes)

    def cancel(self) -> None:
        """Breaks it off, from any thread. Idempotent."""
        with self._lock:
            self._is_cancelled = True
            sending = self._sending
        if sending is not None:
            sending.cancel()
