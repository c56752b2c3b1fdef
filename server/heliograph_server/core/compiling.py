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
    CompileOptions,
    Device,
    LeafBindings,
    Tensor,
)
from heliograph_proto.description import PlanInfo, Port, VariablePort
from heliograph_proto.errors import (
    DeviceLostError,
    HeliographError,
    InvalidGraphError,
    MissingContentError,
    UnsupportedError,
)
from heliograph_proto.graph import Graph, Leaf, LeafKind
from heliograph_proto.limits import Limits
from heliograph_server.core.assembling import Asked, Assembler
from heliograph_server.core.checks import check_made, check_pipeline
from heliograph_server.core.compile_request import CompileRequest
from heliograph_server.core.contents import Contents
from heliograph_server.core.direct import Homes
from heliograph_server.core.divided import explaining
from heliograph_server.core.exchanging import LiveExchange
from heliograph_server.core.execution import typed, zeroed
from heliograph_server.core.handles import (
    BoundLeaves,
    Lane,
    PlanHandle,
    ReservationHandle,
    TensorHandle,
)
from heliograph_server.core.known_graphs import KnownGraph, KnownGraphs
from heliograph_server.core.known_plans import KnownPlan, KnownPlans, Ports, key_of
from heliograph_server.core.loaded import LoadedPlan
from heliograph_server.core.measurements import Recorder, TenantTimes
from heliograph_server.core.occupancy import Occupancy
from heliograph_server.core.ordered import ordered
from heliograph_server.core.pooled import PooledPlan
from heliograph_server.core.portioning import check_alone, check_portion
from heliograph_server.core.protocol import SessionCore
from heliograph_server.core.recording import recorder_of
from heliograph_server.core.reservation import Reservation
from heliograph_server.core.room import Room
from heliograph_server.core.scheduling.rows import divide
from heliograph_server.core.several import SeveralPlan
from heliograph_server.core.sizing import Sizer
from heliograph_server.core.tapping import check_taps
from heliograph_server.core.targets import Target, Targets, Wish
from heliograph_server.core.tenants import Holding, Kind
from heliograph_server.core.turns import Turns

T = TypeVar("T")

#: Of a plan that takes memory of its own.
NO_RESERVATION = Reservation({})


