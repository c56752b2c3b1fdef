"""Compiles the graphs of a session: from an unchecked graph to a plan with a handle.

Compiles of one session are serial, since they share variables and contents. A compile that fails,
or whose session closes meanwhile, leaves nothing behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Self, TypeVar

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
    UnknownHandleError,
    UnsupportedError,
)
from heliograph_proto.graph import Graph, Leaf, LeafKind
from heliograph_proto.plans import (
    CompileRequest,
    Partition,
    PlanInfo,
    PlanOptions,
    Port,
    RowSplit,
    VariablePort,
)
from heliograph_server.compile.candidates import kinds_of
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
from heliograph_server.compile.renaming import renamed
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
    hold_leaves,
)
from heliograph_server.resources.measurements import Recorder, TenantTimes, op_kinds
from heliograph_server.resources.quotas import QuotaKind
from heliograph_server.resources.run_slots import RunSlots
from heliograph_server.scheduler.tensor_split import Divided, divide
from heliograph_server.session.protocol.plan_state import PlanState
from heliograph_server.weights.direct_upload import Homes

T = TypeVar("T")

#: The reservation of a plan that allocates its own memory.
NO_RESERVATION = MemoryReservation({})


class Compiler:
    """Compiles graphs into one session. `lock` guards its `state`; `plans` is its cache."""

    def __init__(
        self, state: PlanState, lock: threading.RLock, services: SessionServices, plans: KnownPlans
    ) -> None:
        devices, contents, room = services.devices, services.contents, services.room
        self._state = state
        self._lock = lock
        self._limits = services.limits
        self._all_devices, self._names = devices.present, devices.names
        self._contents = contents
        self._device_locks = services.device_locks
        self._room = room
        self._times = services.times
        self._holding = services.holding
        self._keeps_requests = services.keeps_requests
        self._plans = plans
        self._factory = PlanFactory(services.device_locks, services.exchange)
        self._placer = Placer(devices.device, devices.present, contents, room, services.times)
        self._known = KnownGraphs(services.limits)
        #: Held while compiling, and while contents and variables are freed.
        self.busy = threading.Lock()
        self.estimator = Estimator(state, lock, self.busy, services, self._placer)

    def compile(self, request: CompileRequest) -> PlanInfo:
        """Compile a graph. Raises the errors of PlanService.Compile."""
        started = time.perf_counter()
        client = self._known.validated(request.graph, request.bindings.keys())
        if request.options.partition is not None:
            _check_partition(client.graph, request, request.options.partition)
        with (
            self.busy,
            # An update has one plan more for a moment.
            self._holding.taken(QuotaKind.PLANS, by_force=bool(request.updates)),
            _Compilation(self._state, self._lock, self._current(request), client.graph) as compilation,
            self._contents.wanted(_contents_of(client.graph, compilation.bound)),
        ):
            self._plans.learn()
            options = compilation.request.options
            stamp = self._placer.stamp(options.devices)
            key = key_of(options, client, compilation.bound, compilation.reservation, stamp)
            return self._commit(compilation, self._found_or_made(client, key, compilation), started)

    def again(
        self, plan: PlanHandle, options: PlanOptions, reservation: ReservationHandle | None = None
    ) -> PlanHandle:
        """Compile a plan's graph once more, with other options and the leaves that it has.

        The new plan has no number, and lies in a reservation if one is given. The caller holds
        `busy` and the session still. Raises the errors of PlanService.Compile.
        """
        assert plan.request is not None
        request = replace(plan.request, options=options, updates=0, reservation=0)
        client = self._known.validated(request.graph, plan.bound.tensors.keys())
        with (
            self._holding.taken(QuotaKind.PLANS, by_force=True),
            _Compilation(self._state, self._lock, request, client.graph, plan, reservation) as compilation,
            self._contents.wanted(_contents_of(client.graph, compilation.bound)),
        ):
            stamp = self._placer.stamp(options.devices)
            key = key_of(options, client, compilation.bound, reservation, stamp)
            found = self._found_or_made(client, key, compilation)
            try:
                with self._lock:
                    made, _ = self._handle_of(compilation, found)
                    self._state.add_unnumbered(made)
            except BaseException:
                self._plans.release(found.loaded)
                raise
            compilation.is_committed = True
            return made

    def _current(self, request: CompileRequest) -> CompileRequest:
        """Return a request for the devices that its names stand for now. `busy` is held: names
        change under it."""
        return replace(request, options=renamed(request.options, self._names.now))

    def _found_or_made(self, client: KnownGraph, key: Hashable, compilation: _Compilation) -> KnownPlan:
        plan = self._plans.take(key)
        if plan is None:
            plan = self._room.for_work(lambda: self._make(client, key, compilation))
            self._holding.charge(sum(plan.loaded.kept_bytes().values()), plan.loaded)
            self._plans.add(plan)
        return plan

    def place(self, request: CompileRequest, missing: Collection[bytes], use: Callable[[Homes], T]) -> T:
        """Pass the future homes of missing contents to `use`, while nothing else is compiled.

        A weight that is split over devices goes to the home of its first part. Returns what `use`
        returns, and raises the errors of PlanService.PlaceContents.
        """
        client = self._known.validated(request.graph, request.bindings.keys())
        with self.busy, ExitStack() as held:
            # A plan that will be updated runs on until then.
            request = replace(self._current(request), updates=0)
            compilation = held.enter_context(_Compilation(self._state, self._lock, request, client.graph))
            known, bound = self._divided(client, request), compilation.bound
            with explaining(known.divided):
                sizes = compilation.memory.sizes
                placement = self._room.for_work(lambda: self._place(known, request, bound, sizes))
            homes = [*_homes(known.graph, placement, compilation.bound), *_first_parts(known, placement)]
            digests = frozenset(missing)
            return use(
                {leaf.digest: (home, leaf.type.nbytes) for leaf, home in homes if leaf.digest in digests}
            )

    def _make(self, client: KnownGraph, key: Hashable, compilation: _Compilation) -> KnownPlan:
        """A new plan, which is not in the cache."""
        bound, known = compilation.bound, self._divided(client, compilation.request)
        with explaining(known.divided):
            placement = self._place(known, compilation.request, bound, compilation.memory.sizes)
            self._fetch(client.graph, known.graph, placement, bound)
            weights = _homes(known.graph, placement, bound)
            # Without a turn on the device: planning takes long, and needs only this thread.
            try:
                if known.divided is not None:
                    self._cut(known.graph, known.divided, placement)
                bindings = self._bind(known.graph, placement, bound)
                loaded = self._load(placement, known, bindings, compilation)
            except BaseException:
                self._contents.trim(leaf for leaf, _ in weights)
                raise
            use = self._contents.use(weights)
            loaded.when_freed(use.end)
        found = compilation.reservation if loaded.plan.arena_bytes else None
        partition = compilation.request.options.partition
        is_spread = partition is not None or isinstance(loaded.plan, DistributedPlan)
        slots = found.slots if found is not None else _run_slots(loaded, is_spread)
        memory = found.reservation if found is not None else None
        # A plan that holds tensors of the client is freed with its last handle.
        lasts = not bound.tensors
        ports = NamedPorts.of(client.graph, partition)
        return KnownPlan(key, client, loaded, slots, ports, lasts, use, memory)

    def _divided(self, known: KnownGraph, request: CompileRequest) -> KnownGraph:
        """The graph, with the requested weights split over devices.

        Raises InvalidArgumentError, UnknownDeviceError, LimitExceededError.
        """
        if not request.options.splits:
            return known
        splits = _splits_by_leaf(request.options)
        for split in dict.fromkeys(splits.values()):
            self._placer.check_split(split, request.options.devices)
        return known.division(
            splits, lambda: divide(known.graph, splits, self._limits, request.bindings.keys())
        )

    def _cut(self, graph: Graph, divided: Divided, placement: Placement) -> None:
        """Move the parts of split weights to their homes. Raises InvalidGraphError,
        OutOfMemoryError."""
        wholes = {leaf.digest for leaf in graph.weights}
        for leaf, values in divided.values_of.items():
            if len(values) > 1:
                weight = divided.client.leaves[leaf]
                parts = [(graph.leaves[value], placement.home(value)) for value in values]
                self._contents.cut(weight, parts, keeps_whole=weight.digest in wholes)

    def _fetch(self, client: Graph, graph: Graph, placement: Placement, bound: BoundLeaves) -> None:
        """Read contents from files, and check that no others are missing.

        `graph` is the client's, possibly with split weights. Raises MissingContentError.
        """
        homes = {
            leaf.digest: placement.home(number)
            for number, leaf in enumerate(graph.leaves)
            if leaf.kind is LeafKind.WEIGHT
        }
        contents = _contents_of(client, bound)
        self._contents.fetch(contents, homes)
        missing = set(self._contents.missing(tuple([leaf.digest for leaf in contents])))
        if missing:
            names = [leaf.name for leaf in contents if leaf.digest in missing]
            raise MissingContentError(
                f"{len(names)} weights were not uploaded, such as {names[0][:64]!r}",
                advice="upload their contents and compile again",
            )

    def _load(
        self, placement: Placement, known: KnownGraph, bindings: LeafBindings, compilation: _Compilation
    ) -> LoadedPlan:
        options = compilation.request.options
        recorder = _recorder_of(self._times, self._all_devices(), known.graph, placement)
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

    # Leaves

    def _place(
        self, known: KnownGraph, request: CompileRequest, bound: BoundLeaves, reserved: Mapping[str, int]
    ) -> Placement:
        """Place a graph. Raises the errors of `Placer.find` and `check_taps`."""
        check_pipeline(request.options.pipeline)
        taps = self._taps(known, request.options.taps)
        return self._placer.find(
            known, request.options, self._lies(known.graph, request, bound), taps, reserved
        )

    def _lies(self, graph: Graph, request: CompileRequest, bound: BoundLeaves) -> dict[int, str]:
        """The devices, by name, of leaves that have memory already.

        Raises DeviceLostError for a lost tensor, or for a lost variable that is not renewed.
        """
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
        """The observed nodes. Raises the errors of `check_taps`."""
        if known.divided is None:
            return check_taps(known.graph, asked, self._limits)
        taps = check_taps(known.divided.client, asked, self._limits)
        return frozenset(known.divided.results[node] for node in taps)

    def _bind(self, graph: Graph, placement: Placement, bound: BoundLeaves) -> LeafBindings:
        weights: dict[int, Tensor] = {}
        variables: dict[int, Tensor] = {}
        made: list[int] = []
        for number, leaf in enumerate(graph.leaves):
            if leaf.kind is LeafKind.INPUT:
                continue
            if number in bound.tensors:
                into = weights if leaf.kind is LeafKind.WEIGHT else variables
                tensor = bound.tensors[number]
                check_made(tensor, bound.numbers[number])
                into[number] = _on_device(tensor.placed, leaf, placement.home(number).device)
            elif leaf.kind is LeafKind.WEIGHT:
                weights[number] = self._contents.tensor(leaf, placement.home(number))
            else:
                made.append(number)
        self._contents.leave_elsewhere(_homes(graph, placement, bound))
        for number in made:
            variables[number] = self._variable(graph.leaves[number], placement.home(number))
        return LeafBindings(weights, variables)

    def _variable(self, leaf: Leaf, memory: BufferType) -> Tensor:
        """The session's variable of this name, created if necessary.

        Raises InvalidGraphError, UnsupportedError.
        """
        with self._lock:
            found = self._state.bind_variable(leaf.name)
        if found is None or _lost(found) is not None:
            return self._new_variable(leaf, memory)
        tensor = found.placed
        if tensor.type != leaf.type:
            raise InvalidGraphError(
                f"variable {leaf.name!r} of this session is {tensor.type}, the graph says {leaf.type}",
                advice="give it another name, for example in a g.scope, or free its plans and then the "
                f"variable: session.free_variable({leaf.name!r:.80})",
            )
        if (where := tensor.buffer.buffer_type).device is not memory.device:
            raise UnsupportedError(
                f"variable {leaf.name!r} of this session lies on device {where.device.name}",
                advice="compile all plans that share it for one device",
            )
        if where is not memory:
            raise UnsupportedError(
                f"variable {leaf.name!r} of this session lies in memory of buffer type {where.name}, but the "
                f"plan needs it in {memory.name}",
                advice="compile all plans that share it with the same buffer_types",
            )
        return tensor

    def _new_variable(self, leaf: Leaf, memory: BufferType) -> Tensor:
        with self._lock:
            self._state.handles.check_room(TensorHandle)
        # The size by which its storage is charged.
        with self._holding.taken(QuotaKind.MEMORY, leaf.type.nbytes):
            buffer = memory.zeros(memory.alloc_size(leaf.type))
            try:
                with self._lock:
                    self._state.add_variable(leaf.name, leaf.type, memory.device.name, buffer)
                    self._state.bind_variable(leaf.name)
            except BaseException:
                buffer.free()
                raise
        tensor = Tensor(leaf.type, buffer)
        buffer.init_tensor(tensor)
        return tensor

    # Its handle

    def _commit(self, compilation: _Compilation, plan: KnownPlan, started: float) -> PlanInfo:
        request, loaded = compilation.request, plan.loaded
        try:
            with self._lock:
                made, variables = self._handle_of(compilation, plan)
                self._state.add_plan(request.plan, made)
        except BaseException:
            self._plans.release(loaded)
            raise
        compilation.is_committed = True
        info = PlanInfo(
            inputs=plan.ports.inputs,
            outputs=plan.ports.outputs,
            variables=tuple(variables),
            device=loaded.device.name,
            devices=(loaded.device.name,),
            compute_bytes=loaded.compute_bytes,
            reserved_bytes=loaded.plan.arena_bytes,
            steps=loaded.plan.steps,
            duration_ms=(time.perf_counter() - started) * 1e3,
        )
        return _with_splits(info, loaded.plan, loaded) if isinstance(loaded.plan, MultiDevicePlan) else info

    def _handle_of(self, compilation: _Compilation, plan: KnownPlan) -> tuple[PlanHandle, list[VariablePort]]:
        """Return a handle of a plan, and the plan's variables. Lock held.

        Raises DeviceLostError, UnknownHandleError.
        """
        request, bound, ports, loaded = compilation.request, compilation.bound, plan.ports, plan.loaded
        variables: list[VariablePort] = []
        read: list[TensorHandle] = []
        assigned: dict[str, TensorHandle] = {}
        # The variables of a device that was lost meanwhile are gone.
        loaded.check_there()
        for n, leaf in ports.variables:
            number, variable = self._variable_handle(n, leaf, bound)
            if n in ports.assigned:
                assigned[leaf.name] = variable
            else:
                read.append(variable)
            where = variable.storage.device if variable.storage is not None else ""
            is_new = n not in bound.tensors and self._state.is_new(leaf.name)
            variables.append(VariablePort(Port(leaf.name, leaf.type), number, where, is_new))
        partition = request.options.partition
        made = PlanHandle(
            loaded.device.name,
            ports.inputs,
            ports.outputs,
            read=tuple(read),
            assigned=tuple(assigned.values()),
            assigned_names=tuple(assigned),
            bound=bound,
            plan=loaded,
            slots=plan.slots,
            tapped_bytes=loaded.tapped_bytes,
            reservation=compilation.reservation if plan.reservation is not None else None,
            exchange_run=None if partition is None else 0,
            loop_edges=(0, 0) if partition is None else partition.loop_edges,
            request=request if self._keeps_requests else None,
        )
        return made, variables

    def _variable_handle(self, number: int, leaf: Leaf, bound: BoundLeaves) -> tuple[int, TensorHandle]:
        """A variable's number and handle: the client's bound tensor, or the session's own."""
        if number in bound.tensors:
            return bound.numbers[number], bound.tensors[number]
        if leaf.name not in self._state.variables:
            raise UnknownHandleError(
                f"variable {leaf.name[:64]!r} was freed while the graph was compiled",
                advice="compile it again",
            )
        return self._state.variables[leaf.name]


