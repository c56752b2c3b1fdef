"""Limits of the lists in a message, checked before the message is decoded.

gRPC limits a message's bytes. That is not enough: a number takes one byte on the wire and thirty in
Python, and a loop over ten million of them blocks every other client.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from heliograph_proto.codec.graphs import PARTS_PER_NODE
from heliograph_proto.errors import InvalidArgumentError, LimitExceededError
from heliograph_proto.sessions import Limits
from heliograph_proto.types import MAX_DIMENSIONS
from heliograph_proto.v1 import command_pb2, device_pb2, graph_pb2, plan_pb2

#: The most handles of one Free, tensors of one AllocateTensors, which take some 50 ms, and rows of
#: one FeedLoop.
MAX_LISTED = 10_000
#: The most devices that one plan may name.
MAX_DEVICES = 1024
#: The longest address, or name of an incarnation.
MAX_ADDRESS = 1024
#: The most blocks of one reservation.
MAX_BLOCKS = 1024
#: The most edges of one partition for values between two steps of a loop, in each direction.
MAX_LOOP_EDGES = 1024


def check_command(message: command_pb2.Command, limits: Limits) -> None:
    """Raise LimitExceededError or InvalidArgumentError for lists too long to succeed."""
    match message.WhichOneof("kind"):
        case "run":
            _check(len(message.run.inputs), limits.graph_nodes, "inputs")
            _check(len(message.run.outputs), limits.graph_nodes, "outputs")
            _check(len(message.run.loop.carries), limits.graph_nodes, "carried values")
            _check(len(message.run.loop.taps), limits.graph_nodes, "taps")
            _check(len(message.run.loop.fed_inputs), limits.graph_nodes, "fed inputs")
            exchange = message.run.loop.exchange
            told = (exchange.tells, exchange.tells_with, exchange.told_with)
            for edges in (exchange.gives, exchange.takes, *told, exchange.signals, exchange.awaits):
                _check(len(edges), MAX_LOOP_EDGES, "values between two steps")
        case "feed_loop":
            _check(len(message.feed_loop.values), limits.graph_nodes, "values")
            _check(len(message.feed_loop.rows), MAX_LISTED, "rows")
        case "allocate":
            _check_dimensions(len(message.allocate.type.shape))
        case "view":
            _check_dimensions(len(message.view.type.shape))
            _check_dimensions(len(message.view.strides_bytes))
        case "place_tensor":
            _check_dimensions(len(message.place_tensor.type.shape))
        case "allocate_tensors":
            tensors = message.allocate_tensors.tensors
            _check(len(tensors), min(MAX_LISTED, limits.tensors), "tensors")
            for one in tensors:
                _check_dimensions(len(one.type.shape))
        case "free":
            _check(len(message.free.handles), MAX_LISTED, "handles")
        case "skip":
            # An AllocateTensors that is passed over names its buffer as well.
            _check(len(message.skip.lost), MAX_LISTED + 1, "lost handles")


def check_queries(request: device_pb2.QueryOpsRequest, limits: Limits) -> None:
    """Check the size of a query for ops. Raises LimitExceededError."""
    _check(len(request.queries), limits.graph_nodes, "queries")
    parts = sum(
        len(one.operands)
        + sum(len(operand.shape) for operand in one.operands)
        + _attribute_parts(one.attributes)
        for one in request.queries
    )
    _check(parts, PARTS_PER_NODE * limits.graph_nodes, "operands, attributes and dimensions")


def check_placement(request: device_pb2.QueryPlacementRequest, limits: Limits) -> None:
    """Check the size of a query for a placement. Raises LimitExceededError,
    InvalidArgumentError."""
    _check(len(request.tensors), limits.tensors, "tensors")
    for one in request.tensors:
        _check_dimensions(len(one.shape))


def check_bindings(request: plan_pb2.CompileRequest, limits: Limits) -> None:
    """Check the number of bound leaves. Raises LimitExceededError."""
    _check(len(request.bindings), limits.graph_nodes, "bindings")


def check_digests(digests: Sequence[bytes], limits: Limits) -> None:
    """Check the number of digests. Raises LimitExceededError."""
    _check(len(digests), limits.graph_nodes, "digests")


def check_options(options: plan_pb2.PlanOptions, limits: Limits) -> None:
    """Check the size of a plan's options. Raises LimitExceededError, InvalidArgumentError."""
    _check(len(options.devices), MAX_DEVICES, "devices")
    _check(len(options.memory_bytes), MAX_DEVICES, "memory limits")
    _check(len(options.pins) + sum(len(pin.nodes) for pin in options.pins), 2 * limits.graph_nodes, "pins")
    _check(len(options.buffer_types), MAX_DEVICES, "buffer types")
    weights = sum(1 + len(split.leaves) for split in options.row_splits)
    _check(weights, 2 * limits.graph_nodes, "weights over devices")
    for split in options.row_splits:
        _check(len(split.fractions), MAX_DEVICES, "fractions")
    _check(len(options.taps), limits.graph_nodes, "taps")
    _check(len(options.partition.arrivals), limits.graph_nodes, "arrivals")
    _check(len(options.partition.departures), limits.graph_nodes, "departures")
    _check(len(options.partition.begins), limits.graph_nodes, "splits")
    _check(len(options.partition.loop_arrivals), MAX_LOOP_EDGES, "arrivals between two steps")
    _check(len(options.partition.loop_departures), MAX_LOOP_EDGES, "departures between two steps")
    sources: list[plan_pb2.Arrival | plan_pb2.LoopArrival] = [*options.partition.arrivals]
    for arrival in (*sources, *options.partition.loop_arrivals):
        if len(arrival.source) > MAX_ADDRESS or len(arrival.incarnation) > MAX_ADDRESS:
            raise InvalidArgumentError(f"a source of more than {MAX_ADDRESS} characters")


def check_reserve(request: plan_pb2.ReserveRequest, limits: Limits) -> None:
    """Check the size of a reservation's request. Raises LimitExceededError,
    InvalidArgumentError."""
    check_options(request.options, limits)
    _check(len(request.block_bytes), MAX_BLOCKS, "blocks")


def _attribute_parts(attributes: Iterable[graph_pb2.Attribute]) -> int:
    return sum([1 + len(one.integers.values) for one in attributes])


def _check_dimensions(count: int) -> None:
    if count > MAX_DIMENSIONS:
        raise InvalidArgumentError(f"{count:,} dimensions; a tensor has at most {MAX_DIMENSIONS}")


def _check(count: int, limit: int, what: str) -> None:
    if count > limit:
        raise LimitExceededError(
            f"{count:,} {what} in one message; this server takes {limit:,}", advice="send fewer"
        )
