"""A plan of a member, run by its handle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import heliograph as hg
from heliograph_backends import access
from heliograph_backends.contract import Abort, CompileOptions, LeafBindings, Plan, Tensor
from heliograph_proto.errors import InvalidInputError, UnknownHandleError
from heliograph_proto.graph import Graph
from heliograph_server.pool.bound import INLINE_BYTES, Bound, bytes_of
from heliograph_server.pool.memory import RemoteBuffer

if TYPE_CHECKING:
    from heliograph_server.pool.device import RemoteDevice

#: Inputs in this host's memory go with the run, however large: the client library streams what is not small.
MOST_BYTES = 2**62


class RemotePlan(Plan):
    """Made by `RemoteDevice.compile`. A run is one message each way."""

    device: RemoteDevice
    takes_anything = True

    def __init__(self, device: RemoteDevice, graph: Graph, member: hg.Plan) -> None:
        self.device = device
        self.graph = graph
        self.compute_bytes = member.compute_bytes
        self.arena_bytes = member.reserved_bytes
        self.steps = member.steps
        self._member: hg.Plan | None = member
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
        for type, wanted in zip(self._types, outputs, strict=True):
            if wanted is not None and wanted.type != type:
                raise InvalidInputError(f"an output is {type}, not {wanted.type}")

    def _run_small(
        self, member: hg.Plan, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], abort: Abort
    ) -> bool:
        """One small message each way, where all that it takes lies in this process, and all that it gives is
        wanted here; whether it was."""
        wanted = [one for one in outputs if one is not None and not isinstance(one.buffer, RemoteBuffer)]
        if len(wanted) < len(outputs) or not all(map(_is_small, inputs)):
            return False
        run = member._submit_bytes([bytes_of(one).tobytes() for one in inputs])
        if run is None:
            return False
        with abort.watch(lambda: _cancel(run)):
            found = run.data()
        for tensor, data in zip(wanted, found, strict=True):
            access.write(tensor, 0, memoryview(data))
        return True

    def _run_any(
        self, member: hg.Plan, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], abort: Abort
    ) -> None:
        bound = Bound(self.device, inputs, outputs, MOST_BYTES)
        try:
            rest = bound.inputs, tuple(bound.fetched), bound.into, self.device.member_stream
            run = member._submit_part(0, *rest)
            with abort.watch(lambda: _cancel(run)):
                bound.take(member, run)
        finally:
            bound.close()

    def update(self, graph: Graph, bindings: LeafBindings, options: CompileOptions) -> RemotePlan:
        if self._member is None:
            raise UnknownHandleError("the plan was freed")
        made = self.device.compile_on_member(graph, bindings, options, self._member)
        self._member = None
        return made

    def free(self) -> None:
        member, self._member = self._member, None
        if member is not None:
            member.free()


def _is_small(tensor: Tensor) -> bool:
    return tensor.buffer.buffer_type.is_host and tensor.type.nbytes <= INLINE_BYTES


def _cancel(run: hg.RunFuture) -> None:
    run.cancel()
