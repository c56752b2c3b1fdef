"""The runtime's side of uploads: bytes into staging, for a command, or into contents, for plans.

An upload is written piece by piece, in order. It ends with `finish` or `abort`; the session aborts
those that are open when it closes, from another thread. Locks are taken in the order upload, session.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

from heliograph_proto.digests import DIGEST_BYTES
from heliograph_proto.errors import (
    CancelledError,
    ContentMismatchError,
    HeliographError,
    ProtocolError,
    SessionClosedError,
)
from heliograph_server.core.contents import Contents
from heliograph_server.core.execution import typed
from heliograph_server.core.staged import Incoming
from heliograph_server.core.store import Beginning

#: What an upload ends with whose bytes were good as far as they came: another one may go on.
BREAKS = (CancelledError, SessionClosedError)


class Upload(ABC):
    """Bytes on their way in."""

    #: Whether they are a content's, and whether they are passed on to another daemon, which may be slow.
    is_content = is_relayed = False
    #: Where it began.
    start_bytes = 0

    def __init__(self, size_bytes: int, over: Callable[[Upload], None]) -> None:
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


class TransferUpload(Upload):
    """Bytes for a SetTensor, which takes them when it has its turn. `arrived` is told of their end, `broke`
    that there will be none."""

    def __init__(
        self,
        incoming: Incoming,
        arrived: Callable[[], None],
        broke: Callable[[HeliographError], None],
        over: Callable[[Upload], None],
    ) -> None:
        super().__init__(incoming.size_bytes, over)
        self._arrived = arrived
        self._broke = broke
        #: None once it is over.
        self._incoming: Incoming | None = incoming

    def _write(self, data: memoryview) -> None:
        self._open().add(data.cast("B"))

    def _finish(self) -> None:
        incoming = self._open()
        self._arrived()
        incoming.end()
        self._incoming = None

    def _open(self) -> Incoming:
        if self._incoming is None:
            raise ProtocolError("the upload is over")
        return self._incoming

    def _abort(self, error: HeliographError) -> None:
        incoming, self._incoming = self._incoming, None
        if incoming is not None:
            incoming.fail(error)
            self._broke(error)


class ContentUpload(Upload):
    """A content, received straight into the memory of a device, and hashed on the way."""

    is_content = True

    def __init__(
        self,
        digest: bytes,
        size_bytes: int,
        contents: Contents,
        over: Callable[[Upload], None],
        offset_bytes: int = 0,
    ) -> None:
        super().__init__(size_bytes, over)
        if len(digest) != DIGEST_BYTES:
            raise ProtocolError(f"a digest of {len(digest)} bytes; BLAKE3 has {DIGEST_BYTES}")
        self._digest = digest
        self._contents = contents
        self._part: Beginning | None = contents.begin(digest, size_bytes, offset_bytes)
        self.start_bytes = self.received_bytes = offset_bytes

    def _write(self, data: memoryview) -> None:
        if self._part is None:
            raise ProtocolError("the upload is over")
        self._part.buffer.set(self.received_bytes, data)
        self._part.hash.update(data)
        self._part.received_bytes += data.nbytes

    def _finish(self) -> None:
        if self._part is None:
            raise ProtocolError("the upload is over")
        if self._part.hash.digest() != self._digest:
            raise ContentMismatchError("the bytes do not have the digest announced", advice="send them again")
        part, self._part = self._part, None
        try:
            self._contents.add(self._digest, part.buffer)
        finally:
            # It counts with the tenant's contents now.
            part.charge.give()

    def _abort(self, error: HeliographError) -> None:
        part, self._part = self._part, None
        if part is None:
            return
        if isinstance(error, BREAKS):
            self._contents.keep(self._digest, part)
        else:
            part.free()
