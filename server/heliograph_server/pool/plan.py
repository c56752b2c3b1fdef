"""A plan of a member, run by its handle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import heliograph as hg
from heliograph_backends import access
from heliograph_backends.contract import Abort, CompileOptions, LeafBindings, Plan, Tensor, Usage
from heliograph_proto.errors import InvalidInputError, UnknownHandleError
from heliograph_proto.graph import Graph
from heliograph_proto.types import TensorType
from heliograph_server.pool.memory import RemoteBuffer

if TYPE_CHECKING:
    from heliograph_server.pool.device import RemoteDevice


class RemotePlan(Plan):
    """Made by `RemoteDevice.compile`. A run is one message each way."""

    device: RemoteDevice

    def __init__(self, device: RemoteDevice, graph: Graph, member: hg.Plan) -> None:
        self.device = device
        self.graph = graph
        self.compute_bytes = member.compute_bytes
        self.arena_bytes = member.reserved_bytes
        self.steps = member.steps
        self._member: hg.Plan | None = member

    def __repr__(self) -> str:
        return f"<RemotePlan of {self.graph} on {self.device.name}>"

    def compute(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], abort: Abort) -> None:
        if self._member is None:
            raise UnknownHandleError("the plan was freed")
        with self.device.member.edge(), ExitStack() as stack:
            given = {
                leaf.name: self._input(stack, leaf.name, leaf.type, tensor)
                for leaf, tensor in zip(self.graph.inputs, inputs, strict=True)
            }
            written = {
                port.name: stack.enter_context(self._output(self.graph.type_of(port.value), tensor))
                for port, tensor in zip(self.graph.outputs, outputs, strict=True)
                if tensor is not None
            }
            run = self._member.submit(given, fetch=(), out=written, stream=self.device.member_stream)
            with abort.watch(lambda: _cancel(run)):
                run.result()

    def _input(self, stack: ExitStack, name: str, type: TensorType, tensor: Tensor) -> hg.Tensor:
        """The tensor on the member, copied there if it lies elsewhere."""
        if tensor.type != type:
            raise InvalidInputError(f"input {name!r} is {type}, not {tensor.type}")
        if (there := self._on_member(tensor)) is not None:
            return there
        moved = stack.enter_context(self._temporary(type))
        access.copy(tensor, moved)
        return self.device.tensor(moved)

    @contextmanager
    def _output(self, type: TensorType, tensor: Tensor) -> Iterator[hg.Tensor]:
        """Where the member writes an output, which is copied from there if it belongs elsewhere."""
        if tensor.type != type:
            raise InvalidInputError(f"an output is {type}, not {tensor.type}")
        if (there := self._on_member(tensor)) is not None:
            yield there
            return
        with self._temporary(type) as moved:
            yield self.device.tensor(moved)
            access.copy(moved, tensor)

    def _on_member(self, tensor: Tensor) -> hg.Tensor | None:
        buffer = tensor.buffer
        if isinstance(buffer, RemoteBuffer) and buffer.buffer_type.device.member is self.device.member:
            return buffer.tensor(tensor)
        return None

    @contextmanager
    def _temporary(self, type: TensorType) -> Iterator[Tensor]:
        buffer_type = self.device.buffer_type
        buffer = buffer_type.allocate(buffer_type.alloc_size(type), Usage.COMPUTE)
        try:
            yield Tensor(type, buffer)
        finally:
            buffer.free()

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


def _cancel(run: hg.RunFuture) -> None:
    run.cancel()
