"""Compiling for a session: from a graph that nobody checked to a plan with a handle.

Compiles of one session are serial, since they share variables and contents. One that fails, or whose
session closes meanwhile, leaves nothing behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from heliograph_backends.contract import CompileOptions, Device, LeafBindings, Plan, Tensor
from heliograph_proto.description import PlanInfo, Port, VariablePort
from heliograph_proto.errors import (
    HeliographError,
    InvalidGraphError,
    MissingContentError,
    UnsupportedError,
)
from heliograph_proto.graph import Graph, Leaf, LeafKind, validate
from heliograph_proto.limits import Limits
from heliograph_server.core.bulk import Contents
from heliograph_server.core.execution import LoadedPlan, new_buffer, typed
from heliograph_server.core.handles import TensorHandle
from heliograph_server.core.occupancy import Occupancy
from heliograph_server.core.protocol import SessionCore


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
    ) -> None:
        self._core = core
        #: Guards the core.
        self._lock = lock
        self._limits = limits
        self._device = device
        self._contents = contents
        self._occupancies = occupancies
        #: Held while compiling; whoever frees contents and variables takes it first.
        self.busy = threading.Lock()

    def compile(self, handle: int, graph: Graph, devices: Sequence[str], fusion: bool) -> PlanInfo:
        """Raises what PlanService.Compile is refused with."""
        started = time.perf_counter()
        checked = validate(graph, self._limits)
        device = self._choose(checked, devices)
        with self.busy:
            with self._lock:
                self._core.check_plan(handle)
            # Weights are packed by the device's workers.
            with self._occupancies[device.name]:
                bindings = self._bind(checked, device)
                loaded = LoadedPlan(_compile(device, checked, bindings, fusion), device)
            try:
                return self._commit(handle, checked, loaded, started)
            except BaseException:
                loaded.free()
                raise

    # Where

    def _choose(self, graph: Graph, names: Sequence[str]) -> Device:
        """The first of the devices that can run all of it. Raises the first one's UnsupportedError."""
        refusals = []
        for name in names or ("",):
            device = self._device(name)
            refusal = _first_unsupported(graph, device)
            if refusal is None:
                return device
            refusals.append(refusal)
        raise refusals[0]

    # What its leaves are

    def _bind(self, graph: Graph, device: Device) -> LeafBindings:
        self._check_contents(graph.weights)
        leaves = list(enumerate(graph.leaves))
        return LeafBindings(
            weights={n: self._contents.tensor(x, device) for n, x in leaves if x.kind is LeafKind.WEIGHT},
            variables={n: self._variable(x, device) for n, x in leaves if x.kind is LeafKind.VARIABLE},
        )

    def _check_contents(self, weights: Sequence[Leaf]) -> None:
        missing = set(self._contents.missing(tuple(leaf.digest for leaf in weights)))
        names = [leaf.name for leaf in weights if leaf.digest in missing]
        if names:
            raise MissingContentError(
                f"{len(names)} weights were not uploaded, such as {names[0][:64]!r}",
                advice="upload their contents and compile again",
            )

    def _variable(self, leaf: Leaf, device: Device) -> Tensor:
        """The variable of this name, made if the session has none yet. Raises InvalidGraphError."""
        with self._lock:
            found = self._core.variables.get(leaf.name)
        if found is None:
            return self._new_variable(leaf, device)
        tensor = found[1].placed
        if tensor.type != leaf.type:
            raise InvalidGraphError(f"variable {leaf.name!r} is {tensor.type} here, not {leaf.type}")
        if tensor.buffer.buffer_type.device is not device:
            raise UnsupportedError(
                f"variable {leaf.name!r} lies on device {tensor.buffer.buffer_type.device.name}",
                advice="compile all plans that share it for one device",
            )
        return tensor

    def _new_variable(self, leaf: Leaf, device: Device) -> Tensor:
        with self._lock:
            self._core.handles.check_room(TensorHandle)
        buffer = new_buffer(device, leaf.type.nbytes)
        try:
            with self._lock:
                self._core.add_variable(leaf.name, leaf.type, device.name, buffer)
        except BaseException:
            buffer.free()
            raise
        return Tensor(leaf.type, buffer)

    # Its handle

    def _commit(self, handle: int, graph: Graph, loaded: LoadedPlan, started: float) -> PlanInfo:
        inputs = tuple(Port(leaf.name, leaf.type) for leaf in graph.inputs)
        outputs = tuple(Port(one.name, graph.type_of(one.value)) for one in graph.outputs)
        names = [leaf.name for leaf in graph.variables]
        assigned = {graph.leaves[node.operands[0]].name for node in graph.nodes if node.op == "assign"}
        variables = ([one for one in names if one not in assigned], sorted(assigned))
        with self._lock:
            self._core.add_plan(handle, loaded.device.name, (inputs, outputs), variables, loaded)
            numbers = {name: self._core.variables[name][0] for name in names}
        return PlanInfo(
            inputs=inputs,
            outputs=outputs,
            variables=tuple(VariablePort(Port(x.name, x.type), numbers[x.name]) for x in graph.variables),
            device=loaded.device.name,
            compute_bytes=loaded.plan.compute_bytes,
            steps=loaded.plan.steps,
            duration_ms=(time.perf_counter() - started) * 1e3,
        )


def _compile(device: Device, graph: Graph, bindings: LeafBindings, fusion: bool) -> Plan:
    try:
        return device.compile(graph, bindings, CompileOptions(fusion))
    except HeliographError:
        raise
    except Exception as error:
        raise typed(error, "compiling") from error


def _first_unsupported(graph: Graph, device: Device) -> UnsupportedError | None:
    for number, node in enumerate(graph.nodes):
        operands = [graph.type_of(value) for value in node.operands]
        if why := device.supports_op(node.op, node.attributes, operands, node.type):
            return UnsupportedError(
                f"device {device.name} cannot run op {node.op}: {why}", origin=graph.origin(number)
            )
    return None
