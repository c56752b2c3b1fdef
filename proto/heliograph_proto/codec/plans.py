"""Compile options, partitions, and the requests that carry them, as messages."""

from __future__ import annotations

from collections.abc import Sequence

from heliograph_proto.codec.graphs import encode_graph
from heliograph_proto.errors import InvalidArgumentError, InvalidGraphError
from heliograph_proto.graph import Graph
from heliograph_proto.plans import (
    Arrival,
    CompileRequest,
    Departure,
    Edge,
    EstimateRequest,
    LoopArrival,
    Partition,
    PeerSource,
    PlaceContentsRequest,
    PlanOptions,
    ReceivedGraph,
    ReserveRequest,
    RowSplit,
)
from heliograph_proto.v1 import plan_pb2


def encode_options(options: PlanOptions) -> plan_pb2.PlanOptions:
    return plan_pb2.PlanOptions(
        devices=options.devices,
        fusion=plan_pb2.FUSION_ON if options.fusion else plan_pb2.FUSION_OFF,
        threads=options.threads,
        pins=[plan_pb2.Pin(device=device, nodes=nodes) for device, nodes in options.pins],
        memory_bytes=dict(options.memory),
        pipeline=options.pipeline,
        row_splits=[_encode_row_split(split, leaves) for split, leaves in options.splits],
        buffer_types=dict(options.buffer_types),
        taps=options.taps,
        partition=None if options.partition is None else _encode_partition(options.partition),
    )


def decode_options(message: plan_pb2.PlanOptions) -> PlanOptions:
    """Return equal options for equal messages. Raises InvalidArgumentError for an invalid edge."""
    return PlanOptions(
        devices=tuple(message.devices),
        fusion=message.fusion != plan_pb2.FUSION_OFF,
        threads=message.threads,
        pins=tuple((pin.device, tuple(pin.nodes)) for pin in message.pins),
        # A map has no order.
        memory=tuple(sorted(message.memory_bytes.items())),
        pipeline=message.pipeline or 1,
        splits=tuple((_decode_row_split(one), tuple(one.leaves)) for one in message.row_splits),
        buffer_types=tuple(sorted(message.buffer_types.items())),
        taps=tuple(message.taps),
        partition=_decode_partition(message.partition) if message.HasField("partition") else None,
    )


def _encode_row_split(split: RowSplit, leaves: Sequence[int]) -> plan_pb2.RowSplit:
    fractions = [plan_pb2.RowFraction(device=device, fraction=part) for device, part in split.fractions]
    return plan_pb2.RowSplit(leaves=leaves, main=split.main, fractions=fractions)


def _decode_row_split(message: plan_pb2.RowSplit) -> RowSplit:
    return RowSplit(message.main, tuple((part.device, part.fraction) for part in message.fractions))


def _encode_partition(partition: Partition) -> plan_pb2.Partition:
    return plan_pb2.Partition(
        arrivals=[
            plan_pb2.Arrival(
                leaf=one.leaf,
                edge=one.edge.name,
                secret=one.edge.secret,
                source=one.source.address if one.source is not None else "",
                incarnation=one.source.incarnation if one.source is not None else b"",
            )
            for one in partition.arrivals
        ],
        departures=[
            plan_pb2.Departure(node=one.node, edge=one.edge.name, secret=one.edge.secret)
            for one in partition.departures
        ],
        begins=sorted(partition.begins),
        loop_arrivals=[
            plan_pb2.LoopArrival(
                edge=one.edge.name,
                secret=one.edge.secret,
                source=one.source.address,
                incarnation=one.source.incarnation,
            )
            for one in partition.loop_arrivals
        ],
        loop_departures=[
            plan_pb2.LoopDeparture(edge=one.name, secret=one.secret) for one in partition.loop_departures
        ],
    )


def _decode_partition(message: plan_pb2.Partition) -> Partition:
    """Raise InvalidArgumentError for an edge's name or secret of the wrong length."""
    return Partition(
        arrivals=tuple(map(_decode_arrival, message.arrivals)),
        departures=tuple(Departure(one.node, Edge(one.edge, one.secret)) for one in message.departures),
        begins=frozenset(message.begins),
        loop_arrivals=tuple(
            LoopArrival(Edge(one.edge, one.secret), PeerSource(one.source, one.incarnation))
            for one in message.loop_arrivals
        ),
        loop_departures=tuple(Edge(one.edge, one.secret) for one in message.loop_departures),
    )


def _decode_arrival(message: plan_pb2.Arrival) -> Arrival:
    source = PeerSource(message.source, message.incarnation) if message.source else None
    return Arrival(message.leaf, Edge(message.edge, message.secret), source)


def encode_compile_request(request: CompileRequest, session: bytes) -> plan_pb2.CompileRequest:
    assert isinstance(request.graph, Graph)
    return plan_pb2.CompileRequest(
        session=session,
        plan=request.plan,
        graph=encode_graph(request.graph),
        options=encode_options(request.options),
        bindings=[plan_pb2.LeafBinding(leaf=leaf, tensor=one) for leaf, one in request.bindings.items()],
        updates=request.updates,
        reservation=request.reservation,
        renews_lost=request.renews_lost,
    )


def decode_compile_request(message: plan_pb2.CompileRequest, graph: ReceivedGraph) -> CompileRequest:
    """Return a message's request with its `graph`, which is decoded when needed. In this and the
    other requests with a graph, the message has none.

    Raises InvalidGraphError for a leaf that is bound twice, and the errors of `decode_options`.
    """
    bindings = {one.leaf: one.tensor for one in message.bindings}
    if len(bindings) < len(message.bindings):
        raise InvalidGraphError("a leaf is bound to a tensor twice", advice="bind each leaf once")
    return CompileRequest(
        plan=message.plan,
        graph=graph,
        options=decode_options(message.options),
        bindings=bindings,
        updates=message.updates,
        reservation=message.reservation,
        renews_lost=message.renews_lost,
    )


def encode_place_contents_request(
    request: PlaceContentsRequest, session: bytes
) -> plan_pb2.PlaceContentsRequest:
    compiling = encode_compile_request(request.compile, session)
    return plan_pb2.PlaceContentsRequest(compile=compiling, missing_digests=request.missing_digests)


def encode_estimate_request(request: EstimateRequest, session: bytes) -> plan_pb2.EstimateRequest:
    graph, options = encode_graph(request.graph), encode_options(request.options)
    return plan_pb2.EstimateRequest(session=session, graph=graph, options=options)


def decode_estimate_request(message: plan_pb2.EstimateRequest, graph: ReceivedGraph) -> EstimateRequest:
    return EstimateRequest(graph.decode(), decode_options(message.options))


def encode_reserve_request(request: ReserveRequest, session: bytes) -> plan_pb2.ReserveRequest:
    return plan_pb2.ReserveRequest(
        session=session,
        reservation=request.reservation,
        graph=None if request.graph is None else encode_graph(request.graph),
        options=encode_options(request.options),
        block_bytes=request.block_bytes,
    )


def decode_reserve_request(message: plan_pb2.ReserveRequest, graph: ReceivedGraph | None) -> ReserveRequest:
    """Raise InvalidArgumentError for both a graph and blocks, or neither."""
    if (graph is not None) == bool(message.block_bytes):
        raise InvalidArgumentError("a reservation needs either a graph or sizes of blocks")
    return ReserveRequest(
        reservation=message.reservation,
        graph=None if graph is None else graph.decode(),
        options=decode_options(message.options),
        block_bytes=tuple(message.block_bytes),
    )