class _Compilation:
    """The handles and memory held while a request is compiled, and released if that fails."""

    def __init__(
        self,
        state: PlanState,
        lock: threading.RLock,
        request: CompileRequest,
        graph: Graph,
        again: PlanHandle | None = None,
        reservation: ReservationHandle | None = None,
    ) -> None:
        """`again`: the plan with the same graph and leaves, if it is compiled once more, and the
        reservation for that."""
        self._state, self._again = state, again
        self._lock = lock
        self.request = request
        self.graph = graph
        self.bound = BoundLeaves()
        #: The reservation in which the plan will lie.
        self.reservation = reservation
        self.memory = NO_RESERVATION
        self.is_committed = False
        self._uses = ExitStack()
        self._old: PlanHandle | None = None
        self._is_reserved = False

    def __enter__(self) -> Self:
        with self._lock:
            try:
                if self._again is not None:
                    self._use_reservation()
                    bound = self._again.bound
                    self.bound = hold_leaves(bound.tensors, bound.weights, bound.numbers)
                    return self
                if self.request.updates:
                    self._old = self._state.take_plan(self.request.updates)
                self._state.hold_number(self.request.plan, PlanHandle)
                self._is_reserved = True
                if self.request.reservation:
                    self.reservation = self._state.handles.get(self.request.reservation, ReservationHandle)
                self._use_reservation()
                self.bound = self._state.bind_leaves(self.graph, self.request.bindings)
            except BaseException:
                self._release()
                self._uses.close()
                raise
        return self

    def _use_reservation(self) -> None:
        # Copies of a pipeline run at once, so they cannot share the memory.
        if self.reservation is not None and self.request.options.pipeline <= 1:
            self.memory = self.reservation.reservation
            self._uses.enter_context(self.memory.in_use())

    def idle_plan(self, device: Device, plans: KnownPlans) -> LoadedPlan | None:
        """The updated plan, if its memory can be taken over: its own, and nothing runs in it."""
        old = self._old
        if old is None or old.reservation is not None or not old.slots.is_idle or old.device != device.name:
            return None
        loaded: LoadedPlan = old.plan
        return None if isinstance(loaded.plan, MultiDevicePlan) or not plans.is_alone(loaded) else loaded

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._release()
            self._state.compiled(has_failed=not self.is_committed)
        self._uses.close()

    def _release(self) -> None:
        if not self.is_committed:
            self._state.release_leaves(self.bound)
            if self._is_reserved:
                self._state.handles.give_up(self.request.plan)
        if self._old is None:
            return
        if self.is_committed:
            self._state.handles.give_up(self.request.updates)
            self._state.let_go_of_taken(self._old)
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
    """A plan for one device, which takes over the memory of `old`, and its order of nodes."""
    try:
        graph, order = ordered(device, known.graph)
        if old is not None:
            plan = old.updated(graph, bindings, options)
        elif arena is not None:
            plan = device.compile_in(arena, graph, bindings, options)
        else:
            plan = device.compile(graph, bindings, options)
        return plan, order
    except HeliographError:
        raise
    except Exception as error:
        raise typed(error, "compiling") from error


