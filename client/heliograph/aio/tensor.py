"""Tensors and buffers for asyncio; as `heliograph.tensor` and `heliograph.buffer`."""

# The timeouts are those of the blocking API; each ends in a typed error of ours.
# ruff: noqa: ASYNC109

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from heliograph._buffers import BufferBase
from heliograph._outcome import Pending
from heliograph._procedures import Sending, read_new, wait_for_all, write
from heliograph._streams import StreamBase, stream_handle
from heliograph._tensors import TensorBase
from heliograph._tracing import GET_SPAN, SET_SPAN, traced
from heliograph._words import What
from heliograph_proto.description import CopyRoad
from heliograph_proto.types import DTypeArgument

if TYPE_CHECKING:
    from heliograph._aio import AioShell


class WriteFuture:
    """A write whose array must stay as it is until the write is done; awaitable."""

    def __init__(self, shell: AioShell, pendings: list[Pending], what: What) -> None:
        self._shell, self._pendings, self._what = shell, pendings, what

    def done(self) -> bool:
        """Whether the array may be overwritten."""
        return all(pending.done for pending in self._pendings)

    async def result(self, timeout: float | None = None) -> None:
        """Waits until the write is done. Raises its error."""
        await self._shell.drive(wait_for_all(self._shell.core, self._pendings), timeout, self._what)

    def __await__(self) -> Generator[Any, Any, None]:
        return self.result().__await__()

    def __repr__(self) -> str:
        return f"<WriteFuture {'done' if self.done() else 'pending'}>"


class Tensor(TensorBase):
    """A tensor in a device's memory; as hg.Tensor, with what reads, writes or waits awaited."""

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
        """As hg.Tensor.set."""
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
        """As hg.Tensor.get."""
        command, make = self._reading(out, offset_bytes, size_bytes)
        procedure = read_new(
            self._shell.core, command, make, self._item_bytes, stream_handle(self._shell, stream)
        )
        return await self._shell.drive(traced(GET_SPAN, procedure), timeout, self._doing("reading"))

    async def map(self, timeout: float | None = None) -> np.ndarray[Any, Any]:
        """As hg.Tensor.map."""
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
        """As hg.Tensor.set_2d."""
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
        """As hg.Tensor.get_2d."""
        command, make = self._reading_2d(count, size_bytes, offset_bytes, stride_bytes, out)
        procedure = read_new(self._shell.core, command, make, 1, stream_handle(self._shell, stream))
        return await self._shell.drive(traced(GET_SPAN, procedure), timeout, self._doing("reading"))

    async def copy_and_wait(
        self,
        destination: TensorBase,
        timeout: float | None = None,
        *,
        stream: StreamBase | None = None,
    ) -> CopyRoad | None:
        """As hg.Tensor.copy_and_wait."""
        return await self._shell.drive(self._copy(destination, stream), timeout, self._doing("copying"))

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("under hg.aio a part is written with: await tensor[key].set(array)")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        raise TypeError("under hg.aio a tensor is read with: await tensor.get()")


class Buffer(BufferBase):
    """Memory on a device, in which tensors are placed; as hg.Buffer, and like there nothing waits."""

    _shell: AioShell

    def place(self, shape: Sequence[int] | int, dtype: DTypeArgument, offset_bytes: int = 0) -> Tensor:
        """As hg.Buffer.place."""
        return self._place(Tensor, shape, dtype, offset_bytes)
