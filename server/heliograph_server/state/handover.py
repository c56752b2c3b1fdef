"""Takes what a session holds on devices that leave to others, in place, between two commands.

Handles, names and bytes stay, so the session's client need not know. Bytes go from device to
device; plans are compiled again from the requests that made them. Either everything of the session
goes to a device, or nothing does.

    still ── memory there, bytes copied ── plans compiled there ──▸ changed over, the old freed
               └── any error: freed there, as it was here ◂──┘
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

from heliograph_backends.contract import Buffer, Device, Stream, Tensor, access
from heliograph_proto.errors import HeliographError, OutOfMemoryError, UnsupportedError
from heliograph_proto.plans import CompileRequest, PlanOptions, ReserveRequest
from heliograph_proto.types import TensorType, dtype
from heliograph_server.compile.renaming import Place, choices, renamed
from heliograph_server.resources.failures import typed
from heliograph_server.resources.handles import (
    DeviceQueue,
    Handle,
    HandleStorage,
    PlanHandle,
    ReservationHandle,
    StreamHandle,
    TensorHandle,
)
from heliograph_server.resources.memories import find_buffer_type
from heliograph_server.session.operations import init_tensor
from heliograph_server.session.parts.leaving import check_between_commands, loop_stays
from heliograph_server.session.protocol.instructions import RunTask
from heliograph_server.session.session import Session
from heliograph_server.state.capture import held_still

_BYTE = dtype("u8")


@dataclass(frozen=True, slots=True)
class HandedOver:
    """A session's values that went to other devices."""

    #: The device that took the place of each one.
    places: Mapping[str, str]
    size_bytes: int
    plans: int
    #: The time for which the session began no command.
    still_seconds: float


@dataclass(frozen=True, slots=True)
class _Held:
    """The values that a session holds on devices that leave."""

    storages: tuple[HandleStorage, ...]
    plans: tuple[PlanHandle, ...]
    streams: tuple[StreamHandle, ...]
    reservations: tuple[ReservationHandle, ...]

    def __bool__(self) -> bool:
        return bool(self.storages or self.plans or self.streams or self.reservations)

    @property
    def bytes_of(self) -> dict[str, int]:
        """The bytes of storages on each device that it uses or that its requests name."""
        found: Counter[str] = Counter()
        for storage in self.storages:
            found[storage.device] += storage.size_bytes
        for plan in self.plans:
            assert plan.request is not None
            found.update(dict.fromkeys((*plan.plan.device_names, *plan.request.options.devices), 0))
        for reservation in self.reservations:
            assert reservation.request is not None
            named = reservation.request.options.devices
            found.update(dict.fromkeys((*reservation.reservation.shares, *named), 0))
        found.update(dict.fromkeys((one.queue.device for one in self.streams), 0))
        return found


def holds(session: Session, leaving: Collection[str]) -> bool:
    """True if a session has something on one of the devices."""
    with session.inside.lock:
        return bool(_held(session, leaving))


def hand_over(session: Session, leaving: Sequence[Device], wait_seconds: float) -> HandedOver | None:
    """Take what a session holds on devices that leave to other devices of it. Blocks.

    Return None if it holds nothing there. Raises SnapshotFailedError if its commands do not end
    within `wait_seconds`, UnsupportedError for what cannot go, OutOfMemoryError without room, and
    the errors of compiling and copying; then everything is where it was.
    """
    names = {one.name for one in leaving}
    if not holds(session, names):
        return None
    with session.inside.lock:
        has_loop = any(one.task.progress for one in session.inside.core.runs if isinstance(one.task, RunTask))
    if has_loop:
        # It would wait at its next edge for commands after it, in vain.
        raise loop_stays()
    with held_still(session.inside, wait_seconds):
        began = time.monotonic()
        check_between_commands(session)
        with session.inside.lock:
            if session.closed is not None:
                return None
            held = _held(session, names)
        if not held:
            return None
        _check(held)
        places = _first_that_can(session, held, leaving)
        size_bytes = sum(one.size_bytes for one in held.storages)
        return HandedOver(places, size_bytes, len(held.plans), time.monotonic() - began)


