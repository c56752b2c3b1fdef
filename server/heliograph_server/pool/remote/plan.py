"""A plan of a member, run by its handle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import heliograph as hg
from heliograph.explain.explanation import check_report
from heliograph.head import members
from heliograph_backends.contract import (
    Abort,
    DeviceCompileOptions,
    LeafBindings,
    Plan,
    Tensor,
    Usage,
    access,
)
from heliograph_proto.errors import InvalidInputError, UnknownHandleError
from heliograph_proto.graph import Graph
from heliograph_proto.plans import Cause, NodePlacement
from heliograph_proto.types import DTYPES, TensorType
from heliograph_server.pool.remote.memory import RemoteBuffer

if TYPE_CHECKING:
    from heliograph_server.pool.remote.device import RemoteDevice

#: The largest input that is sent in the message of a run.
INLINE_BYTES = 64 * 1024


class BoundRun:
    """The tensors of one run, as its member gets them.

    Tensors on the member are used in place. Inputs in this host's memory are sent with the run, up
    to `most_bytes` each; others are copied to memory of `device`, which may wait. Outputs that
    belong elsewhere are fetched.
    """

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
        #: Outputs to fetch, and their targets.
        self.fetched = dict[int, Tensor]()
        self.into = dict[int, hg.Tensor]()
        for place, target in enumerate(outputs):
            if target is not None:
                if (found := self._on_member(target)) is not None:
                    self.into[place] = found
                else:
                    self.fetched[place] = target
        try:
            self.inputs = [self._input(one) for one in inputs]
        except BaseException:
            self.close()
            raise

    def _on_member(self, tensor: Tensor) -> hg.Tensor | None:
        """The member's tensor, if it is on the member."""
        buffer = tensor.buffer
        if isinstance(buffer, RemoteBuffer) and buffer.buffer_type.device.member is self._device.member:
            return buffer.tensor(tensor)
        return None

    def _input(self, tensor: Tensor) -> hg.Tensor | np.ndarray[Any, Any]:
        if (found := self._on_member(tensor)) is not None:
            return found
        if tensor.buffer.buffer_type.is_host and tensor.type.nbytes <= self._most_bytes:
            return bytes_of(tensor)
        memory = self._device.buffer_type
        moved = Tensor(tensor.type, memory.allocate(memory.alloc_size(tensor.type), Usage.COMPUTE))
        self._made.append(moved)
        access.copy(tensor, moved)
        return self._device.tensor(moved)

    def take(self, plan: hg.Plan, run: hg.RunFuture) -> None:
        """Wait for the end of the run, and copy the fetched outputs to their targets. Raises the
        run's error."""
        arrays = run.result()
        ports = plan._spec.info.outputs
        for place, target in self.fetched.items():
            array = arrays[ports[place].name]
            access.write(target, 0, np.ascontiguousarray(array).reshape(-1).view("u1").data)

    def close(self) -> None:
        """Release what the run has allocated. Idempotent."""
        made, self._made = self._made, []
        # Views keep the member's memory, though its buffer is freed.
        self.inputs = []
        self.into.clear()
        for one in made:
            one.buffer.free()


def bytes_of(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The bytes of a tensor in host memory, in place if they are contiguous."""
    if not (tensor.is_contiguous and tensor.buffer.is_plain):
        return np.frombuffer(access.read_whole(tensor), np.uint8)
    row = TensorType(DTYPES["u8"], (tensor.type.nbytes,))
    found: np.ndarray[Any, Any] = tensor.buffer.array(row, tensor.offset_bytes, (1,))
    return found


#: Inputs in this host's memory go with the run, whatever their size: the client library streams
#: large ones.
MOST_BYTES = 2**62


class RemotePlan(Plan):
    """A plan made by `RemoteDevice.compile`. A run is one message each way."""

    device: RemoteDevice
    takes_anything = True

    def __init__(self, device: RemoteDevice, graph: Graph, member: hg.Plan) -> None:
        self.device = device
        self.graph = graph
        self.compute_bytes = member.compute_bytes
        self.arena_bytes = member.reserved_bytes
        self.steps = member.steps
        self._member: hg.Plan | None = member
        self._was_measured = False
        self._inputs = graph.inputs
        self._types = [graph.type_of(port.value) for port in graph.outputs]

    def __repr__(self) -> str:
        return f"<RemotePlan of {self.graph} on {self.device.name}>"

    def compute(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], abort: Abort) -> None:
        if self._member is None:
            raise UnknownHandleError("the plan was freed")
        self._check(inputs, outputs)
        with self.device.member.edge():
            if not self._run_small(self._member, inputs, outputs, abort):
                self._run_any(self._member, inputs, outputs, abort)

    def _check(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None]) -> None:
        for leaf, tensor in zip(self._inputs, inputs, strict=True):
            if tensor.type != leaf.type:
                raise InvalidInputError(f"input {leaf.name!r} is {leaf.type}, not {tensor.type}")
        for type, target in zip(self._types, outputs, strict=True):
            if target is not None and target.type != type:
                raise InvalidInputError(f"an output is {type}, not {target.type}")

    def _run_small(
        self, member: hg.Plan, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], abort: Abort
    ) -> bool:
        """Run with one small message each way, if all inputs and outputs are in this process.
        Return True if it ran."""
        targets = [one for one in outputs if one is not None and not isinstance(one.buffer, RemoteBuffer)]
        if len(targets) < len(outputs) or not all(
            one.buffer.buffer_type.is_host and one.type.nbytes <= INLINE_BYTES for one in inputs
        ):
            return False
        run = members.submit_bytes(member, [bytes_of(one).tobytes() for one in inputs])
        if run is None:
            return False
        with abort.watch(lambda: _cancel(run)):
            found = run.data()
        for tensor, data in zip(targets, found, strict=True):
            access.write(tensor, 0, memoryview(data))
        return True

    def _run_any(
        self, member: hg.Plan, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], abort: Abort
    ) -> None:
        bound = BoundRun(self.device, inputs, outputs, MOST_BYTES)
        try:
            fetched, stream = tuple(bound.fetched), self.device.member_stream
            run = members.submit_partition(member, 0, bound.inputs, fetched, bound.into, stream)
            with abort.watch(lambda: _cancel(run)):
                bound.take(member, run)
        finally:
            bound.close()

    def measure(self, *, on: bool) -> None:
        if self._member is not None:
            with self.device.member.edge():
                members.report(self._member, measure=on)
            self._was_measured = True

    def times_of_nodes(self) -> Sequence[float]:
        return [one.step_us for one in self._nodes()]

    def steps_of_nodes(self) -> Sequence[int]:
        return [one.step for one in self._nodes()]

    def _nodes(self) -> Sequence[NodePlacement]:
        """Return the member's report of nodes after a measurement; before it nothing is known."""
        if not self._was_measured or self._member is None:
            return [NodePlacement(0, Cause.FIRST_THAT_CAN)] * len(self.graph.nodes)
        with self.device.member.edge():
            found = members.report(self._member)
            check_report(self.graph, found)
            return found.nodes

    def update(self, graph: Graph, bindings: LeafBindings, options: DeviceCompileOptions) -> RemotePlan:
        if self._member is None:
            raise UnknownHandleError("the plan was freed")
        made = self.device.compile_on_member(graph, bindings, options, self._member)
        self._member = None
        return made

    def free(self) -> None:
        member, self._member = self._member, None
        if member is not None:
            member.free()


def _cancel(run: hg.RunFuture) -> None:
    run.cancel()
