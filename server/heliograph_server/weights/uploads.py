"""An upload: consecutive pieces, then its end. Any thread may call it."""

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

#: Errors of an interrupted upload. Its bytes are good so far, and another upload may continue it.
BREAKS = (CancelledError, SessionClosedError)


class IncomingUpload(ABC):
    """Bytes on their way in."""

    #: True for the bytes of a content, and for bytes forwarded to another daemon, which may be
    #: slow.
    is_content = is_relayed = False
    #: The first byte of this upload.
    start_bytes = 0
    #: True while no connection carries it, and another one may.
    is_paused = False

    def __init__(self, size_bytes: int, over: Callable[[IncomingUpload], None]) -> None:
        self.size_bytes = size_bytes
        self.received_bytes = 0
        self._over = over
        self._lock = threading.RLock()
        #: Memory for bytes that cannot be received straight into place.
        self._passing = bytearray()
        #: The error of every later piece, once it is over.
        self._ended: HeliographError | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.received_bytes:,} of {self.size_bytes:,} bytes>"

    def came(self) -> None:
        """Note that a piece came, which will be written."""

    def write(self, offset_bytes: int, data: bytes | memoryview) -> None:
        """Write the next piece. Raises ProtocolError for a gap or too many bytes, which end the
        upload."""
        view = memoryview(data)
        with self._lock:
            self._check_open()
            try:
                if offset_bytes != (due := self.received_bytes):
                    raise ProtocolError(f"a piece at byte {offset_bytes}, where byte {due} was expected")
                if offset_bytes + view.nbytes > self.size_bytes:
                    raise ProtocolError(f"more bytes than the {self.size_bytes} announced")
                self._write(view)
            except BaseException as error:
                self.abort(typed(error, "an upload"))
                raise
            self.received_bytes += view.nbytes

    def receive(self, into: Callable[[memoryview], int], most_bytes: int) -> int:
        """Have a function fill memory with the next bytes, and take as many as it returns.

        The memory is their place, if there is one already. Raises the OSErrors of `into`, which the
        upload survives, and the errors of `write`.
        """
        with self._lock:
            self._check_open()
            try:
                count = self._receive(into, min(most_bytes, self.size_bytes - self.received_bytes))
            except BaseException as error:
                # Some of our errors are OSErrors, too.
                if isinstance(error, HeliographError) or not isinstance(error, OSError):
                    self.abort(typed(error, "an upload"))
                raise
            self.received_bytes += count
        return count

    def _receive(self, into: Callable[[memoryview], int], most_bytes: int) -> int:
        if len(self._passing) < most_bytes:
            self._passing = bytearray(most_bytes)
        place = memoryview(self._passing)[:most_bytes]
        count = into(place)
        self._write(place[:count])
        return count

    def finish(self) -> int:
        """End the upload and return the number of bytes. The upload is over in any case.

        Raises ProtocolError, ContentMismatchError, or the error of the command that needs the
        bytes.
        """
        with self._lock:
            self._check_open()
            if self.received_bytes != self.size_bytes:
                short = f"{self.received_bytes} of {self.size_bytes} announced bytes arrived"
                # The end of a cancelled call looks like that of a call whose client sent too
                # little. The caller, if there is one, gets the error of a short upload; the command
                # gets that of an interrupted one.
                self.break_off(CancelledError(f"the upload was interrupted: {short}"))
                raise ProtocolError(short)
            try:
                self._finish()
            except HeliographError as error:
                self.abort(error)
                raise
            self._ended = ProtocolError("the upload is over")
            self._over(self)
        return self.received_bytes

    def abort(self, error: HeliographError) -> None:
        """Give everything back. The command that waits for the bytes fails. Idempotent."""
        with self._lock:
            if self._ended is None:
                self._ended = error
                self._abort(error)
            self._over(self)

    def break_off(self, error: HeliographError) -> None:
        """End it, since its connection broke. Another upload may go on with some kinds of bytes."""
        self.abort(error)

    def _check_open(self) -> None:
        """Raise the error that ended the upload, such as that of a session that was ended."""
        if self._ended is not None:
            raise self._ended.anew()

    @abstractmethod
    def _abort(self, error: HeliographError) -> None: ...

    @abstractmethod
    def _write(self, data: memoryview) -> None: ...

    @abstractmethod
    def _finish(self) -> None: ...