def _held(session: Session, leaving: Collection[str]) -> _Held:
    core = session.inside.core
    all_reserved = core.handles.of_kind(ReservationHandle).values()
    reserved = [one for one in all_reserved if not set(leaving).isdisjoint(one.reservation.shares)]
    return _Held(
        tuple(one for one in core.resources.storages if one.device in leaving and one.buffer is not None),
        tuple(
            one
            for one in core.plans.plans
            if one.plan is not None
            and (one.reservation in reserved or not set(leaving).isdisjoint(one.plan.device_names))
        ),
        tuple(
            one
            for one in core.handles.of_kind(StreamHandle).values()
            if one.queue.device in leaving and one.queue.error is None
        ),
        tuple(reserved),
    )


def _check(held: _Held) -> None:
    """Raise UnsupportedError for what cannot go."""
    for storage in held.storages:
        if storage.is_mapped or storage.memory is not None:
            raise UnsupportedError("its client has mapped a tensor there", advice="free mapped tensors")
    for plan in held.plans:
        if plan.request is None or plan.request.options.partition is not None:
            raise UnsupportedError(
                "it has a plan there that exchanges values with other daemons", advice="free that plan"
            )


def _first_that_can(session: Session, held: _Held, leaving: Sequence[Device]) -> Mapping[str, str]:
    """Take everything to the best devices that can take it. Return the place of each old one."""
    names = {one.name for one in leaving}
    others = [one for one in session.devices if one.name not in names and one.lost is None]
    plans = [(*one.plan.device_names, *one.request.options.devices) for one in held.plans if one.request]
    needed = held.bytes_of
    # The session may have nothing on some of them, for which there need be no other of that kind.
    used = [_place(one) for one in leaving if one.name in needed]
    refusal: HeliographError | None = None
    for places in choices(used, [_place(one) for one in others], plans, needed):
        try:
            _Change(session, held, places).run()
        except Exception as error:
            # The device that leaves may have been lost meanwhile; then no other one helps.
            refusal = typed(error, "taking values from a device that leaves")
            if any(one.lost is not None for one in leaving):
                break
        else:
            return places
    raise refusal or OutOfMemoryError(
        f"no other device of this kind has {max(needed.values()):,} bytes free",
        advice="free memory, or add a member",
    )


def _place(device: Device) -> Place:
    found = Place(device.name, device.type, _backend(device), 0, is_avoided=True)
    if device.is_draining:
        return found
    try:
        memory = device.memory()
    except HeliographError:
        # It does not answer now.
        return found
    return replace(found, free_bytes=memory.free_bytes if memory.total_bytes else 2**63, is_avoided=False)


def _backend(device: Device) -> str:
    """The backend that computes, also of a device of another daemon."""
    return device.features().get("member backend", device.backend)


