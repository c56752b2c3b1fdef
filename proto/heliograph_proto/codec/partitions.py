"""Partitions as messages: an edge and a source are fields of what has them."""

from __future__ import annotations

from heliograph_proto.plans import Arrival, Departure, Edge, Partition, PeerSource
from heliograph_proto.v1 import plan_pb2


def encode_partition(partition: Partition) -> plan_pb2.Partition:
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
    )


def decode_partition(message: plan_pb2.Partition) -> Partition:
    """Raises InvalidArgumentError for an edge's name or secret of another length."""
    return Partition(
        arrivals=tuple(map(_decode_arrival, message.arrivals)),
        departures=tuple(Departure(one.node, Edge(one.edge, one.secret)) for one in message.departures),
        begins=frozenset(message.begins),
    )


def _decode_arrival(message: plan_pb2.Arrival) -> Arrival:
    source = PeerSource(message.source, message.incarnation) if message.source else None
    return Arrival(message.leaf, Edge(message.edge, message.secret), source)
