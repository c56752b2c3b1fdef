"""Buffers, for both APIs: memory on a server, and the tensors in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, TypeVar

import numpy as np

from heliograph._base.device import DeviceArgument, buffer_type_info, buffer_type_name, device_info
from heliograph._base.tensor import TensorBase, checked_type, checked_types
from heliograph.core.arrays import byte_view, room_for
from heliograph.core.shell import Handle, Shell
from heliograph.core.sizes import size_of
from heliograph_proto import commands as c
from heliograph_proto.devices import BufferTypeInfo, DeviceInfo, Usage
from heliograph_proto.errors import (
    InvalidArgumentError,
    LimitExceededError,
    OutOfRangeError,
    UnsupportedError,
)
from heliograph_proto.types import DTypeArgument, TensorType

#: A multiple of every device's alignment.
_PAGE_BYTES = 4096

TensorT = TypeVar("TensorT", bound=TensorBase)
BufferTypeArgument = BufferTypeInfo | str | None
UsageArgument = Usage | str


def usage_of(argument: UsageArgument) -> Usage:
    """Return a usage by its word: "any", "weights" or "compute". Raises InvalidArgumentError."""
    if isinstance(argument, Usage):
        return argument
    words = {usage.name.lower(): usage for usage in Usage}
    if not isinstance(argument, str) or argument not in words:
        raise InvalidArgumentError(f"usage is {argument!r:.80}", advice=f"one of: {', '.join(words)}")
    return words[argument]


@dataclass(frozen=True, slots=True)
class BufferRequest:
    """The place and the purpose of new memory."""

    info: DeviceInfo
    #: Empty for the device's default.
    buffer_type: str
    usage: Usage

    @property
    def device(self) -> str:
        """The device's name."""
        return self.info.name

    @property
    def memory(self) -> BufferTypeInfo | None:
        """The device's description of the buffer type; None without one."""
        return buffer_type_info(self.info, self.buffer_type)


def place_of(
    shell: Shell, device: DeviceArgument, buffer_type: BufferTypeArgument, usage: UsageArgument
) -> BufferRequest:
    """Return the place that arguments name. Raises UnknownDeviceError and InvalidArgumentError."""
    info = device_info(shell, device)
    return BufferRequest(info, buffer_type_name(info, buffer_type), usage_of(usage))


class BufferBase(Handle):
    """A block of memory on a device, in which tensors are placed."""

    _kind = "buffer"

    def __init__(
        self, shell: Shell, handle: int, place: BufferRequest, size_bytes: int, *, is_list: bool
    ) -> None:
        super().__init__(shell, handle)
        #: The name of the device.
        self.device = place.device
        #: For a buffer of `empty_many`: the size of its tensors, without padding.
        self.size_bytes = size_bytes
        #: The usage that it was last given.
        self.usage = place.usage
        self._memory = place.memory
        #: True if its size is that of a list of tensors, to which the device adds padding.
        self._is_list = is_list

    @property
    def buffer_type(self) -> str:
        """The name of its buffer type; empty if the device does not report it."""
        return self._memory.name if self._memory is not None else ""

    def clear(self, value: int = 0) -> None:
        """Fill all bytes with one value, 0 to 255.

        Raises InvalidArgumentError. Errors of the command are raised at the next use of its
        tensors.
        """
        if not 0 <= index(value) <= 255:
            raise InvalidArgumentError(f"clear with {value}", advice="a byte is 0 to 255")
        self._send(c.ClearBuffer(self._live_handle, index(value)))

    def reset(self) -> None:
        """Drop the device's extra data of its tensors before placing others. The bytes remain."""
        self._send(c.ResetBuffer(self._live_handle))

    def set_usage(self, usage: UsageArgument) -> None:
        """Set the purpose from now on: "any", "weights" or "compute"; a hint to the device.

        Raises InvalidArgumentError.
        """
        found = usage_of(usage)
        self._send(c.SetUsage(self._live_handle, found))
        self.usage = found

    def __repr__(self) -> str:
        what = f"{self.device} {self.buffer_type}".rstrip()
        return f"<Buffer {self.size_bytes:,} bytes on {what} for {self.usage.name.lower()}, {self._state}>"

    def _place(
        self, kind: type[TensorT], shape: Sequence[int] | int, dtype: DTypeArgument, offset_bytes: int
    ) -> TensorT:
        type_, offset = checked_type(dtype, shape), index(offset_bytes)
        self._check_place(type_, offset)
        buffer, core = self._live_handle, self._shell.core

        def send() -> int:
            handle = core.handle()
            core.send(c.PlaceTensor(handle, buffer, offset, type_))
            return handle

        return kind(self._shell, self._shell.advance(send), type_, self.device, buffer=self)

    def _check_place(self, type_: TensorType, offset: int) -> None:
        """Raise OutOfRangeError or InvalidArgumentError; the device may need padding as well."""
        if offset < 0 or (not self._is_list and offset + type_.nbytes > self.size_bytes):
            raise OutOfRangeError(
                f"{type_} at byte {offset:,} takes bytes to {offset + type_.nbytes:,} "
                f"of a buffer of {self.size_bytes:,}",
                advice="make a larger buffer; device.placement tells how large",
            )
        alignment = self._memory.alignment_bytes if self._memory is not None else 1
        if offset % alignment:
            raise InvalidArgumentError(
                f"byte {offset:,} is not a multiple of {alignment}, the alignment on {self.device}",
                advice=f"for example {offset // alignment * alignment + alignment:,}",
            )

    def _send(self, command: c.CommandKind) -> None:
        self._shell.advance(lambda: self._shell.core.send(command))


