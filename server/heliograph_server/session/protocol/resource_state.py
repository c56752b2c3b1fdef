"""The storages and device queues of a session. Pure."""

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

#: The most device queues of a session, for all its streams and pipelines. Each may cost a thread.
MAX_QUEUES = 256


class ResourceState:
    """The storages and device queues of one session. Changes are issued as `instructions`."""

    def __init__(self, instructions: list[Instruction]) -> None:
        self._instructions = instructions
        self.storages: dict[HandleStorage, None] = {}
        self.queues: dict[DeviceQueue, None] = {}

    def __repr__(self) -> str:
        return f"<ResourceState {len(self.storages)} storages, {len(self.queues)} queues>"

    @property
    def storage_bytes(self) -> int:
        """Device memory of tensors and variables, in bytes."""
        return sum(one.size_bytes for one in self.storages)

    def check_queues(self, added: int) -> None:
        """Raise LimitExceededError if this many more queues would pass the limit."""
        if len(self.queues) + added > MAX_QUEUES:
            raise LimitExceededError(
                f"the session's streams and pipelines would need {len(self.queues) + added} threads; this "
                f"server allows {MAX_QUEUES}",
                advice="free plans with a pipeline, or compile with a smaller one",
            )

    def open_queue(self, queue: DeviceQueue) -> None:
        """Register a queue, and have its stream created."""
        self.queues[queue] = None
        self._instructions.append(OpenQueue(queue))

    def close_queue(self, queue: DeviceQueue) -> None:
        """Close a queue if it is open."""
        if queue in self.queues:
            del self.queues[queue]
            self._instructions.append(CloseQueue(queue))

    def release_tensor(self, tensor: TensorHandle) -> None:
        """Release a tensor, and its storage with the last tensor in it."""
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
        """Release everything. Nothing runs any more."""
        tensors = (one for one in handles if isinstance(one, TensorHandle) and one.is_placed)
        self._instructions.extend(map(ReleaseTensor, tensors))
        self._instructions.extend(map(ReleaseStorage, self.storages))
        self._instructions.extend(map(CloseQueue, self.queues))
        self.storages.clear()
        self.queues.clear()


def _leave_to_weight(tensor: TensorHandle, storage: HandleStorage) -> bool:
    """True if a plan holds the tensor as a weight, and so keeps its device state."""
    heir = next(iter(storage.weights.get(tensor.span, ())), None)
    if heir is not None:
        heir.is_placed = True
    return heir is not None