def _homes(graph: Graph, placement: Placement, bound: BoundLeaves) -> list[tuple[Leaf, BufferType]]:
    """The graph's weights that are contents, and their homes."""
    homes = []
    for number, leaf in enumerate(graph.leaves):
        if leaf.kind is LeafKind.WEIGHT and number not in bound.tensors:
            homes.append((leaf, placement.home(number)))
    return homes


def _contents_of(graph: Graph, bound: BoundLeaves) -> list[Leaf]:
    """The graph's weights that are contents."""
    return [
        leaf
        for number, leaf in enumerate(graph.leaves)
        if leaf.kind is LeafKind.WEIGHT and number not in bound.tensors
    ]


def _first_parts(known: KnownGraph, placement: Placement) -> list[tuple[Leaf, BufferType]]:
    """The split weights, and the home of the first part of each."""
    if known.divided is None:
        return []
    leaves, values_of = known.divided.client.leaves, known.divided.values_of
    return [
        (leaves[leaf], placement.home(values[0])) for leaf, values in values_of.items() if len(values) > 1
    ]


def _lost(tensor: TensorHandle) -> DeviceLostError | None:
    """The error of a tensor whose device is lost."""
    buffer = tensor.storage.buffer if tensor.storage is not None else None
    return buffer.buffer_type.device.lost if isinstance(buffer, Buffer) else None