class _Change:
    """The change of one session to other devices, which happens as a whole or not at all."""

    def __init__(self, session: Session, held: _Held, places: Mapping[str, str]) -> None:
        self._session, self._inside = session, session.inside
        self._held, self._places = held, places
        self._old: list[tuple[HandleStorage, Buffer, str]] = []
        self._made: list[tuple[PlanHandle, PlanHandle]] = []
        self._reserved: dict[ReservationHandle | None, ReservationHandle] = {}
        self._streams: list[tuple[DeviceQueue, str, Stream]] = []

    def run(self) -> None:
        """Raises the errors of copying and compiling; then nothing has changed."""
        with ExitStack() as undo:
            undo.callback(self._undo)
            for storage in self._held.storages:
                self._take_storage(storage)
            self._init_tensors()
            self._forget_plans()
            compiler = self._inside.compiler
            for old in self._held.reservations:
                self._reserved[old] = compiler.estimator.again(old, self._options(old.request))
            for plan in self._held.plans:
                reservation = self._reserved.get(plan.reservation, plan.reservation)
                options = self._options(plan.request)
                self._made.append((plan, compiler.again(plan, options, reservation)))
            for stream in self._held.streams:
                place = self._inside.devices.device(self._places[stream.queue.device])
                self._streams.append((stream.queue, place.name, place.stream()))
                undo.callback(self._streams[-1][2].close)
            undo.pop_all()
        self._commit()

    def _take_storage(self, storage: HandleStorage) -> None:
        """Give a storage memory on its new device, with its bytes."""
        old: Buffer = storage.buffer
        place = self._places[storage.device]
        memory = find_buffer_type(self._inside.devices.device(place), storage.buffer_type)
        size_bytes = old.size_bytes
        new = self._inside.room.for_work(lambda: memory.allocate(size_bytes, storage.usage))
        try:
            if size_bytes:
                whole = TensorType(_BYTE, (size_bytes,))
                access.copy(Tensor(whole, old), Tensor(whole, new))
        except BaseException:
            new.free()
            raise
        with self._inside.lock:
            self._old.append((storage, old, storage.device))
            storage.buffer, storage.device = new, place

    def _init_tensors(self) -> None:
        """Tell the new devices of the tensors that the old ones knew."""
        with self._inside.lock:
            tensors = list(self._known_tensors())
        for tensor in tensors:
            init_tensor(tensor)

    def _forget_plans(self) -> None:
        """Forget plans that are kept without a handle: they have variables where these are not."""
        moved = {storage for storage, _, _ in self._old}
        with self._inside.lock:
            variables = self._inside.core.plans.variables
            names = [name for name, (_, variable) in variables.items() if variable.storage in moved]
        for name in names:
            self._inside.executor.plans.forget_variable(name)

    def _known_tensors(self) -> Iterator[TensorHandle]:
        core = self._inside.core
        moved = {storage for storage, _, _ in self._old}
        variables = {variable for _, variable in core.plans.variables.values()}
        bound = (one for plan in core.plans.plans for one in plan.bound.tensors.values())
        for one in dict.fromkeys((*core.handles.of_kind(TensorHandle).values(), *variables, *bound)):
            if one.storage in moved and (one.is_placed or one in variables):
                yield one

    def _options(self, request: CompileRequest | ReserveRequest | None) -> PlanOptions:
        """The options of a request, on the new devices."""
        assert request is not None
        first = self._inside.devices.device("").name
        options = replace(request.options, devices=request.options.devices or (first,))
        return renamed(options, self._places)

    def _commit(self) -> None:
        streams: list[Stream] = []
        with self._inside.lock:
            core = self._inside.core
            self._inside.devices.names.replace(self._places)
            for storage in core.resources.storages:
                # Those whose allocation failed.
                storage.device = self._places.get(storage.device, storage.device)
            for plan, made in self._made:
                core.plans.exchange(plan, made)
                plan.reservation = None if made.reservation is None else plan.reservation
            for old, new in self._reserved.items():
                assert old is not None
                core.plans.exchange_reservations(old, new)
            for queue, device, stream in self._streams:
                streams.append(queue.stream)
                queue.device, queue.stream = device, stream
        # Those that were made have the old devices now, and once these are back, no graph is to find
        # them. A device that is lost has freed everything.
        for _, made in self._made:
            self._inside.executor.plans.hand_over(made.plan)
        with suppress(HeliographError):
            self._release()
        for release in (*(old.free for _, old, _ in self._old), *(one.close for one in streams)):
            with suppress(HeliographError):
                release()

    def _undo(self) -> None:
        self._release()
        self._forget_plans()
        with self._inside.lock:
            new = [storage.buffer for storage, _, _ in self._old]
            for storage, old, device in self._old:
                storage.buffer, storage.device = old, device
        for one in new:
            with suppress(HeliographError):
                one.free()

    def _release(self) -> None:
        """Release the plans and reservations that are in no table."""
        handles: list[Handle] = [*(made for _, made in self._made), *self._reserved.values()]
        self._inside.executor.event(lambda: self._inside.core.plans.release(handles))
