"""`hg.aio.Tensor` and `hg.aio.Buffer`: memory on a device, read and written from here."""

# ruff: noqa: ASYNC109

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from heliograph._base.buffer import BufferBase
from heliograph._base.streams import StreamBase, stream_handle
from heliograph._base.tensor import TensorBase
from heliograph.aio.array_access import ArrayAccess
from heliograph.core.future import Pending, What
from heliograph.core.tracing import GET_SPAN, SET_SPAN, traced
from heliograph.procedures.transfer import Sending, read_new, wait_for_all, write
from heliograph_proto.devices import CopyPath
from heliograph_proto.types import DTypeArgument

if TYPE_CHECKING:
    from heliograph.transport.aio import AioShell


class WriteFuture:
    """A write whose array must not change until the write is done; awaitable."""

    def __init__(self, shell: AioShell, pendings: list[Pending], what: What) -> None:
        self._shell, self._pendings, self._what = shell, pendings, what

    def done(self) -> bool:
        """True if the write is done and its array may be overwritten."""
        return all(pending.done for pending in self._pendings)

    async def result(self, timeout: float | None = None) -> None:
        """Wait until the write is done. Raises its error, or DeadlineExceededError."""
        await self._shell.drive(wait_for_all(self._shell.core, self._pendings), timeout, self._what)

    def __await__(self) -> Generator[Any, Any, None]:
        return self.result().__await__()

    def __repr__(self) -> str:
        return f"<WriteFuture {'done' if self.done() else 'pending'}>"


