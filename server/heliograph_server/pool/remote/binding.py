"""The tensors of a run or a loop on a member."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import heliograph as hg
from heliograph_backends.contract import Tensor, Usage, access
from heliograph_proto.types import DTYPES, TensorType
from heliograph_server.pool.remote.memory import RemoteBuffer

if TYPE_CHECKING:
    from heliograph_server.pool.remote.device import RemoteDevice

#: The largest input that is sent in the message of a run.
INLINE_BYTES = 64 * 1024


class BoundRun:
    """The tensors of one run, as its member gets them.

    Tensors on the member are used in place. Inputs in this host's memory are sent with the run, up
    to `most_bytes` each; others are copied to memory of `device`, which may wait. Outputs that
    belong elsewhere are fetched.
    """

    def __init__(
        self,
        device: RemoteDevice,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor | None],
        most_bytes: int,
    ) -> None:
        self._device = device
        self._most_bytes = most_bytes
        self._made: list[Tensor] = []
        self.inputs: list[hg.Tensor | np.ndarray[Any, Any]] = []
        #: Outputs to fetch, and their targets.
        self.fetched = dict[int, Tensor]()
        self.into = dict[int, hg.Tensor]()
        for place, target in enumerate(outputs):
            if target is not None:
                if (found := self._on_member(target)) is not None:
                    self.into[place] = found
                else:
                    self.fetched[place] = target
        try:
            self.inputs = [self._input(one) for one in inputs]
        except BaseException:
            self.close()
            raise

    def _on_member(self, tensor: Tensor) -> hg.Tensor | None:
        """The member's tensor, if it is on the member."""
        buffer = tensor.buffer
        if isinstance(buffer, RemoteBuffer) and buffer.buffer_type.device.member is self._device.member:
            return buffer.tensor(tensor)
        return None

    def _input(self, tensor: Tensor) -> hg.Tensor | np.ndarray[Any, Any]:
        if (found := self._on_member(tensor)) is not None:
            return found
        if tensor.buffer.buffer_type.is_host and tensor.type.nbytes <= self._most_bytes:
            return bytes_of(tensor)
        memory = self._device.buffer_type
        moved = Tensor(tensor.type, memory.allocate(memory.alloc_size(tensor.type), Usage.COMPUTE))
        self._made.append(moved)
        access.copy(tensor, moved)
        return self._device.tensor(moved)

    def take(self, plan: hg.Plan, run: hg.RunFuture) -> None:
        """Wait for the end of the run, and copy the fetched outputs to their targets. Raises the
        run's error."""
        arrays = run.result()
        ports = plan._spec.info.outputs
        for place, target in self.fetched.items():
            array = arrays[ports[place].name]
            access.write(target, 0, np.ascontiguousarray(array).reshape(-1).view("u1").data)

    def close(self) -> None:
        """Release what the run has allocated. Idempotent."""
        made, self._made = self._made, []
        # Views keep the member's memory, though its buffer is freed.
        self.inputs = []
        self.into.clear()
        for one in made:
            one.buffer.free()


def bytes_of(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The bytes of a tensor in host memory, in place if they are contiguous."""
    if not (tensor.is_contiguous and tensor.buffer.is_plain):
        return np.frombuffer(access.read_whole(tensor), np.uint8)
    row = TensorType(DTYPES["u8"], (tensor.type.nbytes,))
    found: np.ndarray[Any, Any] = tensor.buffer.array(row, tensor.offset_bytes, (1,))
    return found
