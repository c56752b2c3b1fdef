"""Plans as messages."""

from __future__ import annotations

from heliograph_proto.description import PlanEstimate, PlanInfo, Port, VariablePort
from heliograph_proto.messages.types import decode_type, encode_type
from heliograph_proto.v1 import plan_pb2


def _encode_port(port: Port) -> plan_pb2.Port:
    return plan_pb2.Port(name=port.name, type=encode_type(port.type))


def _decode_port(message: plan_pb2.Port) -> Port:
    return Port(message.name, decode_type(message.type))


def encode_plan(info: PlanInfo) -> plan_pb2.CompileResponse:
    return plan_pb2.CompileResponse(
        inputs=map(_encode_port, info.inputs),
        outputs=map(_encode_port, info.outputs),
        variables=[
            plan_pb2.VariablePort(port=_encode_port(one.port), tensor=one.tensor) for one in info.variables
        ],
        device=info.device,
        compute_bytes=info.compute_bytes,
        steps=info.steps,
        duration_ms=info.duration_ms,
        devices=info.devices,
        splits=info.splits,
        copied_bytes=info.copied_bytes,
    )


def decode_plan(message: plan_pb2.CompileResponse) -> PlanInfo:
    return PlanInfo(
        inputs=tuple(map(_decode_port, message.inputs)),
        outputs=tuple(map(_decode_port, message.outputs)),
        variables=tuple(VariablePort(_decode_port(one.port), one.tensor) for one in message.variables),
        device=message.device,
        compute_bytes=message.compute_bytes,
        steps=message.steps,
        duration_ms=message.duration_ms,
        devices=tuple(message.devices),
        splits=message.splits,
        copied_bytes=message.copied_bytes,
    )


def encode_estimate(found: PlanEstimate) -> plan_pb2.EstimateResponse:
    return plan_pb2.EstimateResponse(
        device=found.device,
        compute_bytes=found.compute_bytes,
        weights_bytes=found.weights_bytes,
        variables_bytes=found.variables_bytes,
        extra_bytes=found.extra_bytes,
    )


def decode_estimate(message: plan_pb2.EstimateResponse) -> PlanEstimate:
    return PlanEstimate(
        device=message.device,
        compute_bytes=tuple(message.compute_bytes),
        weights_bytes=message.weights_bytes,
        variables_bytes=message.variables_bytes,
        extra_bytes=message.extra_bytes,
    )
