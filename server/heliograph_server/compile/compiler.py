"""Compiling for a session: from a graph that nobody checked to a plan with a handle.

Compiles of one session are serial, since they share variables and contents. One that fails, or whose
session closes meanwhile, leaves nothing behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Self, TypeVar

from heliograph_backends.contract import (
    Arena,
    Buffer,
    BufferType,
    Device,
    DeviceCompileOptions,
    LeafBindings,
    Plan,
    Tensor,
)
from heliograph_proto.errors import (
    DeviceLostError,
    HeliographError,
    InvalidArgumentError,
    InvalidGraphError,
    MissingContentError,
    UnsupportedError,
)
from heliograph_proto.graph import Graph, Leaf, LeafKind
from heliograph_proto.plans import CompileRequest, PlanInfo, PlanOptions, Port, RowSplit, VariablePort
from heliograph_server.compile.estimator import Estimator
from heliograph_server.compile.factory import PlanFactory, PlanParts
from heliograph_server.compile.placement import Placement, Placer, device_options
from heliograph_server.compile.plan_cache import (
    KnownGraph,
    KnownGraphs,
    KnownPlan,
    KnownPlans,
    NamedPorts,
    key_of,
)
from heliograph_server.compile.recording import recorder_of
from heliograph_server.compile.services import SessionServices
from heliograph_server.plans.divided import explaining
from heliograph_server.plans.loaded_plan import LoadedPlan
from heliograph_server.plans.multi_device import MultiDevicePlan
from heliograph_server.plans.multi_host import DistributedPlan
from heliograph_server.plans.partitions import check_alone, check_partition
from heliograph_server.plans.reservation import MemoryReservation, ordered
from heliograph_server.plans.taps import check_taps
from heliograph_server.resources.checks import check_made, check_pipeline
from heliograph_server.resources.failures import typed
from heliograph_server.resources.handles import (
    BoundLeaves,
    DeviceQueue,
    PlanHandle,
    ReservationHandle,
    TensorHandle,
)
from heliograph_server.resources.measurements import Recorder
from heliograph_server.resources.memories import zeroed
from heliograph_server.resources.quotas import QuotaKind
from heliograph_server.resources.run_slots import RunSlots
from heliograph_server.scheduler.tensor_split import divide
from heliograph_server.session.protocol.plan_state import PlanState
from heliograph_server.weights.direct_upload import Homes

T = TypeVar("T")

#: Of a plan that takes memory of its own.
NO_RESERVATION = MemoryReservation({})


class Compiler:
    """Compiles graphs into one session. `lock` guards its `state`, `plans` are those that it knows."""

    def __init__(
        self, state: PlanState, lock: threading.RLock, services: SessionServices, plans: KnownPlans
    ) -> None:
        devices, contents, room = services.devices, services.contents, services.room
        self._state = state
        self._lock = lock
        self._limits = services.limits
        self._everyone = devices.present
        self._contents = contents
        self._device_locks = services.device_locks
        self._room = room
        self._times = services.times
        self._holding = services.holding
        self._plans = plans
        self._factory = PlanFactory(services.device_locks, services.exchange)
        self._placer = Placer(devices.device, devices.present, contents, room, services.times)
        self._known = KnownGraphs(services.limits)
        #: Held while compiling; whoever frees contents and variables takes it first.
        self.busy = threading.Lock()
        self.estimator = Estimator(state, lock, self.busy, services, self._placer)

    def compile(self, request: CompileRequest) -> PlanInfo:
        """Raises what PlanService.Compile is refused with."""
        started = time.perf_counter()
        client = self._known.validated(request.graph, request.bindings.keys())
        check_request(client.graph, request)
        with (
            self.busy,
            # One that takes another's place is for a moment one too many.
            self._holding.taken(QuotaKind.PLANS, by_force=bool(request.updates)),
            _Compilation(self._state, self._lock, request, client.graph) as compilation,
        ):
            self._plans.learn()
            stamp = self._placer.stamp(request.options.devices)
            key = key_of(request.options, client, compilation.bound, compilation.reservation, stamp)
            plan = self._plans.take(key)
            if plan is None:
                plan = self._room.for_work(lambda: self._make(client, key, compilation))
                self._holding.charge(sum(plan.loaded.kept_bytes().values()), plan.loaded)
                self._plans.add(plan)
            return self._commit(compilation, plan, started)

    def place(self, request: CompileRequest, missing: Collection[bytes], use: Callable[[Homes], T]) -> T:
        """What `use` makes of where missing contents will lie, while nothing else is compiled. A weight whose
        parts lie apart goes to where the first one does. Raises what PlaceContents is refused with."""
        client = self._known.validated(request.graph, request.bindings.keys())
        # A plan that is updated goes on until it is.
        request = replace(request, updates=0)
        with self.busy, _Compilation(self._state, self._lock, request, client.graph) as compilation:
            known, bound = self._divided(client, request), compilation.bound
            with explaining(known.divided):
                sizes = compilation.memory.sizes
                placement = self._room.for_work(lambda: self._place(known, request, bound, sizes))
            homes = [*self._homes(known.graph, placement, compilation), *_first_parts(known, placement)]
            wanted = frozenset(missing)
            return use(
                {leaf.digest: (home, leaf.type.nbytes) for leaf, home in homes if leaf.digest in wanted}
            )

    def _make(self, client: KnownGraph, key: Hashable, compilation: _Compilation) -> KnownPlan:
        """A plan that nobody compiled before."""
        bound, known = compilation.bound, self._divided(client, compilation.request)
        with explaining(known.divided):
            placement = self._place(known, compilation.request, bound, compilation.memory.sizes)
            self._fetch(client.graph, known.graph, placement, bound)
            self._check_contents(client.graph, bound)
            loaded = self._loaded(placement, known, compilation)
        found = compilation.reservation if loaded.plan.arena_bytes else None
        partition = compilation.request.options.partition
        is_spread = partition is not None or isinstance(loaded.plan, DistributedPlan)
        slots = found.slots if found is not None else _run_slots(loaded, is_spread)
        memory = found.reservation if found is not None else None
        # What holds tensors of the client goes with the last handle.
        lasts = not bound.tensors
        return KnownPlan(key, client, loaded, slots, NamedPorts.of(client.graph, partition), lasts, memory)

    def _loaded(self, placement: Placement, known: KnownGraph, compilation: _Compilation) -> LoadedPlan:
        # Weights are packed by the device's workers.
        weights = self._homes(known.graph, placement, compilation)
        with self._device_locks[placement.main.name], self._weights(weights):
            self._cut(known, placement)
            bindings = self._bind(known.graph, placement, compilation.bound)
            loaded = self._load(placement, known, bindings, compilation)
        loaded.when_freed(lambda: self._contents.unuse(weights))
        return loaded

    def _divided(self, known: KnownGraph, request: CompileRequest) -> KnownGraph:
        """The graph, with weights over devices where that was asked for. Raises InvalidArgumentError,
        UnknownDeviceError, LimitExceededError."""
        splits = _splits_by_leaf(request.options)
        if not splits:
            return known
        for split in dict.fromkeys(splits.values()):
            self._placer.check_split(split, request.options.devices)
        return known.division(
            splits, lambda: divide(known.graph, splits, self._limits, request.bindings.keys())
        )

    def _cut(self, known: KnownGraph, placement: Placement) -> None:
        """Puts the parts of weights where they are to lie. Raises InvalidGraphError, OutOfMemoryError."""
        if known.divided is None:
            return
        leaves, wholes = known.graph.leaves, {leaf.digest for leaf in known.graph.weights}
        for leaf, values in known.divided.values_of.items():
            if len(values) > 1:
                weight = known.divided.client.leaves[leaf]
                parts = [(leaves[value], placement.home(value)) for value in values]
                self._contents.cut(weight, parts, keeps_whole=weight.digest in wholes)

    def _fetch(self, client: Graph, graph: Graph, placement: Placement, bound: BoundLeaves) -> None:
        """Reads from files what need not be uploaded; `graph`: the client's, perhaps with divided weights."""
        weights = enumerate(graph.leaves)
        homes = {leaf.digest: placement.home(n) for n, leaf in weights if leaf.kind is LeafKind.WEIGHT}
        self._contents.fetch(_unbound_weights(client, bound), homes)

    def _homes(
        self, graph: Graph, placement: Placement, compilation: _Compilation
    ) -> list[tuple[Leaf, BufferType]]:
        """The graph's weights that are contents, and where they are to lie."""
        bound = compilation.bound.tensors
        leaves = [(number, leaf) for number, leaf in enumerate(graph.leaves) if number not in bound]
        return [(leaf, placement.home(n)) for n, leaf in leaves if leaf.kind is LeafKind.WEIGHT]

    @contextmanager
    def _weights(self, weights: Sequence[tuple[Leaf, BufferType]]) -> Iterator[None]:
        """Contents stay on the devices that a compile moved them to if it ends well, else where they were."""
        try:
            yield
        except BaseException:
            self._contents.trim(leaf for leaf, _ in weights)
            raise
        self._contents.use(weights)

    def _load(
        self, placement: Placement, known: KnownGraph, bindings: LeafBindings, compilation: _Compilation
    ) -> LoadedPlan:
        options, recorder = compilation.request.options, self._recorder(known, placement)
        if placement.schedule is None:
            device = placement.main
            arena = compilation.memory.share(device.name).arena
            old = compilation.idle_plan(device, self._plans) if arena is None else None
            plan, order = _compile(device, known, bindings, device_options(options), arena, old)
            loaded = LoadedPlan(
                (plan,),
                device,
                order,
                known.divided,
                recorder,
                placement.predicted_s * 1e6,
                self._device_locks[device.name],
            )
            if old is not None:
                self._plans.hand_over(old)
            return loaded
        memory = compilation.memory if compilation.memory is not NO_RESERVATION else None
        return self._factory.build(PlanParts(known, placement, bindings, options, memory, recorder))

    def _recorder(self, known: KnownGraph, placement: Placement) -> Recorder | None:
        return recorder_of(self._times, self._everyone(), known.graph, placement)

    # What its leaves are

    def _place(
        self, known: KnownGraph, request: CompileRequest, bound: BoundLeaves, reserved: Mapping[str, int]
    ) -> Placement:
        """Raises what `Placer.find` and `check_taps` do."""
        check_pipeline(request.options.pipeline)
        taps = self._taps(known, request.options.taps)
        return self._placer.find(
            known, request.options, self._lies(known.graph, request, bound), taps, reserved
        )

    def _lies(self, graph: Graph, request: CompileRequest, bound: BoundLeaves) -> dict[int, str]:
        """The names of the devices of leaves that lie somewhere already. Raises DeviceLostError for a tensor
        that is gone, and for a variable unless it is to begin anew."""
        with self._lock:
            lies = self._state.devices_of(graph, bound)
            variables = dict(self._state.variables)
        for number in list(lies):
            tensor, leaf = bound.tensors.get(number), graph.leaves[number]
            found = tensor or variables[leaf.name][1]
            if tensor is None and request.renews_lost and _lost(found) is not None:
                del lies[number]
            else:
                _check_there(found, leaf)
        return lies

    def _taps(self, known: KnownGraph, asked: tuple[int, ...]) -> frozenset[int]:
        """The nodes that are observed. Raises what `check_taps` does."""
        if known.divided is None:
            return check_taps(known.graph, asked, self._limits)
        taps = check_taps(known.divided.client, asked, self._limits)
        return frozenset(known.divided.results[node] for node in taps)

    def _bind(self, graph: Graph, placement: Placement, bound: BoundLeaves) -> LeafBindings:
        weights: dict[int, Tensor] = {}
        variables: dict[int, Tensor] = {}
        for number, leaf in enumerate(graph.leaves):
            if leaf.kind is LeafKind.INPUT:
                continue
            into = weights if leaf.kind is LeafKind.WEIGHT else variables
            if number in bound.tensors:
                tensor = bound.tensors[number]
                check_made(tensor, bound.numbers[number])
                into[number] = _on_device(tensor.placed, leaf, placement.home(number).device)
            elif leaf.kind is LeafKind.WEIGHT:
                into[number] = self._contents.tensor(leaf, placement.home(number))
            else:
                into[number] = self._variable(leaf, placement.home(number))
        return LeafBindings(weights, variables)

    def _check_contents(self, graph: Graph, bound: BoundLeaves) -> None:
        weights = _unbound_weights(graph, bound)
        missing = set(self._contents.missing(tuple(leaf.digest for leaf in weights)))
        names = [leaf.name for leaf in weights if leaf.digest in missing]
        if names:
            raise MissingContentError(
                f"{len(names)} weights were not uploaded, such as {names[0][:64]!r}",
                advice="upload their contents and compile again",
            )

    def _variable(self, leaf: Leaf, memory: BufferType) -> Tensor:
        """The variable of this name, made if the session has none yet. Raises InvalidGraphError."""
        with self._lock:
            found = self._state.variables.get(leaf.name)
        if found is None or _lost(found[1]) is not None:
            return self._new_variable(leaf, memory)
        tensor = found[1].placed
        if tensor.type != leaf.type:
            raise InvalidGraphError(
                f"variable {leaf.name!r} of this session is {tensor.type}, the graph says {leaf.type}",
                advice="name it otherwise, for example in a g.scope, or use another session",
            )
        if (where := tensor.buffer.buffer_type).device is not memory.device:
            raise UnsupportedError(
                f"variable {leaf.name!r} of this session lies on device {where.device.name}",
                advice="compile all plans that share it for one device",
            )
        if where is not memory:
            raise UnsupportedError(
                f"variable {leaf.name!r} of this session lies in memory of buffer type {where.name}, and is "
                f"wanted in {memory.name}",
                advice="compile all plans that share it with the same buffer_types",
            )
        return tensor

    def _new_variable(self, leaf: Leaf, memory: BufferType) -> Tensor:
        with self._lock:
            self._state.handles.check_room(TensorHandle)
        # As its storage counts.
        with self._holding.taken(QuotaKind.MEMORY, leaf.type.nbytes):
            buffer = zeroed(memory, memory.alloc_size(leaf.type))
            try:
                with self._lock:
                    self._state.add_variable(leaf.name, leaf.type, memory.device.name, buffer)
            except BaseException:
                buffer.free()
                raise
        tensor = Tensor(leaf.type, buffer)
        buffer.init_tensor(tensor)
        return tensor

    # Its handle

    def _commit(self, compilation: _Compilation, plan: KnownPlan, started: float) -> PlanInfo:
        request, bound, ports = compilation.request, compilation.bound, plan.ports
        loaded = plan.loaded
        try:
            with self._lock:
                # A device that went meanwhile took its variables with it.
                loaded.check_there()
                handles = {n: self._variable_handle(n, leaf, bound) for n, leaf in ports.variables}
                made = PlanHandle(
                    loaded.device.name,
                    ports.inputs,
                    ports.outputs,
                    read=tuple(one for n, (_, one) in handles.items() if n not in ports.assigned),
                    assigned=tuple(one for n, (_, one) in handles.items() if n in ports.assigned),
                    bound=bound,
                    plan=loaded,
                    slots=plan.slots,
                    tapped_bytes=loaded.tapped_bytes,
                    reservation=compilation.reservation if plan.reservation is not None else None,
                    exchange_run=None if request.options.partition is None else 0,
                )
                self._state.add_plan(request.plan, made)
        except BaseException:
            self._plans.release(loaded)
            raise
        compilation.is_committed = True
        return PlanInfo(
            inputs=ports.inputs,
            outputs=ports.outputs,
            variables=tuple(_variable_port(leaf, handles[n]) for n, leaf in ports.variables),
            device=loaded.device.name,
            compute_bytes=loaded.compute_bytes,
            reserved_bytes=loaded.plan.arena_bytes,
            steps=loaded.plan.steps,
            duration_ms=(time.perf_counter() - started) * 1e3,
            **_extent(loaded),
        )

    def _variable_handle(self, number: int, leaf: Leaf, bound: BoundLeaves) -> tuple[int, TensorHandle]:
        """The handle's number and the handle of a variable: the client's tensor, or the session's."""
        if number in bound.tensors:
            return bound.numbers[number], bound.tensors[number]
        return self._state.variables[leaf.name]


