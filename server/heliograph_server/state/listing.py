"""Lists what a session at rest holds, as an image without contents. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from heliograph_server.resources.handles import (
    BufferHandle,
    EventHandle,
    HandleStorage,
    PlanHandle,
    Poison,
    ReservationHandle,
    StreamHandle,
    TensorHandle,
)
from heliograph_server.session.protocol.core import SessionCore
from heliograph_server.state.image import (
    Image,
    ImageBinding,
    ImageBuffer,
    ImageEvent,
    ImageLayout,
    ImageOwner,
    ImagePlan,
    ImagePoison,
    ImageReservation,
    ImageStorage,
    ImageStream,
    ImageTensor,
    ImageVariable,
)
from heliograph_server.state.requests import Request


class Listing:
    """The handles of a core without commands under way, under its lock."""

    def __init__(self, core: SessionCore) -> None:
        self._core = core
        #: Their order is that of the image's storages.
        self.storages: dict[HandleStorage, int] = {}
        #: The requests of plans and reservations, by handle.
        self.requests: dict[int, Request] = {}
        self._numbers: dict[TensorHandle, int] = {}

    def image(self, secret_digest: bytes, owner: ImageOwner, without: Collection[int] = ()) -> Image:
        """Return the image, without some handles."""
        core = self._core
        items = [(number, one) for number, one in core.handles.items() if number not in without]
        self._numbers = {one: number for number, one in items if isinstance(one, TensorHandle)}
        reservations = {one: number for number, one in items if isinstance(one, ReservationHandle)}
        return Image(
            secret_digest,
            owner,
            core.last_sequence,
            core.plans.variables_made,
            core.default_failure,
            tensors=tuple(self._tensor(n, one) for n, one in items if isinstance(one, TensorHandle)),
            buffers=tuple(self._buffer(n, one) for n, one in items if isinstance(one, BufferHandle)),
            streams=tuple(
                ImageStream(n, one.queue.device, one.failure, one.error)
                for n, one in items
                if isinstance(one, StreamHandle)
            ),
            events=tuple(ImageEvent(n) for n, one in items if isinstance(one, EventHandle)),
            variables=tuple(
                ImageVariable(name, number) for name, (number, _) in core.plans.variables.items()
            ),
            reservations=tuple(self._reservation(n, one) for one, n in reservations.items()),
            plans=tuple(self._plan(n, one, reservations) for n, one in items if isinstance(one, PlanHandle)),
            # The last, since the others enter their storages.
            storages=tuple(map(self._storage, tuple(self.storages))),
        )

    def _place(self, storage: HandleStorage | None) -> int:
        """The number of a storage in the image, from 1; 0 for none."""
        if storage is None:
            return 0
        return self.storages.setdefault(storage, len(self.storages) + 1)

    def _layout(self, tensor: TensorHandle) -> ImageLayout:
        layout = tensor.layout
        strides = () if layout.is_contiguous else tuple(layout.strides)
        return ImageLayout(
            self._place(tensor.storage), tensor.type, layout.offset_bytes, strides, tensor.is_placed
        )

    def _tensor(self, number: int, tensor: TensorHandle) -> ImageTensor:
        return ImageTensor(number, self._layout(tensor), tensor.error, tensor.failure)

    def _buffer(self, number: int, buffer: BufferHandle) -> ImageBuffer:
        return ImageBuffer(number, tuple(self._place(one.storage) for one in buffer.parts), buffer.error)

    def _reservation(self, number: int, reservation: ReservationHandle) -> ImageReservation:
        if reservation.request is not None:
            self.requests[number] = reservation.request
        return ImageReservation(number, b"")

    def _plan(self, number: int, plan: PlanHandle, reservations: dict[ReservationHandle, int]) -> ImagePlan:
        if plan.request is not None:
            self.requests[number] = plan.request
        bindings = tuple(
            ImageBinding(leaf, self._layout(tensor), plan.bound.numbers[leaf])
            for leaf, tensor in plan.bound.tensors.items()
        )
        lost = None if plan.reservation is None else plan.reservation.lost
        inside = 0 if plan.reservation is None else reservations.get(plan.reservation, 0)
        return ImagePlan(number, b"", bindings, inside, plan.error or lost)

    def _storage(self, storage: HandleStorage) -> ImageStorage:
        buffer = storage.buffer
        return ImageStorage(
            storage.size_bytes,
            0 if buffer is None else buffer.size_bytes,
            storage.device,
            storage.buffer_type if buffer is None else buffer.buffer_type.name,
            storage.usage.value,
            error=storage.error,
            poisons=tuple(self._poisons(storage.poisons)),
            is_mapped=storage.is_mapped,
        )

    def _poisons(self, poisons: Iterable[Poison]) -> Iterable[ImagePoison]:
        for one in poisons:
            number = self._numbers.get(one.tensor, 0)
            yield ImagePoison(one.start, one.end, one.error, number, one.sequence)