class Compiler:
    """Compiles graphs into one session. `device` looks a device up by name; "" is the first."""

    def __init__(
        self,
        core: SessionCore,
        lock: threading.RLock,
        limits: Limits,
        device: Callable[[str], Device],
        contents: Contents,
        occupancies: Mapping[str, Occupancy],
        everyone: Callable[[], Sequence[Device]],
        plans: KnownPlans,
        room: Room,
        times: TenantTimes,
        exchange: LiveExchange | None = None,
        holding: Holding | None = None,
    ) -> None:
        self._holding = holding or Holding()
        self._core = core
        #: Guards the core.
        self._lock = lock
        self._limits = limits
        self._device = device
        self._contents = contents
        self._occupancies = occupancies
        self._plans = plans
        self._room = room
        self._everyone = everyone
        self._times = times
        self._assembler = Assembler(occupancies, exchange)
        self._targets = Targets(device, everyone, contents, room, times)
        self._known = KnownGraphs(limits)
        #: Held while compiling; whoever frees contents and variables takes it first.
        self.busy = threading.Lock()
        self.sizes = Sizer(core, lock, self.busy, limits, device, self._targets, room, self._holding)

    def compile(self, request: CompileRequest) -> PlanInfo:
        """Raises what PlanService.Compile is refused with."""
        started = time.perf_counter()
        client = self._known.validated(request.graph, request.bindings.keys())
        check_request(client.graph, request)
        with (
            self.busy,
            # One that takes another's place is for a moment one too many.
            self._holding.taken(Kind.PLANS, by_force=bool(request.updates)),
            _Compilation(self._core, self._lock, request, client.graph) as compilation,
        ):
            self._plans.learn()
            stamp = self._targets.stamp(request.devices)
            key = key_of(request, client, compilation.bound, compilation.reservation, stamp)
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
        with self.busy, _Compilation(self._core, self._lock, request, client.graph) as compilation:
            known, bound = self._divided(client, request), compilation.bound
            with explaining(known.divided):
                sizes = compilation.memory.sizes
                target = self._room.for_work(lambda: self._target(known, request, bound, sizes))
            homes = [*self._homes(known.graph, target, compilation), *_first_parts(known, target)]
            wanted = frozenset(missing)
            return use(
                {leaf.digest: (home, leaf.type.nbytes) for leaf, home in homes if leaf.digest in wanted}
            )

    def _make(self, client: KnownGraph, key: Hashable, compilation: _Compilation) -> KnownPlan:
        """A plan that nobody compiled before."""
        bound, known = compilation.bound, self._divided(client, compilation.request)
        with explaining(known.divided):
            target = self._target(known, compilation.request, bound, compilation.memory.sizes)
            self._fetch(client.graph, known.graph, target, bound)
            self._check_contents(client.graph, bound)
            loaded = self._loaded(target, known, compilation)
        found = compilation.reservation if loaded.plan.arena_bytes else None
        portion = compilation.request.portion
        is_spread = portion is not None or isinstance(loaded.plan, PooledPlan)
        turns = found.turns if found is not None else _turns(loaded, is_spread)
        memory = found.reservation if found is not None else None
        # What holds tensors of the client goes with the last handle.
        lasts = not bound.tensors
        return KnownPlan(key, client, loaded, turns, Ports.of(client.graph, portion), lasts, memory)

    def _loaded(self, target: Target, known: KnownGraph, compilation: _Compilation) -> LoadedPlan:
        # Weights are packed by the device's workers.
        weights = self._homes(known.graph, target, compilation)
        with self._occupancies[target.main.name], self._weights(weights):
            self._cut(known, target)
            bindings = self._bind(known.graph, target, compilation.bound)
            loaded = self._load(target, known, bindings, compilation)
        loaded.when_freed(lambda: self._contents.unuse(weights))
        return loaded

    def _divided(self, known: KnownGraph, request: CompileRequest) -> KnownGraph:
        """The graph, with weights over devices where that was asked for. Raises InvalidArgumentError,
        UnknownDeviceError, LimitExceededError."""
        splits = request.splits
        if not splits:
            return known
        for split in dict.fromkeys(splits.values()):
            self._targets.check_split(split, request.devices)
        return known.division(
            splits, lambda: divide(known.graph, splits, self._limits, request.bindings.keys())
        )

    def _cut(self, known: KnownGraph, target: Target) -> None:
        """Puts the parts of weights where they are to lie. Raises InvalidGraphError, OutOfMemoryError."""
        if known.divided is None:
            return
        leaves, wholes = known.graph.leaves, {leaf.digest for leaf in known.graph.weights}
        for leaf, values in known.divided.values_of.items():
            if len(values) > 1:
                weight = known.divided.client.leaves[leaf]
                parts = [(leaves[value], target.home(value)) for value in values]
                self._contents.cut(weight, parts, keeps_whole=weight.digest in wholes)

    def _fetch(self, client: Graph, graph: Graph, target: Target, bound: BoundLeaves) -> None:
        """Reads from files what need not be uploaded; `graph`: the client's, perhaps with divided weights."""
        weights = enumerate(graph.leaves)
        homes = {leaf.digest: target.home(n) for n, leaf in weights if leaf.kind is LeafKind.WEIGHT}
        self._contents.fetch(_unbound_weights(client, bound), homes)

    def _homes(
        self, graph: Graph, target: Target, compilation: _Compilation
    ) -> list[tuple[Leaf, BufferType]]:
        """The graph's weights that are contents, and where they are to lie."""
        bound = compilation.bound.tensors
        leaves = [(number, leaf) for number, leaf in enumerate(graph.leaves) if number not in bound]
        return [(leaf, target.home(n)) for n, leaf in leaves if leaf.kind is LeafKind.WEIGHT]

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
        self, target: Target, known: KnownGraph, bindings: LeafBindings, compilation: _Compilation
    ) -> LoadedPlan:
        options = compilation.request.options
        if target.schedule is None:
            device = target.main
            arena = compilation.memory.share(device.name).arena
            old = compilation.idle_plan(device, self._plans) if arena is None else None
            last = self._recorder(known, target), target.predicted_s * 1e6, self._occupancies[device.name]
            loaded = _compile(device, known, bindings, options, arena, old, last)
            if old is not None:
                self._plans.hand_over(old)
            return loaded
        request, share, recorder = (
            compilation.request,
            compilation.memory.share,
            self._recorder(known, target),
        )
        is_reserved = compilation.memory is not NO_RESERVATION
        asked = Asked(options, request.pipeline, request.portion, share, is_reserved, recorder)
        return self._assembler.assemble(known, target, bindings, asked)

    def _recorder(self, known: KnownGraph, target: Target) -> Recorder | None:
        return recorder_of(self._times, self._everyone(), known.graph, target)

    # What its leaves are

    def _target(
        self, known: KnownGraph, request: CompileRequest, bound: BoundLeaves, reserved: Mapping[str, int]
    ) -> Target:
        """Raises what `Targets.find` and `check_taps` do."""
        check_pipeline(request.pipeline)
        taps = self._taps(known, request)
        wish = Wish(
            request.devices,
            request.pins,
            request.memory,
            request.options,
            request.pipeline,
            request.buffer_types,
            taps,
            request.portion,
        )
        return self._targets.find(known, wish, self._lies(known.graph, request, bound), reserved)

    def _lies(self, graph: Graph, request: CompileRequest, bound: BoundLeaves) -> dict[int, str]:
        """The names of the devices of leaves that lie somewhere already. Raises DeviceLostError for a tensor
        that is gone, and for a variable unless it is to begin anew."""
        with self._lock:
            lies = self._core.devices_of(graph, bound)
            variables = dict(self._core.variables)
        for number in list(lies):
            tensor, leaf = bound.tensors.get(number), graph.leaves[number]
            found = tensor or variables[leaf.name][1]
            if tensor is None and request.renews_lost and _lost(found) is not None:
                del lies[number]
            else:
                _check_there(found, leaf)
        return lies

    def _taps(self, known: KnownGraph, request: CompileRequest) -> frozenset[int]:
        """The nodes that are observed. Raises what `check_taps` does."""
        if known.divided is None:
            return check_taps(known.graph, request.taps, self._limits)
        taps = check_taps(known.divided.client, request.taps, self._limits)
        return frozenset(known.divided.results[node] for node in taps)

    def _bind(self, graph: Graph, target: Target, bound: BoundLeaves) -> LeafBindings:
        weights: dict[int, Tensor] = {}
        variables: dict[int, Tensor] = {}
        for number, leaf in enumerate(graph.leaves):
            if leaf.kind is LeafKind.INPUT:
                continue
            into = weights if leaf.kind is LeafKind.WEIGHT else variables
            if number in bound.tensors:
                tensor = bound.tensors[number]
                check_made(tensor, bound.numbers[number])
                into[number] = _on_device(tensor.placed, leaf, target.home(number).device)
            elif leaf.kind is LeafKind.WEIGHT:
                into[number] = self._contents.tensor(leaf, target.home(number))
            else:
                into[number] = self._variable(leaf, target.home(number))
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
            found = self._core.variables.get(leaf.name)
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
            self._core.handles.check_room(TensorHandle)
        # As its storage counts.
        with self._holding.taken(Kind.MEMORY, leaf.type.nbytes):
            buffer = zeroed(memory, memory.alloc_size(leaf.type))
            try:
                with self._lock:
                    self._core.add_variable(leaf.name, leaf.type, memory.device.name, buffer)
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
                variables = (
                    [one for n, (_, one) in handles.items() if n not in ports.assigned],
                    [one for n, (_, one) in handles.items() if n in ports.assigned],
                )
                named = ports.inputs, ports.outputs
                lies_in = compilation.reservation if plan.reservation is not None else None
                what = loaded, bound, plan.turns, loaded.tapped_bytes, lies_in
                is_portion = request.portion is not None
                self._core.add_plan(
                    request.plan, loaded.device.name, named, variables, *what, is_portion=is_portion
                )
        except BaseException:
            self._plans.release(loaded)
            raise
        compilation.is_committed = True
        return PlanInfo(
            inputs=ports.inputs,
            outputs=ports.outputs,
            variables=tuple(_variable_port(leaf, *handles[n]) for n, leaf in ports.variables),
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
        return self._core.variables[leaf.name]


class _Compilation:
    """What is held while a request is compiled, and let go of if that fails."""

    def __init__(
        self, core: SessionCore, lock: threading.RLock, request: CompileRequest, graph: Graph
    ) -> None:
        self._core = core
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
                    self._old = self._core.take_plan(self.request.updates)
                self._core.hold_number(self.request.plan, PlanHandle)
                self._is_reserved = True
                self._find_reservation()
                self.bound = self._core.bind_leaves(wanted, weights)
            except BaseException:
                self._let_go()
                self._uses.close()
                raise
        return self

    def _find_reservation(self) -> None:
        if self.request.reservation:
            self.reservation = self._core.handles.get(self.request.reservation, ReservationHandle)
            if self.request.pipeline > 1:
                # Copies that run at once cannot lie one over the other.
                return
            self.memory = self.reservation.reservation
            self._uses.enter_context(self.memory.in_use())

    def idle_plan(self, device: Device, plans: KnownPlans) -> LoadedPlan | None:
        """The plan whose memory may be taken over: it is its own, nothing of it runs, and nothing will."""
        old = self._old
        if old is None or old.reservation is not None or not old.turns.is_idle or old.device != device.name:
            return None
        loaded: LoadedPlan = old.plan
        return None if isinstance(loaded.plan, SeveralPlan) or not plans.is_alone(loaded) else loaded

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._let_go()
        self._uses.close()

    def _let_go(self) -> None:
        if not self.is_committed:
            self._core.release_leaves(self.bound)
            if self._is_reserved:
                self._core.handles.give_up(self.request.plan)
        if self._old is None:
            return
        if self.is_committed:
            self._core.handles.give_up(self.request.updates)
            self._core.release_plan(self._old)
        else:
            self._core.put_plan_back(self.request.updates, self._old)


def _compile(
    device: Device,
    known: KnownGraph,
    bindings: LeafBindings,
    options: CompileOptions,
    arena: Arena | None,
    old: LoadedPlan | None,
    last: tuple[Recorder | None, float, Occupancy],
) -> LoadedPlan:
    try:
        wanted, order = ordered(device, known.graph)
        if old is not None:
            plan = old.updated(wanted, bindings, options)
        elif arena is not None:
            plan = device.compile_in(arena, wanted, bindings, options)
        else:
            plan = device.compile(wanted, bindings, options)
        return LoadedPlan((plan,), device, order, known.divided, *last)
    except HeliographError:
        raise
    except Exception as error:
        raise typed(error, "compiling") from error


def _first_parts(known: KnownGraph, target: Target) -> list[tuple[Leaf, BufferType]]:
    """Weights whose parts lie apart, and where the first part of each does."""
    if known.divided is None:
        return []
    leaves, values_of = known.divided.client.leaves, known.divided.values_of
    return [(leaves[leaf], target.home(values[0])) for leaf, values in values_of.items() if len(values) > 1]


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


def _turns(loaded: LoadedPlan, has_lanes: bool) -> Turns:
    """One run at a time, or one on each copy, for which there is a lane. What waits for other daemons has one
    in any case, so that nothing else waits meanwhile."""
    copies = len(loaded.copies)
    return Turns([Lane(loaded.device.name) for _ in range(copies)] if copies > 1 or has_lanes else ())


def check_request(graph: Graph, request: CompileRequest) -> None:
    """Raises InvalidArgumentError, UnsupportedError for a portion that none can be."""
    if request.portion is not None:
        check_alone(
            taps=request.taps,
            row_splits=request.splits,
            updates=request.updates,
            reservation=request.reservation,
        )
        check_portion(graph, request.portion)


def _extent(loaded: LoadedPlan) -> dict[str, Any]:
    """How far a plan reaches, as `PlanInfo` has it."""
    plan = loaded.plan
    if not isinstance(plan, SeveralPlan):
        return {"devices": (loaded.device.name,)}
    used = sorted({one.device for one in plan.schedule.splits} or {plan.schedule.main})
    return {
        "devices": tuple(plan.devices[place].name for place in used),
        "splits": len(plan.schedule.splits),
        "copied_bytes": plan.schedule.copied_bytes,
        "pipeline": len(loaded.copies),
    }


def _variable_port(leaf: Leaf, number: int, handle: TensorHandle) -> VariablePort:
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
