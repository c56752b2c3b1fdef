"""An upload as its caller sees it: pieces in order, then its end. Any thread."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

from heliograph_proto.errors import (
    CancelledError,
    HeliographError,
    ProtocolError,
    SessionClosedError,
)
from heliograph_server.resources.failures import typed

#: What an upload ends with whose bytes were good as far as they came: another one may go on.
BREAKS = (CancelledError, SessionClosedError)


class IncomingUpload(ABC):
    """Bytes on their way in."""

    #: Whether they are a content's, and whether they are passed on to another daemon, which may be slow.
    is_content = is_relayed = False
    #: Where it began.
    start_bytes = 0

    def __init__(self, size_bytes: int, over: Callable[[IncomingUpload], None]) -> None:
        self.size_bytes = size_bytes
        self.received_bytes = 0
        self._over = over
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.received_bytes:,} of {self.size_bytes:,} bytes>"

    def write(self, offset_bytes: int, data: bytes | memoryview) -> None:
        """The next piece. Raises ProtocolError for a gap or too many bytes; the upload is over then."""
        view = memoryview(data)
        with self._lock:
            try:
                self._check(offset_bytes, view.nbytes)
                self._write(view)
            except BaseException as error:
                self.abort(typed(error, "an upload"))
                raise
            self.received_bytes += view.nbytes

    def _check(self, offset_bytes: int, size_bytes: int) -> None:
        if offset_bytes != self.received_bytes:
            due = self.received_bytes
            raise ProtocolError(f"a piece at byte {offset_bytes}, where byte {due} was due")
        if offset_bytes + size_bytes > self.size_bytes:
            raise ProtocolError(f"more bytes than the {self.size_bytes} that were announced")

    def finish(self) -> int:
        """All bytes were sent: how many. The upload is over in any case.

        Raises ProtocolError, ContentMismatchError, or the error of the command that wanted them.
        """
        with self._lock:
            if self.received_bytes != self.size_bytes:
                short = f"{self.received_bytes} bytes came of the {self.size_bytes} announced"
                # The end of a call that was cancelled cannot be told from that of one whose client sent too
                # little: the caller, if there is one, learns of its fault, and the command that it broke off.
                self.abort(CancelledError(f"the upload broke off: {short}"))
                raise ProtocolError(short)
            try:
                self._finish()
            except HeliographError as error:
                self.abort(error)
                raise
            self._over(self)
        return self.received_bytes

    def abort(self, error: HeliographError) -> None:
        """Gives everything back; the command that waits for the bytes fails. Idempotent."""
        with self._lock:
            self._abort(error)
            self._over(self)

    @abstractmethod
    def _abort(self, error: HeliographError) -> None: ...

    @abstractmethod
    def _write(self, data: memoryview) -> None: ...

    @abstractmethod
    def _finish(self) -> None: ...
