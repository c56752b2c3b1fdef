"""Memory that this process and a server on the same host both map: requested, checked, and divided.

The server's socket has a name that only processes on its host can reach (`SharedMemoryOffer`).
Memory of another user, or memory whose size could change, is not accepted.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections import deque
from typing import Any, Literal, TypeAlias

import numpy as np
from google.protobuf.message import DecodeError

from heliograph.core.effects import StartUpload
from heliograph.graph.files.mapped_files import copy_into
from heliograph.transport.bulk.messages import upload_target
from heliograph.transport.same_host import is_of_this_host, is_of_this_user
from heliograph_proto import SHARED_MEMORY
from heliograph_proto.addresses import Address
from heliograph_proto.codec import decode_error
from heliograph_proto.errors import (
    HeliographError,
    InvalidArgumentError,
    ProtocolError,
    UnavailableError,
    UnsupportedError,
)
from heliograph_proto.sessions import PLACE_BYTES, SessionInfo, SharedMemoryOffer
from heliograph_proto.v1 import bulk_pb2, memory_pb2

#: The argument of sessions: use shared memory if both sides prove that they are on one host
#: ("auto"), require it, or never use it.
SharedMemoryArgument: TypeAlias = "Literal['auto'] | bool"

#: The pause before connecting again to a socket whose queue is full.
CROWDED_SECONDS = 0.01
#: The time for the server's answer, which comes at once.
ANSWER_SECONDS = 2.0
LEAST_SECONDS = 0.05
RESPONSE_BYTES = 65_536
#: The bytes of one command: they are copied here while the server copies those of the one before.
SLOT_BYTES = PLACE_BYTES


class SharedSpace:
    """The memory in which commands carry bytes, in slots of one size.

    It belongs to the core and is used where the core is.
    """

    def __init__(self, memory: np.ndarray[Any, np.dtype[np.uint8]], slot_bytes: int = SLOT_BYTES) -> None:
        self._memory = memory
        self.slot_bytes = min(slot_bytes, memory.nbytes)
        count = memory.nbytes // self.slot_bytes
        # The slot that was used last is taken first: it is in the caches.
        self._free = [number * self.slot_bytes for number in reversed(range(count))]
        self._count = count

    def __repr__(self) -> str:
        return f"<SharedSpace of {self._memory.nbytes:,} bytes, {len(self._free)} slots free>"

    @property
    def is_free(self) -> bool:
        """True if no slot is in use."""
        return len(self._free) == self._count

    def take(self) -> int | None:
        """Take a free slot. Returns its offset, or None if there is none."""
        return self._free.pop() if self._free else None

    def give(self, slot: int) -> None:
        """Return a slot."""
        self._free.append(slot)

    def fill(self, slot: int, data: memoryview) -> None:
        """Copy bytes into a slot; other threads run meanwhile. Raises as `copy_into`."""
        copy_into(self._memory[slot : slot + data.nbytes], data)

    def empty_into(self, slot: int, out: memoryview) -> None:
        """Copy bytes out of a slot; other threads run meanwhile."""
        np.copyto(np.frombuffer(out, np.uint8), self._memory[slot : slot + out.nbytes])


def checked_shared_memory(given: object) -> SharedMemoryArgument:
    """Return the argument. Raises InvalidArgumentError."""
    if given == "auto" or isinstance(given, bool):
        return given
    raise InvalidArgumentError(f"shared_memory is {given!r:.40}", advice="'auto', True or False")


def share(
    address: Address, info: SessionInfo, argument: SharedMemoryArgument, seconds: float = ANSWER_SECONDS
) -> SharedSpace | str:
    """Return the session's memory, or why there is none.

    Raises UnavailableError if it was required.
    """
    if argument is False:
        return "it was turned off by the client: shared_memory=False"
    request = memory_pb2.MemoryRequest(session=info.session, session_memory=memory_pb2.SessionMemory())
    try:
        memory, _ = _ask(address, info, request, seconds)
        if not memory.nbytes:
            raise UnavailableError("the server sent none")
        return SharedSpace(memory)
    except HeliographError as error:
        if argument is True:
            raise insisted(address, error.message) from None
        return error.message


def seconds_for(end: float) -> float:
    """Return the seconds for the server's answer: those left until a moment, but not too few."""
    return min(ANSWER_SECONDS, max(LEAST_SECONDS, end - time.monotonic()))


