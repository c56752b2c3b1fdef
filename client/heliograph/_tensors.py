"""Tensors on a server: views, byte ranges and checks, for both APIs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from operator import index
from typing import Any, Self

import numpy as np

from heliograph._arguments import sizes_of
from heliograph._common import Handle, Shell
from heliograph._indexing import basic_index
from heliograph._procedures import byte_view
from heliograph._running import empty_array, room_for
from heliograph_proto import commands as c
from heliograph_proto.errors import InvalidArgumentError, InvalidInputError, OutOfRangeError
from heliograph_proto.types import DType, DTypeArgument, TensorType, dtype, tensor_type


def checked_type(of: DTypeArgument, shape: Sequence[int] | int) -> TensorType:
    """The type of a tensor to be made. Raises InvalidArgumentError."""
    try:
        return tensor_type(of, sizes_of(shape))
    except InvalidArgumentError:
        raise
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(str(error)) from None


class TensorBase(Handle):
    """A tensor in a device's memory."""

    _kind = "tensor"

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
    ) -> None:
        super().__init__(shell, handle, owned=owned)
        self.type = type_
        #: The name of the device that holds it.
        self.device = device
        # A view keeps what it is a part of.
        self._source = source
        self._strides = type_.strides if strides is None else strides

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the dimensions."""
        return self.type.shape

    @property
    def dtype(self) -> DType:
        """The data type of the elements."""
        return self.type.dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self.type.ndim

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.type.size

    @property
    def nbytes(self) -> int:
        """The number of bytes of the elements."""
        return self.type.nbytes

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor of shape () has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<Tensor shape={self.shape} dtype={self.dtype} device={self.device} {self._state}>"

    # Views

    def __getitem__(self, key: Any) -> Self:
        """A view, by basic indexing: ints, slices with a positive step, None, Ellipsis."""
        found = basic_index(self.shape, key)
        if self.dtype.kind == "quantized" and found.sizes[-1:] != self.shape[-1:]:
            raise InvalidArgumentError(f"rows of {self.dtype} cannot be cut: they are blocks")
        shape = found.shape
        strides = tuple(
            0 if place is None else self._strides[place] * found.step[place] for place in found.kept
        )
        offset = sum(start * stride for start, stride in zip(found.start, self._strides, strict=True))
        return self._view(offset if math.prod(shape) else 0, TensorType(self.dtype, shape), strides)

    def reshape(self, *shape: Any) -> Self:
        """A view of a contiguous tensor in another shape; one size may be -1."""
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        if not self.is_contiguous:
            raise InvalidArgumentError("only a contiguous tensor can be seen in another shape")
        known = math.prod(size for size in sizes if size != -1)
        target = tuple(self.size // known if size == -1 and known else index(size) for size in sizes)
        type_ = checked_type(self.dtype, target)
        if type_.size != self.size:
            raise InvalidArgumentError(f"a tensor of shape {self.shape} cannot be seen as {tuple(sizes)}")
        return self._view(0, type_, type_.strides)

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie in row-major order without gaps."""
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

    # Whole commands that nobody waits for

    def memset(self, value: int, offset_bytes: int = 0, size_bytes: int | None = None) -> None:
        """Fills bytes with one value, 0 to 255. Errors appear at the next use of the tensor."""
        if not 0 <= index(value) <= 255:
            raise InvalidArgumentError(f"memset with {value}", advice="a byte is 0 to 255")
        offset, size = self._range(offset_bytes, size_bytes)
        command = c.Memset(self._live_handle, offset, size, index(value))
        self._shell.advance(lambda: self._shell.core.send(command))

    def copy_to(self, destination: TensorBase) -> None:
        """Copies the elements to another tensor of the same type, on any device of the session."""
        if not isinstance(destination, TensorBase):
            raise InvalidArgumentError(
                f"copy to {type(destination).__name__}: the destination is a tensor",
                advice="make one: session.empty(tensor.shape, tensor.dtype)",
            )
        if destination.type != self.type:
            raise InvalidArgumentError(f"copy of {self.type} to {destination.type}: the types differ")
        command = c.CopyTensor(self._live_handle, destination._used_in(self._shell))
        self._shell.advance(lambda: self._shell.core.send(command))

    # Bytes in and out

    def _range(self, offset_bytes: int, size_bytes: int | None) -> tuple[int, int]:
        """A checked byte range; without a size, up to the end. Raises OutOfRangeError."""
        offset = index(offset_bytes)
        size = self.nbytes - offset if size_bytes is None else index(size_bytes)
        if offset < 0 or size < 0 or offset + size > self.nbytes:
            raise OutOfRangeError(
                f"bytes {offset} to {offset + size} of a tensor of {self.nbytes} bytes",
                advice="offset and size count the tensor's elements in row-major order",
            )
        return offset, size

    def _writing(self, array: Any, offset_bytes: int) -> tuple[c.SetTensor, memoryview]:
        """The command and the bytes of a set."""
        found = self._elements(array, offset_bytes)
        offset, _ = self._range(offset_bytes, found.nbytes)
        return c.SetTensor(self._live_handle, offset), byte_view(found)

    def _elements(self, array: Any, offset_bytes: int) -> np.ndarray[Any, Any]:
        """The array to write: of the tensor's type, or a part of it in one dimension, or raw bytes."""
        found = as_elements(array, self.dtype)
        whole = self.shape if self.dtype.kind != "quantized" else empty_array(self.type).shape
        if found.shape != whole and not (found.ndim == 1 and (found.nbytes < self.nbytes or offset_bytes)):
            raise InvalidInputError(
                f"an array of shape {found.shape} for a tensor of shape {whole}",
                advice="a part is written as t[10:20].set(array), or as one dimension with offset_bytes",
            )
        return np.ascontiguousarray(found).reshape(found.shape)

    def _broadcast(self, value: Any) -> np.ndarray[Any, Any]:
        """An array or a Python number in the tensor's shape. Raises InvalidInputError."""
        found = as_elements(value, self.dtype)
        shape = self.shape if self.dtype.kind != "quantized" else empty_array(self.type).shape
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
        """The command of a get, and what gives the array that it fills."""
        offset, size = self._range(offset_bytes, size_bytes)
        command = c.GetTensor(self._live_handle, offset, size)
        if out is None:
            return command, self._room(offset, size)
        if not isinstance(out, np.ndarray):
            raise InvalidArgumentError(f"out is {type(out).__name__}", advice="a NumPy array to be filled")
        if out.nbytes != size or not (out.flags.c_contiguous and out.flags.writeable):
            raise InvalidArgumentError(
                f"out has {out.nbytes} bytes for {size}, or is not contiguous, or is read-only"
            )
        return command, lambda: out

    def _room(self, offset: int, size: int) -> Callable[[], np.ndarray[Any, Any]]:
        """Makes a new array: the whole tensor's, or of one dimension for a part of whole elements."""
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

    def _doing(self, what: str) -> Callable[[], str]:
        """What is said of a wait that ends too early."""
        return lambda: f"{what} {self._named}"

    @property
    def _named(self) -> str:
        return f"the tensor {self.type} on {self.device}"

    @property
    def _item_bytes(self) -> int:
        return self.dtype.block_bytes


