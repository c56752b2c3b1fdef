"""Portions as messages: an edge and a source are fields of what has them."""

from __future__ import annotations

from heliograph_proto.plans import Arrival, Departure, Edge, PeerSource, Portion
from heliograph_proto.v1 import plan_pb2


def encode_portion(portion: Portion) -> plan_pb2.Portion:
    return plan_pb2.Portion(
        arrivals=[
            plan_pb2.Arrival(
                leaf=one.leaf,
                edge=one.edge.name,
                secret=one.edge.secret,
                source=one.source.address if one.source is not None else "",
                incarnation=one.source.incarnation if one.source is not None else b"",
            )
            for one in portion.arrivals
        ],
        departures=[
            plan_pb2.Departure(node=one.node, edge=one.edge.name, secret=one.edge.secret)
            for one in portion.departures
        ],
        begins=sorted(portion.begins),
    )


def decode_portion(message: plan_pb2.Portion) -> Portion:
    """Raises InvalidArgumentError for an edge's name or secret of another length."""
    return Portion(
        arrivals=tuple(map(_decode_arrival, message.arrivals)),
        departures=tuple(Departure(one.node, Edge(one.edge, one.secret)) for one in message.departures),
        begins=frozenset(message.begins),
    )


def _decode_arrival(message: plan_pb2.Arrival) -> Arrival:
    source = PeerSource(message.source, message.incarnation) if message.source else None
    return Arrival(message.leaf, Edge(message.edge, message.secret), source)
