"""Plans as messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from heliograph_proto.description import (
    Cause,
    ContentOffer,
    CopyReport,
    DeviceEstimate,
    DeviceShare,
    LinkReport,
    NodePart,
    NodePlacement,
    PlanEstimate,
    PlanInfo,
    PlanReport,
    Port,
    SplitReport,
    VariablePort,
    Way,
    WeightShare,
)
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
            plan_pb2.VariablePort(port=_encode_port(one.port), tensor=one.tensor, device=one.device)
            for one in info.variables
        ],
        device=info.device,
        compute_bytes=info.compute_bytes,
        steps=info.steps,
        duration_ms=info.duration_ms,
        devices=info.devices,
        splits=info.splits,
        copied_bytes=info.copied_bytes,
        pipeline=info.pipeline,
        reserved_bytes=info.reserved_bytes,
    )


def decode_plan(message: plan_pb2.CompileResponse) -> PlanInfo:
    return PlanInfo(
        inputs=tuple(map(_decode_port, message.inputs)),
        outputs=tuple(map(_decode_port, message.outputs)),
        variables=tuple(
            VariablePort(_decode_port(one.port), one.tensor, one.device) for one in message.variables
        ),
        device=message.device,
        compute_bytes=message.compute_bytes,
        steps=message.steps,
        duration_ms=message.duration_ms,
        devices=tuple(message.devices),
        splits=message.splits,
        copied_bytes=message.copied_bytes,
        pipeline=message.pipeline or 1,
        reserved_bytes=message.reserved_bytes,
    )


def encode_estimate(found: PlanEstimate) -> plan_pb2.EstimateResponse:
    return plan_pb2.EstimateResponse(
        device=found.device,
        compute_bytes=found.compute_bytes,
        weights_bytes=found.weights_bytes,
        variables_bytes=found.variables_bytes,
        extra_bytes=found.extra_bytes,
        arena_bytes=found.arena_bytes,
        devices=[
            plan_pb2.DeviceEstimate(
                name=one.name,
                compute_bytes=one.compute_bytes,
                weights_bytes=one.weights_bytes,
                variables_bytes=one.variables_bytes,
                extra_bytes=one.extra_bytes,
            )
            for one in found.devices
        ],
    )


def decode_estimate(message: plan_pb2.EstimateResponse) -> PlanEstimate:
    return PlanEstimate(
        device=message.device,
        compute_bytes=tuple(message.compute_bytes),
        weights_bytes=message.weights_bytes,
        variables_bytes=message.variables_bytes,
        extra_bytes=message.extra_bytes,
        arena_bytes=tuple(message.arena_bytes),
        devices=tuple(
            DeviceEstimate(
                one.name, tuple(one.compute_bytes), one.weights_bytes, one.variables_bytes, one.extra_bytes
            )
            for one in message.devices
        ),
    )


def encode_reserved(sizes: Mapping[str, int]) -> plan_pb2.ReserveResponse:
    shares = [plan_pb2.ReservedShare(name=name, size_bytes=size) for name, size in sizes.items()]
    return plan_pb2.ReserveResponse(devices=shares)


def decode_reserved(message: plan_pb2.ReserveResponse) -> dict[str, int]:
    return {one.name: one.size_bytes for one in message.devices}


def encode_offers(offers: Sequence[ContentOffer]) -> plan_pb2.PlaceContentsResponse:
    return plan_pb2.PlaceContentsResponse(
        offers=[
            plan_pb2.ContentOffer(
                digest=one.digest, address=one.address, incarnation=one.incarnation, ticket=one.ticket
            )
            for one in offers
        ]
    )


def decode_offers(message: plan_pb2.PlaceContentsResponse) -> tuple[ContentOffer, ...]:
    return tuple(ContentOffer(one.digest, one.address, one.incarnation, one.ticket) for one in message.offers)


def encode_report(found: PlanReport) -> plan_pb2.ExplainResponse:
    return plan_pb2.ExplainResponse(
        nodes=[
            plan_pb2.NodePlacement(
                split=one.split,
                cause=plan_pb2.Cause.ValueType(one.cause.value),
                operand=one.operand,
                concurrent=one.concurrent,
            )
            for one in found.nodes
        ],
        splits=map(_encode_split, found.splits),
        devices=[
            plan_pb2.DeviceShare(
                name=one.name,
                weights_bytes=one.weights_bytes,
                variables_bytes=one.variables_bytes,
                compute_bytes=one.compute_bytes,
                results_bytes=one.results_bytes,
            )
            for one in found.devices
        ],
        weights=[
            plan_pb2.WeightShare(
                leaf=one.leaf,
                device=one.device,
                first=one.first,
                count=one.count,
                size_bytes=one.size_bytes,
                are_columns=one.are_columns,
            )
            for one in found.weights
        ],
        parts=[plan_pb2.NodePart(node=one.node, split=one.split, share=one.share) for one in found.parts],
        predicted_us=found.predicted_us,
        links=map(_encode_link, found.links),
    )


def decode_report(message: plan_pb2.ExplainResponse) -> PlanReport:
    return PlanReport(
        nodes=tuple(
            NodePlacement(one.split, _decode_cause(one.cause), one.operand, one.concurrent)
            for one in message.nodes
        ),
        splits=tuple(
            SplitReport(
                device=one.device,
                copies=tuple(
                    CopyReport(
                        copy.value,
                        copy.source,
                        copy.size_bytes,
                        copy.rows_only,
                        copy.ahead,
                        _decode_way(copy.way),
                        copy.predicted_us,
                    )
                    for copy in one.copies
                ),
                steps=one.steps,
                compute_bytes=one.compute_bytes,
                copy_us=one.copy_us,
                compute_us=one.compute_us,
                began_us=one.began_us,
                note=one.note,
                predicted_copy_us=one.predicted_copy_us,
                predicted_compute_us=one.predicted_compute_us,
                predicted_began_us=one.predicted_began_us,
            )
            for one in message.splits
        ),
        devices=tuple(
            DeviceShare(
                one.name, one.weights_bytes, one.variables_bytes, one.compute_bytes, one.results_bytes
            )
            for one in message.devices
        ),
        weights=tuple(
            WeightShare(one.leaf, one.device, one.first, one.count, one.size_bytes, one.are_columns)
            for one in message.weights
        ),
        parts=tuple(NodePart(one.node, one.split, one.share) for one in message.parts),
        predicted_us=message.predicted_us,
        links=tuple(map(_decode_link, message.links)),
    )


def _encode_split(one: SplitReport) -> plan_pb2.SplitReport:
    return plan_pb2.SplitReport(
        device=one.device,
        copies=[
            plan_pb2.CopyReport(
                value=copy.value,
                source=copy.source,
                size_bytes=copy.size_bytes,
                rows_only=copy.rows_only,
                ahead=copy.ahead,
                way=plan_pb2.Way.ValueType(copy.way.value),
                predicted_us=copy.predicted_us,
            )
            for copy in one.copies
        ],
        steps=one.steps,
        compute_bytes=one.compute_bytes,
        copy_us=one.copy_us,
        compute_us=one.compute_us,
        began_us=one.began_us,
        note=one.note,
        predicted_copy_us=one.predicted_copy_us,
        predicted_compute_us=one.predicted_compute_us,
        predicted_began_us=one.predicted_began_us,
    )


def _encode_link(one: LinkReport) -> plan_pb2.LinkReport:
    return plan_pb2.LinkReport(
        source=one.source,
        destination=one.destination,
        round_trip_us=one.round_trip_us,
        bytes_per_s=one.bytes_per_s,
        is_measured=one.is_measured,
    )


def _decode_link(one: plan_pb2.LinkReport) -> LinkReport:
    return LinkReport(one.source, one.destination, one.round_trip_us, one.bytes_per_s, one.is_measured)


def _decode_cause(number: int) -> Cause:
    """A cause that only a newer peer knows is the least that can be said."""
    return Cause(number) if number in {one.value for one in Cause} else Cause.FIRST_THAT_CAN


def _decode_way(number: int) -> Way:
    """A way that only a newer peer knows is one between hosts, whichever."""
    return Way(number) if number in {one.value for one in Way} else Way.DIRECT
