"""`hg.Buffer`: memory on a device, in which tensors are placed; `hg.aligned_empty`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from heliograph._buffers import BufferBase, aligned_empty
from heliograph.tensor import Tensor
from heliograph_proto.types import DTypeArgument

if TYPE_CHECKING:
    from heliograph._blocking import BlockingShell

__all__ = ["Buffer", "aligned_empty"]


class Buffer(BufferBase):
    """Memory on a device: made by `session.buffer`, or for the tensors of `session.empty_many`.

    It is freed when it is collected, or by `free`; its memory lives as long as tensors in it.
    """

    _shell: BlockingShell

    def place(self, shape: Sequence[int] | int, dtype: DTypeArgument, offset_bytes: int = 0) -> Tensor:
        """A tensor at a place in the buffer, a multiple of the buffer type's alignment; its bytes are
        what lies there.

        Tensors may overlap: they share those bytes, and work on them is done in the order in which it
        was sent. Raises OutOfRangeError, InvalidArgumentError; other errors, such as those of a buffer
        of several parts, appear at the tensor's first use.
        """
        return self._place(Tensor, shape, dtype, offset_bytes)