def _check_there(tensor: TensorHandle, leaf: Leaf) -> None:
    """Raise DeviceLostError for a leaf on a lost device."""
    if (lost := _lost(tensor)) is None:
        return
    if leaf.kind is LeafKind.VARIABLE:
        raise type(lost)(
            f"variable {leaf.name!r} of this session is gone: {lost.message}",
            advice="use another session; with on_loss='rebuild' it is restored from a checkpoint",
        )
    raise type(lost)(f"the tensor of leaf {leaf.name!r} is gone: {lost.message}", advice="create it again")


def _run_slots(loaded: LoadedPlan, has_queues: bool) -> RunSlots:
    """Slots for one run at a time, or for one on each copy, with a device queue of its own.

    A plan that waits for other daemons always has its own queue, so that it blocks no other work.
    """
    copies = len(loaded.copies)
    return RunSlots(
        [DeviceQueue(loaded.device.name) for _ in range(copies)] if copies > 1 or has_queues else ()
    )


def _check_partition(graph: Graph, request: CompileRequest, partition: Partition) -> None:
    """Check a request for a partition. Raises InvalidArgumentError, UnsupportedError."""
    check_alone(
        taps=request.options.taps,
        row_splits=request.options.splits,
        updates=request.updates,
        reservation=request.reservation,
    )
    check_partition(graph, partition)