class Tensor(ArrayAccess):
    """A tensor in a device's memory.

    Made by `session.empty`, `session.put`, `buffer.place`, or a run. It is freed by `free`, or when
    it is garbage collected. Indexing gives views: `t[10:20].set(array)`. `buffer` is the buffer in
    which it was placed; None if it has its own.
    """

    _shell: AioShell
    buffer: Buffer | None

    @overload
    async def set(
        self,
        array: Any,
        offset_bytes: int | None = None,
        *,
        copy: Literal[True] = True,
        timeout: float | None = None,
        stream: StreamBase | None = None,
    ) -> None: ...
    @overload
    async def set(
        self,
        array: Any,
        offset_bytes: int | None = None,
        *,
        copy: Literal[False],
        timeout: float | None = None,
        stream: StreamBase | None = None,
    ) -> WriteFuture: ...
    async def set(
        self,
        array: Any,
        offset_bytes: int | None = None,
        *,
        copy: bool = True,
        timeout: float | None = None,
        stream: StreamBase | None = None,
    ) -> WriteFuture | None:
        """Write an array of the tensor's data type and shape.

        Returns when the array may be overwritten. Errors of the write are raised at the next use of
        the tensor, or by `session.synchronize`.

        Args:
            array: The elements.
            offset_bytes: The position of a one-dimensional part to write; None writes the whole
                tensor.
            copy: With False, return as early as possible, with a future. The array must not change
                until the future is done.
            timeout: Seconds to wait; None means no limit.
            stream: The stream whose order the write joins (default: the session's own).

        Raises InvalidInputError, OutOfRangeError and DeadlineExceededError.
        """
        command, data = self._writing(array, offset_bytes)
        what = self._doing("writing")
        how = Sending(stream_handle(self._shell, stream), observed=not copy, keep=not copy, what=what)
        procedure = write(self._shell.core, command, data, self.dtype.block_bytes, how)
        pendings = await self._shell.drive(traced(SET_SPAN, procedure), timeout, what)
        return None if copy else WriteFuture(self._shell, pendings, what)

    async def get(
        self,
        out: np.ndarray[Any, Any] | None = None,
        offset_bytes: int = 0,
        size_bytes: int | None = None,
        *,
        timeout: float | None = None,
        stream: StreamBase | None = None,
    ) -> np.ndarray[Any, Any]:
        """Read the elements, after everything sent before has been computed.

        Args:
            out: A contiguous array with exactly as many bytes, to fill and return.
            offset_bytes: Where a part begins, in bytes in row-major order.
            size_bytes: The size of a part, in bytes. A part has one dimension.
            timeout: Seconds to wait; None means no limit.
            stream: The stream whose order the read joins (default: the session's own).

        Returns an array of the tensor's shape and data type, or of one dimension for a part.

        Raises OutOfRangeError, the error of the work that computes the tensor, and
        DeadlineExceededError.
        """
        command, make = self._reading(out, offset_bytes, size_bytes)
        procedure = read_new(
            self._shell.core, command, make, self.dtype.block_bytes, stream_handle(self._shell, stream)
        )
        return await self._shell.drive(traced(GET_SPAN, procedure), timeout, self._doing("reading"))

    async def map(self, timeout: float | None = None) -> np.ndarray[Any, Any]:
        """Map the tensor's own memory as an array of its shape and strides.

        Both sides can read and write it. This needs the buffer type "shared" (`session.empty(...,
        buffer_type="shared")`) of a device on this host: CPUs have it, and GPUs, which copy to and
        from such memory directly.

        The call returns after everything sent before has written the tensor. Commands sent later
        see writes to the array, and their own writes are in the array when they are done
        (`session.synchronize`); the caller alone keeps the two in order. Runs do not compute in
        such memory: they read it through a copy. The array stays valid when the tensor is freed.

        Raises UnsupportedError for other memory or another host, the error of the work that
        computes the tensor, and DeadlineExceededError.
        """
        return await self._shell.drive(self._map(), timeout, self._doing("mapping"))

    async def set_2d(
        self,
        array: Any,
        offset_bytes: int = 0,
        stride_bytes: int | None = None,
        *,
        timeout: float | None = None,
        stream: StreamBase | None = None,
    ) -> None:
        """Write pieces of equal size at equal distances: array[i] goes to byte offset + i * stride.

        Returns when the array may be overwritten, as `set` does.

        Args:
            array: An array of the tensor's data type, or plain bytes (uint8). Its rows, of any
                shape, are the pieces.
            offset_bytes: The position of the first piece.
            stride_bytes: The distance between the starts of two pieces (default: the size of a
                piece).
            timeout: Seconds to wait; None means no limit.
            stream: The stream whose order the write joins (default: the session's own).

        Raises InvalidInputError, OutOfRangeError for pieces that overlap or leave the tensor,
        InvalidArgumentError for a view with gaps, and DeadlineExceededError.
        """
        command, data = self._writing_2d(array, offset_bytes, stride_bytes)
        what = self._doing("writing")
        how = Sending(stream_handle(self._shell, stream), what=what)
        procedure = write(self._shell.core, command, data, self.dtype.block_bytes, how)
        await self._shell.drive(traced(SET_SPAN, procedure), timeout, what)

    async def get_2d(
        self,
        count: int,
        size_bytes: int,
        offset_bytes: int = 0,
        stride_bytes: int | None = None,
        out: np.ndarray[Any, Any] | None = None,
        *,
        timeout: float | None = None,
        stream: StreamBase | None = None,
    ) -> np.ndarray[Any, Any]:
        """Read pieces of equal size at equal distances.

        Args:
            count: The number of pieces.
            size_bytes: The size of a piece.
            offset_bytes: The position of the first piece.
            stride_bytes: The distance between the starts of two pieces (default: the size of a
                piece).
            out: A contiguous array with exactly as many bytes, to fill and return.
            timeout: Seconds to wait; None means no limit.
            stream: The stream whose order the read joins (default: the session's own).

        Returns the bytes, uint8 of shape [count, size_bytes]. Raises the errors of `set_2d` and
        `get`.
        """
        command, make = self._reading_2d(count, size_bytes, offset_bytes, stride_bytes, out)
        procedure = read_new(self._shell.core, command, make, 1, stream_handle(self._shell, stream))
        return await self._shell.drive(traced(GET_SPAN, procedure), timeout, self._doing("reading"))

    async def copy_and_wait(
        self,
        destination: TensorBase,
        timeout: float | None = None,
        *,
        stream: StreamBase | None = None,
    ) -> CopyPath | None:
        """Copy the tensor like `copy_to`, and wait for it.

        Returns which path copied the bytes; None if there was nothing to copy. Raises the error of
        the work that computes the tensor, or DeadlineExceededError; the copy is cancelled then.
        """
        return await self._shell.drive(self._copy(destination, stream), timeout, self._doing("copying"))


class Buffer(BufferBase):
    """A block of memory on a device.

    Made by `session.buffer`, or for the tensors of `session.empty_many`. It is freed by `free`, or
    when it is garbage collected; its memory is kept as long as tensors are in it.
    """

    _shell: AioShell

    def place(self, shape: Sequence[int] | int, dtype: DTypeArgument, offset_bytes: int = 0) -> Tensor:
        """Create a tensor in the buffer, on the bytes that are there.

        Tensors may overlap: they share bytes, and work on them runs in the order in which it was
        sent.

        Args:
            shape: The tensor's shape; an integer means one dimension.
            dtype: The tensor's data type.
            offset_bytes: Its position in the buffer, a multiple of the buffer type's alignment.

        Raises OutOfRangeError and InvalidArgumentError. Other errors, such as those of a buffer of
        several parts, are raised at the tensor's first use.
        """
        return self._place(Tensor, shape, dtype, offset_bytes)