def insisted(address: Address, why: str) -> UnavailableError:
    """Return the error for shared memory that is required but absent."""
    return UnavailableError(
        f"no memory can be shared with {address}: {why}", advice="shared_memory='auto' continues without"
    )


def memory_of(
    address: Address, info: SessionInfo, tensor: int, seconds: float | None = None
) -> tuple[Any, int]:
    """Return the bytes of a tensor's buffer, and the tensor's position in it.

    Raises HeliographError.
    """
    limit = ANSWER_SECONDS if seconds is None else min(seconds, ANSWER_SECONDS)
    return _ask(address, info, memory_pb2.MemoryRequest(session=info.session, tensor=tensor), limit)


def _ask(
    address: Address, info: SessionInfo, request: memory_pb2.MemoryRequest, seconds: float
) -> tuple[Any, int]:
    """Request memory. Returns its bytes, and a tensor's position in it.

    Raises the errors of `ask_for`.
    """
    response, descriptor = ask_for(address, info, request, seconds)
    try:
        return mapped(descriptor, response.size_bytes), response.offset_bytes
    finally:
        os.close(descriptor)


def ask_for(
    address: Address, info: SessionInfo, request: memory_pb2.MemoryRequest, seconds: float
) -> tuple[memory_pb2.MemoryResponse, int]:
    """Return the answer to a request, and its descriptor, which the caller closes.

    Raises UnsupportedError if nothing is shared, UnavailableError if the server's socket is broken,
    or the server's error.
    """
    end = time.monotonic() + seconds
    try:
        with _connected(address, _offer_of(info), end) as server:
            server.send(request.SerializeToString())
            server.settimeout(max(0.001, end - time.monotonic()))
            answer, descriptors, _, _ = socket.recv_fds(server, RESPONSE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise UnavailableError(f"the server's memory socket: {error.strerror or 'no answer'}") from None
    try:
        response = _decoded(answer)
        if not descriptors:
            raise UnavailableError("the server sent none")
        return response, descriptors.pop()
    finally:
        for one in descriptors:
            os.close(one)


def _decoded(answer: bytes) -> memory_pb2.MemoryResponse:
    """Decode a response. Raises the error in it, or ProtocolError if it is unreadable."""
    try:
        response = memory_pb2.MemoryResponse.FromString(answer)
    except DecodeError:
        raise ProtocolError("the server's answer to a request for memory cannot be read") from None
    if response.HasField("error"):
        raise decode_error(response.error)
    return response


def _offer_of(info: SessionInfo) -> SharedMemoryOffer:
    if SHARED_MEMORY not in info.features:
        raise UnsupportedError("the server does not support it")
    if info.shared_memory is None:
        raise UnsupportedError(
            "the server offers none: this client is on another host, or the server turned it off"
        )
    return info.shared_memory


def _socket_of(address: Address, offer: SharedMemoryOffer) -> str:
    """Return the name of the server's socket. Raises UnsupportedError.

    The name is checked, so that a server cannot make the client connect to any other socket.
    """
    if address.scheme == "unix" and re.fullmatch(r"\.[a-z]{1,16}", offer.path_suffix):
        return address.path + offer.path_suffix
    named = re.fullmatch(r"heliograph-[0-9a-f]{32}", offer.abstract_name)
    if (
        address.scheme in ("grpc", "grpcs")
        and named
        and (address.is_loopback or is_of_this_host(address.host))
    ):
        return f"\0{offer.abstract_name}"
    raise UnsupportedError("the server's offer does not fit the address that it was reached by")


def _connected(address: Address, offer: SharedMemoryOffer, end: float) -> socket.socket:
    """Connect to the server's socket. Raises OSError, and UnsupportedError for another user's."""
    if not hasattr(socket, "SO_PEERCRED"):
        raise UnsupportedError("this system cannot prove that both sides are on one host")
    name = _socket_of(address, offer)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        _connect(made, name, end)
        if not is_of_this_user(made):
            raise UnsupportedError("the server runs as another user")
    except BaseException:
        made.close()
        raise
    return made


def _connect(made: socket.socket, name: str, end: float) -> None:
    """Connect until a moment; a full queue is reported at once. Raises OSError."""
    while True:
        made.settimeout(max(0.001, end - time.monotonic()))
        try:
            return made.connect(name)
        except BlockingIOError:
            if time.monotonic() > end:
                raise
            time.sleep(CROWDED_SECONDS)


def mapped(descriptor: int, size_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Map a memory file. The mapping lasts as long as arrays over it, without the descriptor.

    Raises UnavailableError for a file that could be truncated while it is in use.
    """
    import fcntl
    import mmap

    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        whole = mmap.mmap(descriptor, max(size_bytes, 1))
    except (OSError, ValueError, OverflowError) as error:
        raise UnavailableError(f"the memory cannot be mapped: {error}") from None
    if not seals & fcntl.F_SEAL_SHRINK:
        raise UnavailableError("the server sent memory whose size may change")
    return np.frombuffer(whole, np.uint8)[:size_bytes]


#: The number of slots of an upload: one is filled while the server hashes another.
SLOTS = 2
#: The bytes that the server hashes while the next piece is copied here.
PIECE_BYTES = 8 * 2**20


class SharedUpload:
    """The upload of one content through its slots. It moves bytes; the shell sends the messages."""

    def __init__(self, space: SharedSpace, slots: list[int], session: bytes, upload: StartUpload) -> None:
        self._space, self._upload, self._session = space, upload, session
        self._free = slots
        #: Ends of pieces and their slots, in order.
        self._sent: deque[tuple[int, int]] = deque()
        self._next_byte = self._received_bytes = upload.offset_bytes
        self._began = False

    @property
    def is_sent(self) -> bool:
        """True if all bytes were copied out of the caller's memory."""
        return self._began and self._next_byte == self._upload.data.nbytes

    @property
    def is_over(self) -> bool:
        """True if the server has taken all bytes."""
        return self.is_sent and not self._sent

    def take(self) -> bytes | None:
        """Fill a slot and return the next request; None if an answer must come first."""
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
        """Apply an answer: the server has taken pieces. Reports progress.

        Raises ProtocolError for bytes that were not sent, and the errors of the progress function.
        """
        received = bulk_pb2.UploadSharedResponse.FromString(message).received_bytes
        if received > self._next_byte:
            raise ProtocolError(f"the server has {received} bytes, and was sent {self._next_byte}")
        while self._sent and self._sent[0][0] <= received:
            self._free.append(self._sent.popleft()[1])
        if self._upload.progress is not None and received > self._received_bytes:
            self._upload.progress(received - self._received_bytes)
        self._received_bytes = max(self._received_bytes, received)

    def slots(self) -> list[int]:
        """Return all slots, once the call has ended.

        After a failure the server may still read some of them. The content's digest then refuses
        wrong bytes when the upload is resumed.
        """
        return [*self._free, *(slot for _, slot in self._sent)]


def cut_short() -> UnavailableError:
    """Return the error of an upload that the server ended too early, without a reason."""
    return UnavailableError("the server ended an upload before its end", advice="try again")


def take_slots(space: SharedSpace | None) -> list[int]:
    """Take slots for an upload; none if all are in use, or there is no shared memory."""
    if space is None:
        return []
    found = (space.take() for _ in range(SLOTS))
    return [slot for slot in found if slot is not None]