class _Compilation:
    """What is held while a request is compiled, and let go of if that fails."""

    def __init__(
        self, state: PlanState, lock: threading.RLock, request: CompileRequest, graph: Graph
    ) -> None:
        self._state = state
        self._lock = lock
        self.request = request
        self.graph = graph
        self.bound = BoundLeaves()
        #: In which the plan is to lie.
        self.reservation: ReservationHandle | None = None
        self.memory = NO_RESERVATION
        self.is_committed = False
        self._uses = ExitStack()
        self._old: PlanHandle | None = None
        self._is_reserved = False

    def __enter__(self) -> Self:
        leaves = self.graph.leaves
        weights = {n for n in self.request.bindings if leaves[n].kind is LeafKind.WEIGHT}
        wanted = {n: (handle, leaves[n].type) for n, handle in self.request.bindings.items()}
        with self._lock:
            try:
                if self.request.updates:
                    self._old = self._state.take_plan(self.request.updates)
                self._state.hold_number(self.request.plan, PlanHandle)
                self._is_reserved = True
                self._find_reservation()
                self.bound = self._state.bind_leaves(wanted, weights)
            except BaseException:
                self._let_go()
                self._uses.close()
                raise
        return self

    def _find_reservation(self) -> None:
        if self.request.reservation:
            self.reservation = self._state.handles.get(self.request.reservation, ReservationHandle)
            if self.request.options.pipeline > 1:
                # Copies that run at once cannot lie one over the other.
                return
            self.memory = self.reservation.reservation
            self._uses.enter_context(self.memory.in_use())

    def idle_plan(self, device: Device, plans: KnownPlans) -> LoadedPlan | None:
        """The plan whose memory may be taken over: it is its own, nothing of it runs, and nothing will."""
        old = self._old
        if old is None or old.reservation is not None or not old.slots.is_idle or old.device != device.name:
            return None
        loaded: LoadedPlan = old.plan
        return None if isinstance(loaded.plan, MultiDevicePlan) or not plans.is_alone(loaded) else loaded

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._let_go()
        self._uses.close()

    def _let_go(self) -> None:
        if not self.is_committed:
            self._state.release_leaves(self.bound)
            if self._is_reserved:
                self._state.handles.give_up(self.request.plan)
        if self._old is None:
            return
        if self.is_committed:
            self._state.handles.give_up(self.request.updates)
            self._state.release_plan(self._old)
        else:
            self._state.put_plan_back(self.request.updates, self._old)


