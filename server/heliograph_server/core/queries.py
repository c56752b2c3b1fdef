"""What a device says when it is asked, before anything is sent to it."""

from __future__ import annotations

from collections.abc import Sequence

from heliograph_backends.contract import Device
from heliograph_proto.description import OpAnswer, OpQuery, OpRoad, PlacementInfo
from heliograph_proto.types import TensorType
from heliograph_server.core.memories import find_buffer_type


def query_ops(device: Device, queries: Sequence[OpQuery]) -> tuple[OpAnswer, ...]:
    """Whether it can run each node, whether fetching its weights pays, and by which road if that is asked."""
    return tuple(_answer(device, one) for one in queries)


def _answer(device: Device, query: OpQuery) -> OpAnswer:
    what = query.op, query.attributes, query.operands, query.result
    why_not = device.supports_op(*what)
    road = device.road(*what) if query.road and not why_not else OpRoad.UNKNOWN
    return OpAnswer(why_not, device.offload_op(*what), road)


def query_placement(device: Device, buffer_type: str, tensors: Sequence[TensorType]) -> PlacementInfo:
    """What tensors would take. Raises InvalidArgumentError, OutOfMemoryError."""
    memory = find_buffer_type(device, buffer_type)
    sizes = tuple(memory.alloc_size(one) for one in tensors)
    return PlacementInfo(sizes, memory.place(tensors).buffer_bytes)
