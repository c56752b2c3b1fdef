"""What a device says when it is asked, before anything is sent to it."""

from __future__ import annotations

from collections.abc import Sequence

from heliograph_backends.contract import Device
from heliograph_proto.description import OpAnswer, OpQuery, PlacementInfo
from heliograph_proto.types import TensorType
from heliograph_server.core.memories import find_buffer_type


def query_ops(device: Device, queries: Sequence[OpQuery]) -> tuple[OpAnswer, ...]:
    """Whether it can run each node, and whether it pays to fetch its weights."""
    return tuple(_answer(device, one) for one in queries)


def _answer(device: Device, query: OpQuery) -> OpAnswer:
    what = query.op, query.attributes, query.operands, query.result
    return OpAnswer(device.supports_op(*what), device.offload_op(*what))


def query_placement(device: Device, buffer_type: str, tensors: Sequence[TensorType]) -> PlacementInfo:
    """What tensors would take. Raises InvalidArgumentError, OutOfMemoryError."""
    memory = find_buffer_type(device, buffer_type)
    sizes = tuple(memory.alloc_size(one) for one in tensors)
    return PlacementInfo(sizes, memory.place(tensors).buffer_bytes)
