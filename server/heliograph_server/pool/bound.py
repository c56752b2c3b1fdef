"""What a run on a member is given, and where its results go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import heliograph as hg
from heliograph_backends import access
from heliograph_backends.contract import Tensor, Usage
from heliograph_proto.types import DTYPES, TensorType
from heliograph_server.pool.memory import RemoteBuffer

if TYPE_CHECKING:
    from heliograph_server.pool.device import RemoteDevice

#: Up to here an input rides in the message of a run.
INLINE_BYTES = 64 * 1024


class Bound:
    """The tensors of one run, as its member is told of them. Those that lie there are used in place; inputs
    in this host's memory ride in the run, up to `most_bytes` each; others are brought to memory of `device`,
    for which this may wait. Outputs that belong elsewhere are fetched."""

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
        #: Outputs that come here, and where they belong.
        self.fetched = dict[int, Tensor]()
        self.into = dict[int, hg.Tensor]()
        for place, target in enumerate(outputs):
            if target is not None:
                if (there := self._there(target)) is not None:
                    self.into[place] = there
                else:
                    self.fetched[place] = target
        try:
            self.inputs = [self._input(one) for one in inputs]
        except BaseException:
            self.close()
            raise

    def _there(self, tensor: Tensor) -> hg.Tensor | None:
        """A tensor as the member knows it, if it lies there."""
        buffer = tensor.buffer
        if isinstance(buffer, RemoteBuffer) and buffer.buffer_type.device.member is self._device.member:
            return buffer.tensor(tensor)
        return None

    def _input(self, tensor: Tensor) -> hg.Tensor | np.ndarray[Any, Any]:
        if (there := self._there(tensor)) is not None:
            return there
        if tensor.buffer.buffer_type.is_host and tensor.type.nbytes <= self._most_bytes:
            return bytes_of(tensor)
        memory = self._device.buffer_type
        moved = Tensor(tensor.type, memory.allocate(memory.alloc_size(tensor.type), Usage.COMPUTE))
        self._made.append(moved)
        access.copy(tensor, moved)
        return self._device.tensor(moved)

    def take(self, plan: hg.Plan, run: hg.RunFuture) -> None:
        """Waits for the run's end, and brings what was fetched to where it belongs. Raises its error."""
        arrays = run.result()
        ports = plan._spec.info.outputs
        for place, target in self.fetched.items():
            array = arrays[ports[place].name]
            access.write(target, 0, np.ascontiguousarray(array).reshape(-1).view("u1").data)

    def close(self) -> None:
        """Gives back what was taken for it. Idempotent."""
        made, self._made = self._made, []
        # Views keep the member's memory, though its buffer is freed.
        self.inputs = []
        self.into.clear()
        for one in made:
            one.buffer.free()


def bytes_of(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The bytes of a tensor in host memory: in place where they lie together."""
    if not tensor.is_contiguous:
        return np.frombuffer(access.read_whole(tensor), np.uint8)
    row = TensorType(DTYPES["u8"], (tensor.type.nbytes,))
    found: np.ndarray[Any, Any] = tensor.buffer.array(row, tensor.offset_bytes, (1,))
    return found