def _compile(
    device: Device,
    known: KnownGraph,
    bindings: LeafBindings,
    options: DeviceCompileOptions,
    arena: Arena | None,
    old: LoadedPlan | None,
) -> tuple[Plan, Sequence[int] | None]:
    """A plan for one device, and the order of its nodes there. Takes over the memory of `old`."""
    try:
        wanted, order = ordered(device, known.graph)
        if old is not None:
            plan = old.updated(wanted, bindings, options)
        elif arena is not None:
            plan = device.compile_in(arena, wanted, bindings, options)
        else:
            plan = device.compile(wanted, bindings, options)
        return plan, order
    except HeliographError:
        raise
    except Exception as error:
        raise typed(error, "compiling") from error


def _first_parts(known: KnownGraph, placement: Placement) -> list[tuple[Leaf, BufferType]]:
    """Weights whose parts lie apart, and where the first part of each does."""
    if known.divided is None:
        return []
    leaves, values_of = known.divided.client.leaves, known.divided.values_of
    return [
        (leaves[leaf], placement.home(values[0])) for leaf, values in values_of.items() if len(values) > 1
    ]


def _unbound_weights(graph: Graph, bound: BoundLeaves) -> list[Leaf]:
    """Those that are contents, and no tensors of the client's."""
    leaves = enumerate(graph.leaves)
    return [leaf for n, leaf in leaves if leaf.kind is LeafKind.WEIGHT and n not in bound.tensors]


