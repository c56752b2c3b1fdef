"""Memory of a member: buffers on it, and tensors in them as the member knows them.

A write returns when the member has done it, so that its errors are raised by the call that wrote.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import heliograph as hg
from heliograph.head.handoff import hand_over
from heliograph.raw import read_bytes, write_bytes
from heliograph_backends.contract import Abort, Arena, Buffer, BufferType, Chunks, Tensor, Usage
from heliograph_proto.devices import BufferTypeInfo
from heliograph_proto.errors import (
    HeliographError,
    InvalidArgumentError,
    MemberLostError,
    PermissionDeniedError,
    UnavailableError,
    UnsupportedError,
)
from heliograph_proto.types import DTYPES, TensorType
from heliograph_server.pool.remote.answers import checked_size, printable

if TYPE_CHECKING:
    from heliograph_server.pool.remote.device import RemoteDevice

logger = logging.getLogger(__name__)


#: The most views of a buffer that are cached.
MAX_VIEWS = 256
#: The most sizes of tensors that are cached.
MAX_SIZES = 10_000

_Layout: TypeAlias = tuple[TensorType, int, tuple[int, ...]]


class RemoteBufferType(BufferType):
    """A buffer type of a member's device. Never host memory of this process."""

    is_host = False

    def __init__(self, device: RemoteDevice, info: BufferTypeInfo) -> None:
        self.device: RemoteDevice = device
        self.name = info.name
        self.alignment = info.alignment_bytes
        self.max_size = info.max_size_bytes
        self._pads = info.pads
        self._readable_by = info.readable_by
        self._sizes: OrderedDict[TensorType, int] = OrderedDict()

    def __repr__(self) -> str:
        return f"<RemoteBufferType {self.name} of {self.device.name}>"

    def allocate(self, size_bytes: int, usage: Usage = Usage.ANY) -> RemoteBuffer:
        with self.device.member.edge():
            made = self.device.session.buffer(
                size_bytes, self.device.member_name, buffer_type=self.name, usage=usage
            )
            buffer = RemoteBuffer(self, made, size_bytes, usage)
        # The member reports a lack of memory only when it handles the command.
        buffer.settle()
        return buffer

    def zeros(self, size_bytes: int, usage: Usage = Usage.ANY, abort: Abort | None = None) -> RemoteBuffer:
        """Allocate a buffer; a daemon clears the memory of every new one."""
        return self.allocate(size_bytes, usage)

    def is_readable_by(self, device: RemoteDevice) -> bool:
        """True if the member reports that its device computes on such memory."""
        return self.device is device and device.member_name in self._readable_by

    @property
    def pads(self) -> bool:
        return self._pads

    def alloc_size(self, tensor: TensorType) -> int:
        """The member's answer, cached; without padding no query is needed."""
        if not self._pads:
            return tensor.nbytes
        if tensor not in self._sizes:
            query = [(tensor.shape, tensor.dtype)]
            with self.device.member.edge():
                sizes = self.device.member_device.placement(query, self.name).tensor_bytes
            self._sizes[tensor] = checked_size(sizes, tensor)
            if len(self._sizes) > MAX_SIZES:
                self._sizes.popitem(last=False)
        return self._sizes[tensor]


