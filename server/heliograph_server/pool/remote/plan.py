"""A plan of a member, run by its handle."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import heliograph as hg
from heliograph.explain.report_checks import check_report
from heliograph.head import members
from heliograph_backends.contract import (
    Abort,
    DeviceCompileOptions,
    LeafBindings,
    MemoryMap,
    Plan,
    Tensor,
    access,
)
from heliograph_proto.commands import Loop
from heliograph_proto.errors import (
    HeliographError,
    InvalidInputError,
    LimitExceededError,
    UnknownHandleError,
)
from heliograph_proto.graph import Graph
from heliograph_server.plans.memory_report import map_of
from heliograph_server.pool.remote.binding import INLINE_BYTES, BoundRun, bytes_of
from heliograph_server.pool.remote.loop import RemoteLoop
from heliograph_server.pool.remote.memory import RemoteBuffer

if TYPE_CHECKING:
    from heliograph_server.pool.remote.device import RemoteDevice

logger = logging.getLogger(__name__)

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

    def hosted_loop(
        self, loop: Loop, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None]
    ) -> RemoteLoop | None:
        if self._member is None:
            raise UnknownHandleError("the plan was freed")
        self._check(inputs, outputs)
        with self.device.member.edge():
            bound = BoundRun(self.device, inputs, outputs, MOST_BYTES)
            try:
                counted = replace(loop, counts_steps=True)
                return RemoteLoop(self.device, self._member, self.graph, counted, bound)
            except LimitExceededError:
                # Other loops stream so much that the member has no room for this one's values.
                return None

    def measure(self, *, on: bool) -> None:
        if self._member is not None:
            with self.device.member.edge():
                members.report(self._member, measure=on)
            self._was_measured = True

    def steps_and_times(self) -> tuple[Sequence[int], Sequence[float]]:
        """Return what the member tells after a measurement; before it nothing is known."""
        if not self._was_measured or self._member is None:
            return super().steps_and_times()
        with self.device.member.edge():
            found = members.report(self._member)
            check_report(self.graph, found)
        return [one.step for one in found.nodes], [one.step_us for one in found.nodes]

    def memory_map(self) -> MemoryMap:
        """Return what the member tells; nothing if it does not answer."""
        if self._member is None:
            return MemoryMap()
        try:
            with self.device.member.edge():
                found = members.report(self._member)
                check_report(self.graph, found)
        except HeliographError as error:
            logger.debug("no memory of %r: %s", self, error)
            return MemoryMap()
        return map_of(found, len(self.graph.leaves))

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
