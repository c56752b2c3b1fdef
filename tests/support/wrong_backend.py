"""A plugin: a device that computes a sine where a hyperbolic tangent is asked for, and has no cosine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from heliograph_backends.contract import CONTRACT_VERSION, Backend, DeviceCompileOptions, LeafBindings, Plan
from heliograph_backends.fake import FakeDevice
from heliograph_proto.graph import Graph
from heliograph_proto.types import TensorType


class WrongDevice(FakeDevice):
    """Counts what it compiles."""

    backend = "wrong"

    def __init__(self) -> None:
        super().__init__("wrong0")
        self.compiled = 0

    def compile(self, graph: Graph, bindings: LeafBindings, options: DeviceCompileOptions) -> Plan:
        self.compiled += 1
        nodes = tuple(replace(node, op="sin") if node.op == "tanh" else node for node in graph.nodes)
        return super().compile(replace(graph, nodes=nodes), bindings, options)

    def supports_op(
        self, op: str, attributes: Mapping[str, Any], operands: Sequence[TensorType], result: TensorType
    ) -> str:
        return "it has no cosine" if op == "cos" else super().supports_op(op, attributes, operands, result)


class WrongBackend(Backend):
    """One wrong device."""

    name = "wrong"
    contract_version = CONTRACT_VERSION

    def __init__(self, parameters: Sequence[Mapping[str, Any]] = ({},)) -> None:
        self._devices = (WrongDevice(),)

    def devices(self) -> Sequence[WrongDevice]:
        return self._devices


BACKEND = WrongBackend