def as_elements(array: Any, wanted: DType) -> np.ndarray[Any, Any]:
    """An array of the data type: Python's numbers are converted, arrays must have it already.

    Of quantized types, uint8. Raises InvalidInputError.
    """
    target = np.dtype(np.uint8) if wanted.kind == "quantized" else wanted.numpy
    if isinstance(array, np.ndarray | np.generic) or hasattr(array, "__array__"):
        found = np.asarray(array)
        if found.dtype != target:
            raise InvalidInputError(
                f"an array of {_name_of(found)} for {wanted}",
                advice=f"convert it: array.astype({target.name!r})",
            )
        return found
    try:
        plain = np.asarray(array)
        if plain.size and not np.can_cast(plain.dtype, target, "same_kind"):
            raise InvalidInputError(f"{_name_of(plain)} elements for {wanted}")
        return np.asarray(array, target)
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, InvalidInputError):
            raise
        raise InvalidInputError(f"{type(array).__name__} is no array of {wanted}: {error}") from None


def _name_of(array: np.ndarray[Any, Any]) -> str:
    try:
        return dtype(array.dtype).name
    except TypeError:
        return str(array.dtype)


def allocate(shell: Shell, type_: TensorType, device: str) -> int:
    """The handle of a new tensor of zeros."""
    core = shell.core

    def send() -> int:
        handle = core.handle()
        core.send(c.Allocate(handle, type_, device))
        return handle

    return shell.advance(send)