def _lost(tensor: TensorHandle) -> DeviceLostError | None:
    """Why what lay there is gone, if it is."""
    buffer = tensor.storage.buffer if tensor.storage is not None else None
    return buffer.buffer_type.device.lost if isinstance(buffer, Buffer) else None


def _check_there(tensor: TensorHandle, leaf: Leaf) -> None:
    """Raises DeviceLostError for a leaf that lay on a device that is lost."""
    if (lost := _lost(tensor)) is None:
        return
    if leaf.kind is LeafKind.VARIABLE:
        raise type(lost)(
            f"variable {leaf.name!r} of this session is gone: {lost.message}",
            advice="use another session; with on_loss='rebuild' it is restored from a checkpoint",
        )
    raise type(lost)(f"the tensor of leaf {leaf.name!r} is gone: {lost.message}", advice="make it anew")


def _run_slots(loaded: LoadedPlan, has_queues: bool) -> RunSlots:
    """One run at a time, or one on each copy, with a device queue of its own. A plan that waits for other
    daemons has its queue in any case, so that nothing else waits meanwhile."""
    copies = len(loaded.copies)
    return RunSlots(
        [DeviceQueue(loaded.device.name) for _ in range(copies)] if copies > 1 or has_queues else ()
    )


def check_request(graph: Graph, request: CompileRequest) -> None:
    """Raises InvalidArgumentError, UnsupportedError for a partition that none can be."""
    options = request.options
    if options.partition is not None:
        check_alone(
            taps=options.taps,
            row_splits=options.splits,
            updates=request.updates,
            reservation=request.reservation,
        )
        check_partition(graph, options.partition)