def _splits_by_leaf(options: PlanOptions) -> dict[int, RowSplit]:
    """The requested splits, by weight. Raises InvalidArgumentError for a weight with two."""
    splits: dict[int, RowSplit] = {}
    for split, leaves in options.splits:
        for leaf in leaves:
            if leaf in splits:
                raise InvalidArgumentError(f"value {leaf} is split over devices in two ways")
            splits[leaf] = split
    return splits


def _with_splits(info: PlanInfo, plan: MultiDevicePlan, loaded: LoadedPlan) -> PlanInfo:
    used = sorted({one.device for one in plan.schedule.splits} or {plan.schedule.main})
    return replace(
        info,
        devices=tuple(plan.devices[place].name for place in used),
        splits=len(plan.schedule.splits),
        copied_bytes=plan.schedule.copied_bytes,
        pipeline=len(loaded.copies),
    )


def _recorder_of(
    times: TenantTimes, devices: Sequence[Device], graph: Graph, placement: Placement
) -> Recorder | None:
    """The recorder of a plan's run times, which help to place others on several hosts."""
    if not any(one.site_name for one in devices):
        return None
    kinds = kinds_of(graph).of
    if placement.schedule is None:
        parts: list[tuple[Device, Iterable[int]]] = [(placement.main, range(len(kinds)))]
    else:
        parts = [(placement.devices[one.device], one.nodes) for one in placement.schedule.splits]
    trips = [times.host.round_trip_s(device.site_name) * 1e6 for device, _ in parts]
    return Recorder(times, [(device.name, op_kinds(graph, nodes, kinds)) for device, nodes in parts], trips)


def _on_device(tensor: Tensor, leaf: Leaf, device: Device) -> Tensor:
    """A client's tensor as a leaf. Raises UnsupportedError if the device cannot read it."""
    if not device.supports_buffer_type(tensor.buffer.buffer_type):
        where = tensor.buffer.buffer_type.device.name
        raise UnsupportedError(
            f"leaf {leaf.name!r} is bound to a tensor of device {where}, which {device.name} cannot read",
            advice=f"copy it to device {device.name} first",
        )
    return tensor
