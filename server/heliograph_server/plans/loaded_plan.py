"""Compiled plans: the backend's, and the state that the session keeps beside it.

Device threads run plans; any thread may query their memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace

from heliograph_backends.contract import (
    Abort,
    BufferType,
    Device,
    DeviceCompileOptions,
    LeafBindings,
    Plan,
    Tensor,
    Turn,
    Usage,
)
from heliograph_proto.commands import Bytes
from heliograph_proto.devices import DeviceType
from heliograph_proto.errors import HeliographError, UnsupportedError
from heliograph_proto.graph import Graph, LeafKind
from heliograph_proto.plans import Cause, DeviceShare, NodePlacement, PlanReport, SplitReport
from heliograph_proto.types import TensorType, tensor_type
from heliograph_server.exchange.edges import EdgePorts
from heliograph_server.plans.divided import client_report, explain
from heliograph_server.plans.memory_report import blocks_of, stored_of
from heliograph_server.plans.multi_device import (
    MultiDevicePlan,
    Observe,
    bytes_in_place,
    commits,
    result_bytes,
)
from heliograph_server.plans.plan_times import PlanTimes
from heliograph_server.plans.predicted import with_prediction
from heliograph_server.plans.stepwise import Stepwise
from heliograph_server.plans.taps import tapped_bytes
from heliograph_server.resources.device_queue import SHORT_US, DeviceLock, compute
from heliograph_server.resources.measurements import Recorder
from heliograph_server.resources.memories import host_memory
from heliograph_server.scheduler.tensor_split import Divided

#: The plan keeps memory for an output that is fetched but not kept, up to this size.
MAX_SCRATCH_BYTES = 64 * 1024
#: The type of a byte that says only whether, or that, a step follows.
#: A plan with this many more slow runs than fast ones is not short, whatever was estimated.
MOST_SLOW_RUNS = 8


class ShortRun:
    """A plan so short that it runs where its command arrives. It always uses the same small
    tensors, so nothing is bound, allocated or freed."""

    __slots__ = ("_compute", "_inputs", "_outputs", "_times", "device_names", "output_bytes", "slow_runs")

    def __init__(
        self,
        device: str,
        compute: Callable[[], None],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        times: PlanTimes,
    ) -> None:
        #: The plan's device names, which are slower to get from the plan.
        self.device_names = (device,)
        self._compute = compute
        self._inputs = [bytes_in_place(one) for one in inputs]
        self._outputs = [bytes_in_place(one) for one in outputs]
        self.output_bytes = tuple(one.nbytes for one in self._outputs)
        self._times = times
        #: The number of slow runs in excess of fast ones.
        self.slow_runs = 0

    def __call__(self, inputs: Sequence[Bytes]) -> list[bytes]:
        """Run, and return the outputs. Raises what `Plan.compute` does."""
        for place, data in zip(self._inputs, inputs, strict=True):
            place[:] = data
        self._compute()
        return list(map(memoryview.tobytes, self._outputs))

    def note(self, took_us: float) -> None:
        """Record the time of a run."""
        self._times.note(took_us)
        if took_us > SHORT_US:
            self.slow_runs += 1
        elif self.slow_runs:
            self.slow_runs -= 1


class PlanCopy:
    """A backend's plan, and small buffers that its runs reuse one after the other."""

    def __init__(self, plan: Plan, device: Device, device_lock: DeviceLock | None = None) -> None:
        self.plan = plan
        self.device = device
        self.times = PlanTimes()
        #: For a plan on this device alone; a plan on several devices has the locks of its splits.
        self._device_lock = device_lock or DeviceLock()
        self._assigns = any(node.op == "assign" for node in plan.graph.nodes)
        self._commits = commits(plan)
        self._scratch: dict[object, Tensor] = {}
        #: Valid as long as its tensors exist; None also if the plan is not short.
        self._short: ShortRun | None = None
        self._short_known = False
        self._stepwise: Stepwise | None = None
        self._stepwise_known = False
        # On other devices the host's memory would be pinned for one run, which costs more than a
        # copy.
        self._wraps_host = device.capabilities.buffer_from_host and device.buffer_type.is_host
        #: The host's memory, for a plan that transfers its inputs and outputs from and to this
        #: process.
        self._host = host_memory(device) if plan.takes_anything else None

    def __repr__(self) -> str:
        return f"<PlanCopy of {self.plan!r}>"

    def turn(self, abort: Abort) -> AbstractContextManager[Turn | None]:
        """A context in which the plan's device computes. Raises CancelledError while it waits.

        A plan on several devices takes the turns of its splits itself.
        """
        if isinstance(self.plan, MultiDevicePlan):
            return nullcontext()
        return self._device_lock.computing(abort, self.device)

    def compute(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor | None],
        abort: Abort,
        observe: Observe | None,
        exchange_run: int = 0,
        turn: Turn | None = None,
    ) -> None:
        """Run once; `turn` may be given to others for a while.

        `observe` is called for the observed nodes; `exchange_run`: see `MultiDevicePlan.compute`.
        Raises what `Plan.compute` does.
        """
        if self._commits:
            abort.begin_writes()
        if isinstance(self.plan, MultiDevicePlan):
            self.plan.compute(inputs, outputs, abort, observe, exchange_run)
        else:
            compute(self.plan, inputs, outputs, abort, turn)
        if self._assigns:
            abort.end_writes()

    def writes(self, tensor: Tensor) -> bool:
        """True if a run can write an output directly into a tensor."""
        return self._host is not None or self.is_near(tensor)

    def is_near(self, tensor: Tensor) -> bool:
        """True if the plan's device can read a tensor in place."""
        return self.device.supports_buffer_type(tensor.buffer.buffer_type)

    def input_of(self, place: int, type: TensorType, data: Bytes) -> Tensor:
        """Return bytes from a command as a tensor: in place where the device can, else copied."""
        view = memoryview(data)
        if self._host is not None:
            return Tensor(type, self._host.wrap(view))
        if self._wraps_host:
            try:
                return Tensor(type, self.device.buffer_from_host(view))
            except UnsupportedError:
                self._wraps_host = False
        tensor = self._scratch_tensor(("input", place), type)
        tensor.buffer.set(0, view)
        return tensor

    def output_for(self, place: int, type: TensorType) -> Tensor:
        """Return a tensor for an output that is only fetched."""
        return self._scratch_tensor(("output", place), type, self._host)

    def home_for(self, place: int, type: TensorType) -> Tensor:
        """Return a tensor for an output that the next step of a loop reads."""
        return self._scratch_tensor(("home", place), type) if self._host else self.output_for(place, type)

    def near_for(self, place: int, type: TensorType) -> Tensor:
        """Return a tensor for a loop's copy of an input that lies on another device."""
        return self._scratch_tensor(("near", place), type)

    def fed_for(self, place: int, type: TensorType) -> Tensor:
        """Return a tensor for an input of a loop that its client feeds."""
        return self._scratch_tensor(("fed", place), type)

    def other_for(self, place: int, type: TensorType) -> Tensor:
        """Return a tensor for a loop's output in every second step, while the next step reads the
        previous one."""
        return self._scratch_tensor(("other", place), type)

    def taken_for(self, place: int, side: int, type: TensorType) -> Tensor:
        """Return a tensor for an input of a loop that another host's step before makes: one for
        each of two steps."""
        return self._scratch_tensor(("taken", place, side), type)

    def mark_for(self, key: object, size_bytes: int) -> Tensor:
        """Return bytes of the host's memory, by which loops on several hosts keep together."""
        type = tensor_type("u8", (size_bytes,))
        return self._scratch_tensor(("mark", key, size_bytes), type, host_memory(self.device))

    @property
    def loop_ports(self) -> EdgePorts | None:
        """The edges of a partition for values between two steps of a loop."""
        return self.plan.loop_ports if isinstance(self.plan, MultiDevicePlan) else None

    def stepwise(self) -> Stepwise | None:
        """Return the plan in steps: see `LocalMultiPlan.stepwise`."""
        if not self._stepwise_known:
            self._stepwise_known = True
            with suppress(HeliographError):
                self._stepwise = self.plan.stepwise() if isinstance(self.plan, MultiDevicePlan) else None
        return self._stepwise

    def short_run(self) -> ShortRun | None:
        """Return its run with all inputs from a command and all outputs fetched; None if that is
        not short."""
        if not self._short_known:
            self._short_known, self._short = True, self._make_short()
        # A single slow run does not count: the system may have preempted it.
        short = self._short
        return short if short is not None and short.slow_runs < MOST_SLOW_RUNS else None

    def _make_short(self) -> ShortRun | None:
        graph, on_host = self.plan.graph, self.device.buffer_type.is_host
        types = [leaf.type for leaf in graph.of_kind(LeafKind.INPUT)]
        given = [graph.type_of(output.value) for output in graph.outputs]
        small = sum(type.nbytes for type in (*types, *given)) <= MAX_SCRATCH_BYTES
        # Empty tensors have no bytes and are left out of messages.
        if not (on_host and small and all(type.nbytes for type in (*types, *given))):
            return None
        try:
            inputs = [self._scratch_tensor(("input", place), type) for place, type in enumerate(types)]
            outputs = [self.output_for(place, type) for place, type in enumerate(given)]
            found = self.plan.short_run(inputs, outputs)
        except HeliographError:
            return None
        if found is None or found[1] >= SHORT_US:
            return None
        return ShortRun(self.device.name, found[0], inputs, outputs, self.times)

    def _scratch_tensor(self, key: object, type: TensorType, memory: BufferType | None = None) -> Tensor:
        if key not in self._scratch:
            buffer = (memory or self.device.buffer_type).allocate(type.nbytes, Usage.COMPUTE)
            self._scratch[key] = Tensor(type, buffer)
        return self._scratch[key]

    def kept_bytes(self) -> Mapping[str, int]:
        """Return the bytes that it holds of devices, by name, while nothing runs."""
        if isinstance(self.plan, MultiDevicePlan):
            return self.plan.held_by_device()
        return {self.device.name: self.plan.held_bytes}

    def trim(self, most_bytes: int = MAX_SCRATCH_BYTES) -> None:
        """Free the scratch tensors that are larger than `most_bytes`."""
        for key, one in list(self._scratch.items()):
            if one.type.nbytes > most_bytes:
                self._short, self._short_known = None, False
                self._scratch.pop(key).buffer.free()

    def free(self) -> None:
        """Give all memory back. Idempotent."""
        self.plan.free()
        self._short, self._short_known = None, True
        for tensor in self._scratch.values():
            tensor.buffer.free()
        self._scratch.clear()