class RemoteBuffer(Buffer):
    """A buffer of a member."""

    buffer_type: RemoteBufferType

    def __init__(
        self, buffer_type: RemoteBufferType, member: hg.Buffer, size_bytes: int, usage: Usage
    ) -> None:
        self.buffer_type = buffer_type
        self.size_bytes = size_bytes
        self.usage = usage
        self._member = member
        self._bytes = member.place((size_bytes,), DTYPES["u8"])
        self._lock = threading.Lock()
        #: Tensors placed on the member, and recently used views.
        self._placed: dict[_Layout, hg.Tensor] = {}
        self._views: OrderedDict[_Layout, hg.Tensor] = OrderedDict()

    def __repr__(self) -> str:
        return f"<RemoteBuffer {self.size_bytes} bytes on {self.device.name}>"

    @property
    def device(self) -> RemoteDevice:
        """Its device."""
        return self.buffer_type.device

    @property
    def whole(self) -> hg.Tensor:
        """All of its bytes as a tensor of the member."""
        return self._bytes

    def settle(self) -> None:
        """Wait until the member has handled all commands for these bytes. Raises their errors."""
        self._read(0, memoryview(bytearray(min(1, self.size_bytes))))

    def set(self, offset_bytes: int, data: memoryview) -> None:
        self._write(offset_bytes, data)

    def get(self, offset_bytes: int, out: memoryview) -> None:
        self._read(offset_bytes, out)

    def set_2d(self, offset_bytes: int, data: memoryview, chunks: Chunks) -> None:
        self._write(offset_bytes, data, chunks)

    def get_2d(self, offset_bytes: int, out: memoryview, chunks: Chunks) -> None:
        self._read(offset_bytes, out, chunks)

    def memset(self, offset_bytes: int, size_bytes: int, value: int) -> None:
        with self.device.member.edge():
            self._bytes.memset(value, offset_bytes, size_bytes, stream=self.device.member_stream)
            self._settle_at(offset_bytes, size_bytes)

    def clear(self, value: int = 0) -> None:
        with self.device.member.edge():
            self._member.clear(value)
            self.settle()

    def _write(self, offset_bytes: int, data: memoryview, chunks: Chunks | None = None) -> None:
        with self.device.member.edge():
            write_bytes(self._bytes, offset_bytes, data, chunks, self.device.member_stream)
            self._settle_at(offset_bytes, data.nbytes)

    def _read(self, offset_bytes: int, out: memoryview, chunks: Chunks | None = None) -> None:
        with self.device.member.edge():
            read_bytes(self._bytes, offset_bytes, out, chunks, self.device.member_stream)

    def _settle_at(self, offset_bytes: int, size_bytes: int) -> None:
        """As `settle`, for a range that was just written: read one byte of it."""
        if size_bytes:
            self._read(offset_bytes, memoryview(bytearray(1)))

    def array(self, type: TensorType, offset_bytes: int, strides: tuple[int, ...]) -> Any:
        name = self.device.name
        raise UnsupportedError(f"the memory of {name} is on another host", advice="read it with get")

    def copy_from(self, source: Tensor, destination: Tensor) -> bool:
        return self._copy(source, destination)

    def copy_to(self, source: Tensor, destination: Tensor) -> bool:
        return self._copy(source, destination)

    @staticmethod
    def _copy(source: Tensor, destination: Tensor) -> bool:
        """Copy on the member itself if it has both, or from member to member."""
        ours, theirs = source.buffer, destination.buffer
        if not isinstance(ours, RemoteBuffer) or not isinstance(theirs, RemoteBuffer):
            return False
        if ours.device.member is not theirs.device.member:
            return _hand_over(ours.tensor(source), ours.device, theirs.tensor(destination), theirs.device)
        with ours.device.member.edge():
            ours.tensor(source).copy_and_wait(theirs.tensor(destination), stream=theirs.device.member_stream)
        return True

    def tensor(self, tensor: Tensor) -> hg.Tensor:
        """A tensor of this buffer as the member knows it."""
        key = tensor.type, tensor.offset_bytes, tensor.byte_strides
        with self._lock:
            if key in self._placed:
                return self._placed[key]
            found = self._views.pop(key, None)
            if found is None:
                found = self._bytes._view(tensor.offset_bytes, tensor.type, tensor.byte_strides)
            self._views[key] = found
            if len(self._views) > MAX_VIEWS:
                self._views.popitem(last=False)
        return found

    def set_usage(self, usage: Usage) -> None:
        self.usage = usage
        with self.device.member.edge():
            self._member.set_usage(usage)

    def init_tensor(self, tensor: Tensor) -> None:
        """Tell the member too: its device may keep data beside the tensor."""
        if tensor.offset_bytes % self.buffer_type.alignment:
            raise InvalidArgumentError(
                f"a tensor at byte {tensor.offset_bytes}: {self.device.name} requires multiples "
                f"of {self.buffer_type.alignment}"
            )
        with self.device.member.edge():
            made = self._member.place(tensor.type.shape, tensor.type.dtype, tensor.offset_bytes)
        with self._lock:
            self._placed[tensor.type, tensor.offset_bytes, tensor.byte_strides] = made

    def free_tensor(self, tensor: Tensor) -> None:
        with self._lock:
            gone = self._placed.pop((tensor.type, tensor.offset_bytes, tensor.byte_strides), None)
        if gone is not None:
            gone.free()

    def reset(self) -> None:
        with self._lock:
            self._placed.clear()
        if self.device.lost is None:
            self._member.reset()

    def free(self) -> None:
        with self._lock:
            self._placed.clear()
            self._views.clear()
        self._bytes.free()
        self._member.free()


class RemoteArena(Arena):
    """A reservation on the member, for its plans."""

    def __init__(self, device: RemoteDevice, reservation: hg.Reservation) -> None:
        self.device = device
        self.reservation = reservation
        self.size_bytes = reservation.size_bytes

    def __repr__(self) -> str:
        return f"<RemoteArena {self.size_bytes:,} bytes>"

    def free(self) -> None:
        if self.device.lost is None:
            self.reservation.reset()


def _hand_over(
    source: hg.Tensor, source_device: RemoteDevice, destination: hg.Tensor, destination_device: RemoteDevice
) -> bool:
    """Copy a tensor between members: the destination fetches it.

    Return False if the destination cannot reach the source. Raises MemberLostError for either, and
    the error of the command that was to compute the tensor.
    """
    sender, receiver = source_device.member.site, destination_device.member.site
    if sender.why_not or receiver.why_not or not receiver.can_reach(sender):
        return False
    devices = source_device.member_name, destination_device.member_name
    try:
        hand_over(source, destination, sender.address, devices)
    except HeliographError as error:
        for device in (source_device, destination_device):
            if device.member.session.closed:
                raise device.member.ours(error) from None
        if isinstance(error, MemberLostError | UnavailableError | PermissionDeniedError):
            # Both are present, as far as this host knows.
            logger.warning(
                "%s cannot fetch from %s: %s", receiver.name, sender.name, printable(error.message)
            )
            receiver.cannot_reach(sender)
            return False
        raise error.at(replace(error.origin, sequence=0)) from None
    return True
