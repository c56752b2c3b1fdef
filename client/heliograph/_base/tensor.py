"""Tensors on a server, for both APIs: views, byte ranges and checks."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from heliograph._base.streams import StreamBase, stream_handle
from heliograph.core.arrays import byte_view, empty_array, room_for
from heliograph.core.effects import Procedure
from heliograph.core.shell import Handle, Shell
from heliograph.graph.arguments import sizes_of
from heliograph.graph.symbol import Typed
from heliograph.graph.torch_tensors import host_array
from heliograph.graph.value import basic_index
from heliograph.procedures.transfer import map_memory, observe
from heliograph_proto import commands as c
from heliograph_proto.devices import CopyPath
from heliograph_proto.errors import (
    InvalidArgumentError,
    InvalidInputError,
    LimitExceededError,
    OutOfRangeError,
    ProtocolError,
)
from heliograph_proto.types import F32, DType, DTypeArgument, TensorType, dtype, tensor_type

if TYPE_CHECKING:
    from heliograph._base.buffer import BufferBase


def checked_type(of: DTypeArgument, shape: Sequence[int] | int) -> TensorType:
    """Return the type of a new tensor. Raises InvalidArgumentError."""
    try:
        return tensor_type(of, sizes_of(shape))
    except InvalidArgumentError:
        raise
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(str(error)) from None


def checked_types(
    tensors: Iterable[tuple[Sequence[int] | int, DTypeArgument]], most: int
) -> tuple[TensorType, ...]:
    """Return the types of new tensors, at most `most`.

    Raises InvalidArgumentError and LimitExceededError.
    """
    try:
        pairs = [(shape, of) for shape, of in tensors]
    except (TypeError, ValueError):
        raise InvalidArgumentError(
            f"{tensors!r:.80} is not a list of tensors", advice="pairs: [((4, 3), 'f32'), (8, 'i64')]"
        ) from None
    if len(pairs) > most:
        raise LimitExceededError(
            f"{len(pairs):,} tensors; this server takes at most {most:,} at once", advice="use several lists"
        )
    return tuple(checked_type(of, shape) for shape, of in pairs)


class TensorBase(Handle, Typed):
    """A tensor in a device's memory."""

    _kind = "tensor"
    #: The buffer in which it was placed; None if it has its own.
    buffer: BufferBase | None

    def __init__(
        self,
        shell: Shell,
        handle: int,
        type_: TensorType,
        device: str,
        *,
        owned: bool = True,
        source: TensorBase | None = None,
        strides: tuple[int, ...] | None = None,
        buffer: BufferBase | None = None,
    ) -> None:
        super().__init__(shell, handle, owned=owned)
        self.type = type_
        self._device, self._since = device, shell.watchers.replacements
        # A view keeps the tensor that it is a part of.
        self._source = source
        self.buffer = source.buffer if source is not None else buffer
        self._strides = type_.strides if strides is None else strides

    @property
    def device(self) -> str:
        """The name of the device that holds it."""
        return self._shell.watchers.place_of(self._device, self._since)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor of shape () has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<Tensor shape={self.shape} dtype={self.dtype} device={self.device} {self._state}>"

    def _repr_html_(self) -> str:
        """Return the view of it in a notebook."""
        from heliograph._base.views.tensor import tensor_view

        return tensor_view(self)

    # Views

    def __getitem__(self, key: Any) -> Self:
        """Return a view, by basic indexing: integers, slices, None, Ellipsis.

        A slice with a negative step needs a copy, and is refused.

        Raises IndexError and InvalidArgumentError.
        """
        found = basic_index(self.shape, key)
        if found.backwards:
            raise InvalidArgumentError(
                f"index {key!r:.80} reverses dimension {found.backwards[0]}, which no view does",
                advice="reverse it in a graph, x[::-1] or hg.flip, or read it: tensor.get()[::-1]",
            )
        if self.dtype.kind == "quantized" and found.sizes[-1:] != self.shape[-1:]:
            raise InvalidArgumentError(f"rows of {self.dtype} cannot be cut: they are blocks")
        shape = found.shape
        strides = tuple(
            0 if place is None else self._strides[place] * found.step[place] for place in found.kept
        )
        offset = sum(start * stride for start, stride in zip(found.start, self._strides, strict=True))
        return self._view(offset if math.prod(shape) else 0, TensorType(self.dtype, shape), strides)

    def reshape(self, *shape: Any) -> Self:
        """Return a view of a contiguous tensor in another shape; one size may be -1.

        Raises InvalidArgumentError.
        """
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        if not self.is_contiguous:
            raise InvalidArgumentError("only a contiguous tensor can be reshaped without a copy")
        known = math.prod(size for size in sizes if size != -1)
        target = tuple(self.size // known if size == -1 and known else index(size) for size in sizes)
        type_ = checked_type(self.dtype, target)
        if type_.size != self.size:
            raise InvalidArgumentError(f"a tensor of shape {self.shape} cannot be reshaped to {tuple(sizes)}")
        return self._view(0, type_, type_.strides)

    @property
    def is_contiguous(self) -> bool:
        """True if its elements are in row-major order without gaps."""
        expected = self.type.strides
        sizes = zip(self.shape, self._strides, expected, strict=True)
        return self.size == 0 or all(size == 1 or have == want for size, have, want in sizes)

    def _view(self, offset_bytes: int, type_: TensorType, strides: tuple[int, ...]) -> Self:
        source, core = self._live_handle, self._shell.core
        sent = () if strides == type_.strides else strides

        def send() -> int:
            handle = core.handle()
            core.send(c.View(handle, source, offset_bytes, type_, sent))
            return handle

        handle = self._shell.advance(send)
        return type(self)(self._shell, handle, type_, self.device, source=self, strides=strides)

    # Commands without waiting

    def memset(
        self,
        value: int,
        offset_bytes: int = 0,
        size_bytes: int | None = None,
        *,
        stream: StreamBase | None = None,
    ) -> None:
        """Fill bytes with one value, 0 to 255, without waiting.

        Args:
            value: The byte.
            offset_bytes: Where to begin, in bytes in row-major order.
            size_bytes: The number of bytes (default: to the end).
            stream: The stream whose order the command joins (default: the session's own).

        Raises InvalidArgumentError and OutOfRangeError. Errors of the command are raised at the
        next use of the tensor.
        """
        if not 0 <= index(value) <= 255:
            raise InvalidArgumentError(f"memset with {value}", advice="a byte is 0 to 255")
        offset, size = self._range(offset_bytes, size_bytes)
        command = c.Memset(self._live_handle, offset, size, index(value))
        self._send(command, stream)

    def copy_to(self, destination: TensorBase, *, stream: StreamBase | None = None) -> None:
        """Copy the elements to another tensor of the same type, on any device of the session.

        Returns at once; errors are raised at the next use of the destination. Raises
        InvalidArgumentError if the types differ.
        """
        self._send(self._copying(destination), stream)

    def _send(self, command: c.CommandKind, stream: StreamBase | None) -> None:
        number = stream_handle(self._shell, stream)
        self._shell.advance(lambda: self._shell.core.send(command, stream=number))

    def _copying(self, destination: TensorBase) -> c.CopyTensor:
        if not isinstance(destination, TensorBase):
            raise InvalidArgumentError(
                f"cannot copy to {type(destination).__name__}: the destination must be a tensor",
                advice="make one: session.empty(tensor.shape, tensor.dtype)",
            )
        if destination.type != self.type:
            raise InvalidArgumentError(f"cannot copy {self.type} to {destination.type}: the types differ")
        return c.CopyTensor(self._live_handle, destination._used_in(self._shell))

    def _copy(self, destination: TensorBase, stream: StreamBase | None) -> Procedure[CopyPath | None]:
        """Copy, and return the path by which the bytes were copied."""
        command, core = self._copying(destination), self._shell.core
        number = stream_handle(self._shell, stream)

        def procedure() -> Procedure[CopyPath | None]:
            completion = yield from observe(core, core.send(command, stream=number, observed=True))
            return completion.copy_path if completion is not None else None

        return procedure()

    # Bytes in and out

    def _range(self, offset_bytes: int, size_bytes: int | None) -> tuple[int, int]:
        """Return a checked byte range; without a size, to the end. Raises OutOfRangeError."""
        offset = index(offset_bytes)
        size = self.nbytes - offset if size_bytes is None else index(size_bytes)
        if offset < 0 or size < 0 or offset + size > self.nbytes:
            raise OutOfRangeError(
                f"bytes {offset} to {offset + size} of a tensor of {self.nbytes} bytes",
                advice="offset and size count the tensor's elements in row-major order",
            )
        return offset, size

    def _writing(self, array: Any, offset_bytes: int | None) -> tuple[c.SetTensor, memoryview]:
        """Return the command and the bytes of a `set`."""
        found = as_elements(array, self.dtype)
        whole = self.type.storage_shape
        if found.shape != whole and not (offset_bytes is not None and found.ndim == 1):
            raise InvalidInputError(
                f"an array of shape {found.shape} for a tensor of shape {whole}",
                advice="a part is written as t[10:20].set(array), or as one dimension with offset_bytes",
            )
        offset, _ = self._range(offset_bytes or 0, found.nbytes)
        return c.SetTensor(self._live_handle, offset), byte_view(np.ascontiguousarray(found))

    def _broadcast(self, value: Any) -> np.ndarray[Any, Any]:
        """Return an array or a Python number in the tensor's shape. Raises InvalidInputError."""
        found = as_elements(value, self.dtype)
        shape = self.type.storage_shape
        try:
            return np.broadcast_to(found, shape)
        except ValueError:
            raise InvalidInputError(
                f"an array of shape {found.shape} does not broadcast to {shape}",
                advice="its shape must be that of the part that is written, or have sizes of 1",
            ) from None

    def _reading(
        self, out: np.ndarray[Any, Any] | None, offset_bytes: int, size_bytes: int | None
    ) -> tuple[c.GetTensor, Callable[[], np.ndarray[Any, Any]]]:
        """Return the command of a `get`, and a function that returns the array to fill."""
        offset, size = self._range(offset_bytes, size_bytes)
        command = c.GetTensor(self._live_handle, offset, size)
        if out is None:
            return command, self._room(offset, size)
        _check_out(out, size)
        return command, lambda: out

    def _room(self, offset: int, size: int) -> Callable[[], np.ndarray[Any, Any]]:
        """Return a function that makes a new array; for a part it has one dimension."""
        if (offset, size) == (0, self.nbytes):
            return partial(empty_array, self.type)
        if self.dtype.kind == "quantized":
            return partial(room_for, (size,), np.dtype(np.uint8))
        if size % self.dtype.block_bytes:
            raise OutOfRangeError(
                f"{size} bytes are not whole elements of {self.dtype}",
                advice="pass out=, an array of uint8",
            )
        return partial(room_for, (size // self.dtype.block_bytes,), self.dtype.numpy)

    # Memory that is mapped

    def _map(self) -> Procedure[np.ndarray[Any, Any]]:
        """Map the tensor's own memory as an array."""
        number, core = self._live_handle, self._shell.core

        def procedure() -> Procedure[np.ndarray[Any, Any]]:
            memory, offset = yield from map_memory(core, number)
            if offset + self._extent_bytes > memory.nbytes:
                raise ProtocolError("the server sent memory that does not contain the tensor")
            if self.dtype.kind == "quantized":
                return np.ndarray(self.type.storage_shape, np.uint8, memory, offset)
            return np.ndarray(self.shape, self.dtype.numpy, memory, offset, self._strides)

        return procedure()

    # Pieces at equal distances

    def _writing_2d(
        self, array: Any, offset_bytes: int, stride_bytes: int | None
    ) -> tuple[c.SetTensor, memoryview]:
        """Return the command and the bytes of a `set_2d`: each row of the array is a piece."""
        raw = isinstance(array, np.ndarray) and array.dtype == np.uint8
        found = array if raw else as_elements(array, self.dtype)
        if found.ndim == 0:
            raise InvalidInputError(
                "an array of shape () has no rows", advice="each row, array[i], is one piece of the tensor"
            )
        size = found.nbytes // len(found) if len(found) else 0
        offset, chunks = self._chunks(len(found), size, offset_bytes, stride_bytes)
        return c.SetTensor(self._live_handle, offset, chunks=chunks), byte_view(np.ascontiguousarray(found))

    def _reading_2d(
        self,
        count: int,
        size_bytes: int,
        offset_bytes: int,
        stride_bytes: int | None,
        out: np.ndarray[Any, Any] | None,
    ) -> tuple[c.GetTensor, Callable[[], np.ndarray[Any, Any]]]:
        """Return the command of a `get_2d`, and a function that returns the array to fill."""
        offset, chunks = self._chunks(count, size_bytes, offset_bytes, stride_bytes)
        total = index(count) * index(size_bytes)
        command = c.GetTensor(self._live_handle, offset, total, chunks=chunks)
        if out is None:
            return command, partial(room_for, (index(count), index(size_bytes)), np.dtype(np.uint8))
        _check_out(out, total)
        return command, lambda: out

    def _chunks(
        self, count: int, size_bytes: int, offset_bytes: int, stride_bytes: int | None
    ) -> tuple[int, c.Chunks | None]:
        """Return the offset, and the pieces; None for pieces without gaps between them.

        Raises InvalidArgumentError and OutOfRangeError.
        """
        if not self.is_contiguous:
            raise InvalidArgumentError(
                "only a contiguous tensor has pieces",
                advice="read and write a view with gaps as a whole",
            )
        number, size = index(count), index(size_bytes)
        stride = size if stride_bytes is None else index(stride_bytes)
        if min(number, size) < 0 or (number > 1 and stride < size):
            raise OutOfRangeError(
                f"{number} pieces of {size} bytes, {stride} from one to the next",
                advice="count and size are 0 or more, the stride at least the size",
            )
        chunks = c.Chunks(size, number, stride)
        offset, _ = self._range(offset_bytes, chunks.extent_bytes)
        return offset, chunks if size and number > 1 and stride > size else None

    def _doing(self, what: str) -> Callable[[], str]:
        """Return a description of an operation, for errors."""
        return lambda: f"{what} {self._named}"

    @property
    def _extent_bytes(self) -> int:
        """The bytes from the start of the first element to the end of the last one."""
        if self.size == 0 or self.dtype.kind == "quantized":
            return self.nbytes
        pairs = zip(self.shape, self._strides, strict=True)
        return sum((size - 1) * step for size, step in pairs) + self.dtype.block_bytes

    @property
    def _named(self) -> str:
        return f"the tensor {self.type} on {self.device}"


def _check_out(out: np.ndarray[Any, Any], size_bytes: int) -> None:
    """Raise InvalidArgumentError unless the array can be filled with this many bytes."""
    if not isinstance(out, np.ndarray):
        raise InvalidArgumentError(f"out is {type(out).__name__}", advice="a NumPy array to fill")
    if out.nbytes != size_bytes or not (out.flags.c_contiguous and out.flags.writeable):
        raise InvalidArgumentError(
            f"out has {out.nbytes} bytes for {size_bytes}, or is not contiguous, or is read-only"
        )


def as_elements(array: Any, data_type: DType, *, casts: bool = False) -> np.ndarray[Any, Any]:
    """Return an array of the data type; of uint8 for quantized types.

    Python numbers are converted. Arrays must already have the type, but with `casts` those of
    float64 are cast to f32, with a note the first time. Raises InvalidInputError.
    """
    target = np.dtype(np.uint8) if data_type.kind == "quantized" else data_type.numpy
    if isinstance(array, np.ndarray | np.generic) or hasattr(array, "__array__"):
        found = _elements(array)
        if casts and found.dtype == np.float64 and data_type is F32:
            _tell_of_casts()
            return found.astype(np.float32)
        if found.dtype != target:
            raise InvalidInputError(
                f"an array of {_name_of(found)} for {data_type}",
                advice=f"convert it: array.astype({target.name!r})",
            )
        return found
    try:
        plain = np.asarray(array)
        if plain.size and not np.can_cast(plain.dtype, target, "same_kind"):
            raise InvalidInputError(
                f"{_name_of(plain)} elements for {data_type}",
                advice=f"give numbers, or an array of {target.name}",
            )
        return np.asarray(array, target)
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, InvalidInputError):
            raise
        raise InvalidInputError(f"{type(array).__name__} is not an array of {data_type}: {error}") from None


def _tell_of_casts() -> None:
    """Note once that float64 arrays are cast; Python shows a warning of one place once."""
    global _told_of_casts
    if not _told_of_casts:
        _told_of_casts = True
        warnings.warn(
            "a float64 array was cast to f32, which takes time in each run; this is told once. NumPy's "
            "default is float64: array.astype(np.float32)",
            stacklevel=_caller_level(),
        )


#: True once the note on casts was given.
_told_of_casts = False


def _caller_level() -> int:
    """Return the level of the first frame outside of this package, for a warning."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("heliograph."):
        level, frame = level + 1, frame.f_back
    return level


def _elements(array: Any) -> np.ndarray[Any, Any]:
    try:
        return host_array(array)
    except InvalidArgumentError as error:
        raise InvalidInputError(error.message, advice=error.advice) from None


def _name_of(array: np.ndarray[Any, Any]) -> str:
    try:
        return dtype(array.dtype).name
    except TypeError:
        return str(array.dtype)