class LoadedPlan:
    """A compiled plan and its device, with a copy for each run that may be in flight at once."""

    def __init__(
        self,
        plans: Sequence[Plan],
        device: Device,
        order: Sequence[int] | None = None,
        divided: Divided | None = None,
        recorder: Recorder | None = None,
        predicted_us: float = 0.0,
        device_lock: DeviceLock | None = None,
    ) -> None:
        self.copies = tuple(PlanCopy(plan, device, device_lock) for plan in plans)
        self.device = device
        #: The number of each node before the device reordered them; None: unchanged.
        self._order = order
        #: The divided graph, if the client's weights are divided over devices.
        self._divided = divided
        #: Records the times of runs that help to place others.
        self._recorder = recorder
        self._runs = 0
        #: True if it has run since the times of its splits were last read.
        self._has_news = False
        #: The predicted time of a run, from when the plan was made; 0: unknown.
        self.predicted_us = predicted_us
        self._when_freed: list[Callable[[], None]] = []
        #: The plan of the copy that ran last; it differs from the others only in its measurements.
        self.plan = plans[0]
        self._devices = self.plan.devices if isinstance(self.plan, MultiDevicePlan) else (device,)
        self._needed = _needed(self.plan) if isinstance(self.plan, MultiDevicePlan) else (device,)
        #: The total time of the last run; 0 before it.
        self.took_us = 0.0
        #: The expected total time of the next run: that of the slowest of the last few.
        self.expected_us = math.inf

    def __repr__(self) -> str:
        return f"<LoadedPlan of {self.plan.graph} on {self.device.name}>"

    @property
    def client_graph(self) -> Graph:
        """The client's graph, which reports are of."""
        return self.plan.graph if self._divided is None else self._divided.client

    @property
    def compute_bytes(self) -> int:
        """The bytes for intermediate results of all copies."""
        return sum(one.plan.compute_bytes for one in self.copies)

    @property
    def is_observed(self) -> bool:
        """True if runs report observed nodes."""
        return isinstance(self.plan, MultiDevicePlan) and bool(self.plan.schedule.taps)

    @property
    def tapped_bytes(self) -> int:
        """The bytes of all observed values of a run."""
        if not isinstance(self.plan, MultiDevicePlan):
            return 0
        return tapped_bytes(self.plan.graph, self.plan.schedule.taps)

    def observing(self, observe: Observe | None) -> Observe | None:
        """Return `observe` with the client's node numbers."""
        if observe is None or self._divided is None:
            return observe
        nodes = self._divided.nodes
        return lambda node, tensor, abort: observe(nodes[node], tensor, abort)

    def explain(self, error: HeliographError) -> HeliographError:
        """Return an error of a run with the client's number of the node."""
        if self._order is not None and error.origin.op:
            error = error.at(replace(error.origin, node=self._order[error.origin.node]))
        return explain(self._divided, error)

    def updated(self, graph: Graph, bindings: LeafBindings, options: DeviceCompileOptions) -> Plan:
        """Compile another graph into this plan's memory, and free this plan."""
        plan = self.plan.update(graph, bindings, options)
        self.free()
        return plan

    def short_run(self) -> ShortRun | None:
        """Return its run on fixed small tensors; None if it is not short enough to run where its
        command arrives."""
        return self.copies[0].short_run() if len(self.copies) == 1 else None

    @property
    def is_on_host(self) -> bool:
        """True if it runs on this host's processor alone."""
        alone = not isinstance(self.plan, MultiDevicePlan)
        return alone and self.device.type is DeviceType.CPU and self.device.buffer_type.is_host

    def measure(self, *, on: bool) -> None:
        """Measure the times of steps in the runs from now on, or end that."""
        for one in self.copies:
            one.plan.measure(on=on)

    def report(self) -> PlanReport:
        """Report where its nodes run and why."""
        homes: Sequence[int] = (0,) * len(self.plan.graph.leaves)
        if isinstance(self.plan, MultiDevicePlan):
            one = with_prediction(self._report_several(self.plan), self.plan.graph, self.plan.schedule)
            found, homes = _of_copies(one, len(self.copies)), self.plan.schedule.homes
        else:
            found = self._report_alone()
        return client_report(self._divided, found, homes) if self._divided is not None else found

    def _report_alone(self) -> PlanReport:
        """Report on a plan on one device."""
        plan, graph = self.plan, self.plan.graph
        sizes = {kind: sum(leaf.type.nbytes for leaf in graph.of_kind(kind)) for kind in LeafKind}
        nodes = [NodePlacement(0, Cause.FIRST_THAT_CAN)] * len(graph.nodes)
        order = self._order or range(len(nodes))
        turns = zip(order, plan.concurrency(), *plan.steps_and_times(), strict=True)
        for node, concurrent, step, step_us in turns:
            nodes[node] = replace(nodes[node], concurrent=concurrent, step=step, step_us=step_us)
        told = plan.memory_map()
        split = SplitReport(
            0,
            (),
            plan.steps,
            plan.compute_bytes,
            compute_us=self.took_us,
            note=plan.note,
            memory_steps=told.steps,
            predicted_compute_us=self.predicted_us,
        )
        weights, variables = sizes[LeafKind.WEIGHT], sizes[LeafKind.VARIABLE]
        results = sum(map(result_bytes, graph.nodes))
        share = DeviceShare(self.device.name, weights, variables, plan.compute_bytes, results)
        values = [len(graph.leaves) + node for node in order]
        blocks, stored = blocks_of(told, 0), stored_of(told, values, 0, 0)
        return PlanReport(
            tuple(nodes), (split,), (share,), predicted_us=self.predicted_us, blocks=blocks, stored=stored
        )

    def note(self, turn: int, took_us: float, runs: int = 1) -> None:
        """Record the time of a run on a copy, or of each of some steps of a loop. The influence of
        a slow run halves each time."""
        self.copies[turn].times.note(took_us, runs)
        self.plan, self.took_us = self.copies[turn].plan, took_us
        if self._recorder is not None:
            self._record(self._recorder, took_us)
        before = self.expected_us / 2 if math.isfinite(self.expected_us) else 0.0
        self.expected_us = max(took_us, before)

    def _record(self, recorder: Recorder, took_us: float) -> None:
        """Record the times of all but the first runs, which fill caches and make kernels."""
        self._runs += 1
        if self._runs > len(self.copies):
            times = self.plan.computed_us if isinstance(self.plan, MultiDevicePlan) else [took_us]
            recorder.note_here(times)
            self._has_news = not times

    def _report_several(self, plan: MultiDevicePlan) -> PlanReport:
        """Report on a copy on several devices, and record its times if that was not done yet."""
        found = plan.report()
        if self._recorder is not None and self._has_news:
            self._has_news = False
            self._recorder.note([one.compute_us for one in found.splits])
        return found

    def learn(self) -> None:
        """Record the times of the last run if only a report has them. Raises nothing."""
        if self._has_news and isinstance(self.plan, MultiDevicePlan):
            with suppress(HeliographError):
                self._report_several(self.plan)

    def forget_times(self) -> None:
        """Reset the times of runs, except the expected time of the next one."""
        self.took_us = 0.0
        for one in self.copies:
            if isinstance(one.plan, MultiDevicePlan):
                one.plan.forget_times()

    def kept_bytes(self) -> Mapping[str, int]:
        """Return the bytes that it holds of devices, by name, while nothing runs."""
        found: Counter[str] = Counter()
        for one in self.copies:
            found.update(one.kept_bytes())
        return found

    @property
    def device_names(self) -> tuple[str, ...]:
        """The names of the devices that it was compiled for."""
        return tuple(one.name for one in self._devices)

    @property
    def lost(self) -> HeliographError | None:
        """The error of the first lost device that its runs need."""
        errors = (one.lost for one in self._needed)
        return next((error.at(error.origin) for error in errors if error is not None), None)

    @property
    def is_lost(self) -> bool:
        """True if a device that it was compiled for is lost, also one that no run needs."""
        return any(one.lost is not None for one in self._devices)

    def check_there(self) -> None:
        """Raise DeviceLostError if a device that it was compiled for is lost."""
        for one in self._devices:
            if one.lost is not None:
                raise one.lost.at(one.lost.origin)

    def check_runnable(self) -> None:
        """Raise DeviceLostError if a device that its runs need is lost."""
        if (error := self.lost) is not None:
            raise error

    def trim(self) -> None:
        """Give back the memory that only runs need."""
        for one in self.copies:
            one.trim(0)

    def when_freed(self, call: Callable[[], None]) -> None:
        """Register a callback for the end of the plan, called once."""
        self._when_freed.append(call)

    def free(self) -> None:
        """Give all memory back. Idempotent."""
        for one in self.copies:
            one.free()
        calls, self._when_freed = self._when_freed, []
        for call in calls:
            call()


def _needed(plan: MultiDevicePlan) -> tuple[Device, ...]:
    """Return the devices that compute a split or have a leaf."""
    schedule = plan.schedule
    used = {one.device for one in schedule.splits} | {home for home in schedule.homes if home >= 0}
    return tuple(plan.devices[number] for number in sorted(used))


def _of_copies(report: PlanReport, copies: int) -> PlanReport:
    """Return the report of one copy with the memory of all copies."""
    shares = (
        replace(one, compute_bytes=one.compute_bytes * copies, results_bytes=one.results_bytes * copies)
        for one in report.devices
    )
    splits = (replace(one, compute_bytes=one.compute_bytes * copies) for one in report.splits)
    return replace(report, splits=tuple(splits), devices=tuple(shares))