BufferT = TypeVar("BufferT", bound=BufferBase)


# Making memory


def new_tensor(
    shell: Shell, kind: type[TensorT], shape: Sequence[int] | int, dtype: DTypeArgument, place: BufferRequest
) -> TensorT:
    """Create a tensor of zeros in its own buffer."""
    type_, core = checked_type(dtype, shape), shell.core

    def send() -> int:
        handle = core.handle()
        core.send(c.Allocate(handle, type_, place.device, place.buffer_type, place.usage))
        return handle

    return kind(shell, shell.advance(send), type_, place.device)


def new_tensors(
    shell: Shell,
    kinds: tuple[type[TensorT], type[BufferBase]],
    tensors: Iterable[tuple[Sequence[int] | int, DTypeArgument]],
    place: BufferRequest,
) -> list[TensorT]:
    """Create tensors of zeros in one buffer."""
    types, core = checked_types(tensors, shell.info.limits.graph_nodes), shell.core
    if not types:
        return []

    def send() -> tuple[int, list[int]]:
        buffer, handles = core.handle(), [core.handle() for _ in types]
        pairs = tuple(zip(handles, types, strict=True))
        command = c.AllocateTensors(buffer, pairs, place.device, place.buffer_type, place.usage)
        if size_of(command) > shell.info.limits.message_bytes:
            raise LimitExceededError(
                f"a list of {len(types):,} tensors does not fit into one message of this server",
                advice="use several lists",
            )
        core.send(command)
        return buffer, handles

    number, handles = shell.advance(send)
    size_bytes = sum(type_.nbytes for type_ in types)
    buffer = kinds[1](shell, number, place, size_bytes, is_list=True)
    return [
        kinds[0](shell, handle, type_, place.device, buffer=buffer)
        for handle, type_ in zip(handles, types, strict=True)
    ]


def new_buffer(
    shell: Shell, kind: type[BufferT], size_bytes: int, place: BufferRequest, memory: memoryview | None = None
) -> BufferT:
    """Create a buffer of zeros, or of this process's memory."""
    size, core = index(size_bytes), shell.core
    if not 0 <= size < 2**63:
        raise InvalidArgumentError(f"a buffer of {size:,} bytes", advice="0 to 2**63 - 1")

    def send() -> int:
        handle = core.handle()
        core.send(c.AllocateBuffer(handle, size, place.device, place.buffer_type, place.usage, memory))
        return handle

    return kind(shell, shell.advance(send), place, size, is_list=False)


# Memory of this process


def wrapped(
    shell: Shell,
    kinds: tuple[type[TensorT], type[BufferBase]],
    array: np.ndarray[Any, Any],
    device: DeviceArgument,
) -> TensorT:
    """Create a tensor on the array's own memory."""
    place = place_of(shell, device, None, Usage.ANY)
    _check_wrappable(shell, place, array)
    type_ = checked_type(array.dtype, array.shape)
    memory = byte_view(array)
    buffer = new_buffer(shell, kinds[1], memory.nbytes, place, memory)
    return buffer._place(kinds[0], type_.shape, type_.dtype, 0)


def _check_wrappable(shell: Shell, place: BufferRequest, array: np.ndarray[Any, Any]) -> None:
    """Raise UnsupportedError or InvalidArgumentError."""
    copying = "session.put(array) copies it there"
    if shell.address.scheme != "local":
        raise UnsupportedError(f"{shell.address} cannot use memory of this process in place", advice=copying)
    if not place.info.capabilities.buffer_from_host:
        raise UnsupportedError(f"device {place.device} cannot use host memory in place", advice=copying)
    if not isinstance(array, np.ndarray):
        raise InvalidArgumentError(f"{type(array).__name__} is not an array", advice="a NumPy array")
    if not (array.flags.c_contiguous and array.flags.writeable):
        raise InvalidArgumentError(
            "the array is read-only, or has gaps", advice="wrap a new array: hg.aligned_empty"
        )
    alignment = place.memory.alignment_bytes if place.memory is not None else 1
    if array.nbytes and array.ctypes.data % alignment:
        raise InvalidArgumentError(
            f"the array does not begin at a multiple of {alignment} bytes, as {place.device} needs it",
            advice="make it with hg.aligned_empty(shape, dtype)",
        )


def aligned_empty(
    shape: Sequence[int] | int, dtype: DTypeArgument, alignment_bytes: int = _PAGE_BYTES
) -> np.ndarray[Any, Any]:
    """Create an uninitialised, aligned array, for `session.wrap`.

    Args:
        shape: The array's shape; an integer means one dimension.
        dtype: Its data type; for a quantized type the array has the rows of bytes.
        alignment_bytes: It starts at a multiple of this power of two (default: 4096).

    Raises InvalidArgumentError and OutOfMemoryError.
    """
    type_, alignment = checked_type(dtype, shape), index(alignment_bytes)
    if alignment < 1 or alignment & (alignment - 1):
        raise InvalidArgumentError(f"an alignment of {alignment}", advice="a power of two")
    room = room_for((type_.nbytes + alignment,), np.dtype(np.uint8))
    start = -room.ctypes.data % alignment
    plain = type_.dtype.storage if type_.dtype.kind == "quantized" else type_.dtype.numpy
    return room[start : start + type_.nbytes].view(plain).reshape(type_.storage_shape)
