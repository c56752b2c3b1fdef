"""What a session takes of its devices, and how it is given back: storages and device queues. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from heliograph_proto.errors import LimitExceededError
from heliograph_server.resources.handles import DeviceQueue, Handle, HandleStorage, TensorHandle
from heliograph_server.session.protocol.instructions import (
    CloseQueue,
    Instruction,
    OpenQueue,
    ReleaseStorage,
    ReleaseTensor,
)

#: The most device queues of a session, over all its streams and pipelines; each may cost a thread.
MAX_QUEUES = 256


class ResourceState:
    """The storages and device queues of one session. What is to be done about them goes to `instructions`."""

    def __init__(self, instructions: list[Instruction]) -> None:
        self._instructions = instructions
        self.storages: dict[HandleStorage, None] = {}
        self.queues: dict[DeviceQueue, None] = {}

    def __repr__(self) -> str:
        return f"<ResourceState {len(self.storages)} storages, {len(self.queues)} queues>"

    @property
    def storage_bytes(self) -> int:
        """Of devices, by tensors and variables."""
        return sum(one.size_bytes for one in self.storages)

    def check_queues(self, wanted: int) -> None:
        """Raises LimitExceededError where so many queues more would be too many."""
        if len(self.queues) + wanted > MAX_QUEUES:
            raise LimitExceededError(
                f"the session's streams and pipelines would take {len(self.queues) + wanted} threads; this "
                f"server gives it {MAX_QUEUES}",
                advice="free plans with a pipeline, or compile with a smaller one",
            )

    def open_queue(self, queue: DeviceQueue) -> None:
        self.queues[queue] = None
        self._instructions.append(OpenQueue(queue))

    def close_queue(self, queue: DeviceQueue) -> None:
        """Closes a queue if it is open."""
        if queue in self.queues:
            del self.queues[queue]
            self._instructions.append(CloseQueue(queue))

    def release_tensor(self, tensor: TensorHandle) -> None:
        """Gives up a tensor, and its storage with the last one that lies there."""
        storage = tensor.storage
        if storage is None:
            return
        storage.tensors -= 1
        if tensor.is_placed and not _leave_to_weight(tensor, storage):
            self._instructions.append(ReleaseTensor(tensor))
        if storage.tensors == 0:
            self.storages.pop(storage, None)
            self._instructions.append(ReleaseStorage(storage))

    def release_all(self, handles: Iterable[Handle]) -> None:
        """Gives up everything. Nothing runs any more."""
        tensors = (one for one in handles if isinstance(one, TensorHandle) and one.is_placed)
        self._instructions.extend(map(ReleaseTensor, tensors))
        self._instructions.extend(map(ReleaseStorage, self.storages))
        self._instructions.extend(map(CloseQueue, self.queues))
        self.storages.clear()
        self.queues.clear()


def _leave_to_weight(tensor: TensorHandle, storage: HandleStorage) -> bool:
    """Whether the device is to know of a tensor as long as a plan has it as a weight: then that is up to
    the plan."""
    heir = next(iter(storage.frozen_at.get(tensor.span, ())), None)
    if heir is not None:
        heir.is_placed = True
    return heir is not None