def _splits_by_leaf(options: PlanOptions) -> dict[int, RowSplit]:
    """How rows lie over devices, by weight. Raises InvalidArgumentError for a weight with two ways."""
    splits: dict[int, RowSplit] = {}
    for split, leaves in options.splits:
        for leaf in leaves:
            if leaf in splits:
                raise InvalidArgumentError(f"value {leaf} is to lie over devices in two ways")
            splits[leaf] = split
    return splits


def _extent(loaded: LoadedPlan) -> dict[str, Any]:
    """How far a plan reaches, as `PlanInfo` has it."""
    plan = loaded.plan
    if not isinstance(plan, MultiDevicePlan):
        return {"devices": (loaded.device.name,)}
    used = sorted({one.device for one in plan.schedule.splits} or {plan.schedule.main})
    return {
        "devices": tuple(plan.devices[place].name for place in used),
        "splits": len(plan.schedule.splits),
        "copied_bytes": plan.schedule.copied_bytes,
        "pipeline": len(loaded.copies),
    }


def _variable_port(leaf: Leaf, found: tuple[int, TensorHandle]) -> VariablePort:
    number, handle = found
    device = handle.storage.device if handle.storage is not None else ""
    return VariablePort(Port(leaf.name, leaf.type), number, device)


def _on_device(tensor: Tensor, leaf: Leaf, device: Device) -> Tensor:
    """A client's tensor as a leaf. Raises UnsupportedError where the device cannot read it in place."""
    if not device.supports_buffer_type(tensor.buffer.buffer_type):
        where = tensor.buffer.buffer_type.device.name
        raise UnsupportedError(
            f"leaf {leaf.name!r} is bound to a tensor of device {where}, which {device.name} cannot read",
            advice=f"copy it to device {device.name} first",
        )
    return tensor
