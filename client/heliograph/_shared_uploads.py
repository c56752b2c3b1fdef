"""The upload of a content by way of shared memory: which piece lies where, and when its place is free."""

from __future__ import annotations

from collections import deque

from heliograph._bulk import upload_target
from heliograph._effects import Upload
from heliograph._shared import SharedSpace
from heliograph_proto.errors import ProtocolError, UnavailableError
from heliograph_proto.v1 import bulk_pb2

#: How many slots an upload fills in turns: one is copied into, one is hashed over there.
SLOTS = 2
#: What is hashed over there while the next piece is copied here.
PIECE_BYTES = 8 * 2**20


class SharedUpload:
    """One content, and the slots that it has. Moves bytes; what travels is the shell's."""

    def __init__(self, space: SharedSpace, slots: list[int], session: bytes, upload: Upload) -> None:
        self._space, self._upload, self._session = space, upload, session
        self._free = slots
        #: Ends of pieces and the slots where they lie, in order.
        self._sent: deque[tuple[int, int]] = deque()
        self._next_byte = self._received_bytes = upload.offset_bytes
        self._began = False

    @property
    def is_sent(self) -> bool:
        """Whether all bytes were taken out of the caller's memory."""
        return self._began and self._next_byte == self._upload.data.nbytes

    @property
    def is_over(self) -> bool:
        """Whether the server has taken all of them."""
        return self.is_sent and not self._sent

    def take(self) -> bytes | None:
        """The next request, whose bytes lie in a slot now; None: an answer must come first."""
        if self.is_sent or not self._free:
            return None
        slot, start = self._free.pop(), self._next_byte
        data = self._upload.data[start : start + min(PIECE_BYTES, self._space.slot_bytes)]
        self._space.fill(slot, data)
        request = bulk_pb2.UploadSharedRequest(
            offset_bytes=start, shared_offset_bytes=slot, size_bytes=data.nbytes
        )
        if not self._began:
            target = upload_target(self._session, self._upload.target, self._upload.data.nbytes)
            request.target.CopyFrom(target)
        self._began, self._next_byte = True, start + data.nbytes
        self._sent.append((self._next_byte, slot))
        return request.SerializeToString()

    def answered(self, message: bytes) -> None:
        """The server has taken pieces, of which progress is told. Raises ProtocolError for bytes that it was
        not sent, and what the progress function raises."""
        received = bulk_pb2.UploadSharedResponse.FromString(message).received_bytes
        if received > self._next_byte:
            raise ProtocolError(f"the server has {received} bytes, and was sent {self._next_byte}")
        while self._sent and self._sent[0][0] <= received:
            self._free.append(self._sent.popleft()[1])
        if self._upload.progress is not None and received > self._received_bytes:
            self._upload.progress(received - self._received_bytes)
        self._received_bytes = max(self._received_bytes, received)

    def slots(self) -> list[int]:
        """All of them, once the call has ended. If it broke off, the server may still read some: what it
        keeps of the content then, its digest refuses when the upload goes on."""
        return [*self._free, *(slot for _, slot in self._sent)]


def cut_short() -> UnavailableError:
    """What an upload ends with that the server ended too early, and did not say why."""
    return UnavailableError("the server ended an upload before its end", advice="try again")


def take_slots(space: SharedSpace | None) -> list[int]:
    """Slots for an upload; none if all are in use, or there is no such memory."""
    if space is None:
        return []
    found = (space.take() for _ in range(SLOTS))
    return [slot for slot in found if slot is not None]
