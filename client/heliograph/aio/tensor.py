"""`hg.aio.Tensor`: a tensor in a device's memory, read and written from here; and buffers."""

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
    """A write whose array must stay as it is until the write is done; awaitable."""

    def __init__(self, shell: AioShell, pendings: list[Pending], what: What) -> None:
        self._shell, self._pendings, self._what = shell, pendings, what

    def done(self) -> bool:
        """Whether the array may be overwritten."""
        return all(pending.done for pending in self._pendings)

    async def result(self, timeout: float | None = None) -> None:
        """Waits until the write is done. Raises its error, or DeadlineExceededError."""
        await self._shell.drive(wait_for_all(self._shell.core, self._pendings), timeout, self._what)

    def __await__(self) -> Generator[Any, Any, None]:
        return self.result().__await__()

    def __repr__(self) -> str:
        return f"<WriteFuture {'done' if self.done() else 'pending'}>"


class Tensor(ArrayAccess):
    """A tensor in a device's memory: made by `session.empty`, `session.put`, `buffer.place`, or a run.

    It is freed when it is collected, or by `free`. Indexing gives views: `t[10:20].set(array)`.
    `buffer` is the one in which it was placed; None where it has one of its own.
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
        """Writes an array of the tensor's data type and shape; with `offset_bytes` a part, of one dimension.

        Returns when the array may be overwritten; the write's own errors appear at the next use of the
        tensor or in `session.synchronize`. With `copy=False` it returns as soon as it can, with a
        future, and the array must stay as it is until that is done. `stream`: in whose order it happens; the
        session's own otherwise.

        Raises InvalidInputError, OutOfRangeError, DeadlineExceededError.
        """
        command, data = self._writing(array, offset_bytes)
        what = self._doing("writing")
        how = Sending(stream_handle(self._shell, stream), observed=not copy, keep=not copy, what=what)
        procedure = write(self._shell.core, command, data, self._item_bytes, how)
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
        """The elements, once everything sent before has been computed.

        A part (offset and size count bytes in row-major order) comes in one dimension. `out`: a
        contiguous array of exactly as many bytes, which is filled and returned.

        Raises OutOfRangeError, the error of what was to compute the tensor, DeadlineExceededError.
        """
        command, make = self._reading(out, offset_bytes, size_bytes)
        procedure = read_new(
            self._shell.core, command, make, self._item_bytes, stream_handle(self._shell, stream)
        )
        return await self._shell.drive(traced(GET_SPAN, procedure), timeout, self._doing("reading"))

    async def map(self, timeout: float | None = None) -> np.ndarray[Any, Any]:
        """The tensor's own memory as an array of its shape and strides: read and written without a copy, by
        both sides.

        For tensors of the buffer type "shared" (`session.empty(..., buffer_type="shared")`) of a device on
        this host that has it: CPUs, and GPUs, whose copies to and from such memory go straight. Returns when
        everything sent before has written the tensor. What is written into the array is seen by commands
        that are sent afterwards; what later commands write appears in it when they are done
        (`session.synchronize`), so nothing orders it but you. Nothing is computed in such memory: a run reads
        it by a copy. The array stays when the tensor is freed, and is then nobody else's.

        Raises UnsupportedError for other memory and other hosts, the error of what was to compute the
        tensor, DeadlineExceededError.
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
        """Writes pieces of equal size at equal distances: array[i] goes to byte offset + i * stride.

        The array is of the tensor's data type, or plain bytes (uint8); its rows, of whatever shape, are the
        pieces. The stride is that of the pieces unless told otherwise. Returns as `set` does.

        Raises InvalidInputError, OutOfRangeError for pieces that overlap or reach outside,
        InvalidArgumentError for a view with gaps, DeadlineExceededError.
        """
        command, data = self._writing_2d(array, offset_bytes, stride_bytes)
        what = self._doing("writing")
        how = Sending(stream_handle(self._shell, stream), what=what)
        procedure = write(self._shell.core, command, data, self._item_bytes, how)
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
        """Reads pieces of equal size at equal distances: bytes, uint8 [count, size_bytes].

        `out`: a contiguous array of exactly as many bytes, which is filled and returned. Raises as `set_2d`
        and `get`.
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
        """As `copy_to`, and waits: which side copied the bytes; None when there was nothing to do.

        Raises the error of what was to compute the tensor, DeadlineExceededError (the copy is cancelled
        then).
        """
        return await self._shell.drive(self._copy(destination, stream), timeout, self._doing("copying"))


class Buffer(BufferBase):
    """Memory on a device: made by `session.buffer`, or for the tensors of `session.empty_many`.

    It is freed when it is collected, or by `free`; its memory lives as long as tensors in it.
    """

    _shell: AioShell

    def place(self, shape: Sequence[int] | int, dtype: DTypeArgument, offset_bytes: int = 0) -> Tensor:
        """A tensor at a place in the buffer, a multiple of the buffer type's alignment; its bytes are
        what lies there.

        Tensors may overlap: they share those bytes, and work on them is done in the order in which it
        was sent. Raises OutOfRangeError, InvalidArgumentError; other errors, such as those of a buffer
        of several parts, appear at the tensor's first use.
        """
        return self._place(Tensor, shape, dtype, offset_bytes)
