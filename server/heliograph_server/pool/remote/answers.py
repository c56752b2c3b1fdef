"""Plausibility checks of a member's answers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from heliograph_proto.devices import Memory, OpAnswer
from heliograph_proto.errors import ProtocolError
from heliograph_proto.graph import Graph
from heliograph_proto.plans import PlanInfo
from heliograph_proto.types import TensorType

#: The most bytes of a device that are plausible.
MAX_MEMORY_BYTES = 2**56
#: The longest texts of a member that are displayed or kept.
MAX_WORDS = 200
MAX_REASON = 1000

OLD = "is it a daemon of this version?"


def check_memory(device: str, memory: Memory) -> Memory:
    """Return the memory of a device. Raises ProtocolError for impossible sizes."""
    if memory.total_bytes > MAX_MEMORY_BYTES or memory.free_bytes > memory.total_bytes:
        raise lie(f"device {device} has {memory.free_bytes:,} of {memory.total_bytes:,} bytes free")
    return memory


def one_answer(answers: Sequence[OpAnswer]) -> OpAnswer:
    """Return the answer to a query of one op. Raises ProtocolError unless there is exactly one."""
    if len(answers) != 1:
        raise lie(f"a query of one op has {len(answers)} answers")
    (found,) = answers
    # The text is kept, and displayed to clients.
    return replace(found, why_not=printable(found.why_not, MAX_REASON)) if found.why_not else found


def check_plan(info: PlanInfo, graph: Graph) -> None:
    """Check that a plan has the outputs of its graph. Raises ProtocolError."""
    expected = [(one.name, graph.type_of(one.value)) for one in graph.outputs]
    if [(port.name, port.type) for port in info.outputs] != expected:
        raise ProtocolError("a plan of a member does not have the outputs of its graph", advice=OLD)
    if info.compute_bytes > MAX_MEMORY_BYTES:
        raise ProtocolError(f"a plan requires {info.compute_bytes:,} bytes", advice=OLD)


def checked_size(sizes: Sequence[int], tensor: TensorType) -> int:
    """Return the size of one tensor in memory. Raises ProtocolError for an impossible one."""
    if len(sizes) != 1 or not tensor.nbytes <= sizes[0] <= 2 * tensor.nbytes + 2**30:
        raise lie(f"a tensor of {tensor.nbytes:,} bytes takes {', '.join(map(str, sizes[:4])) or 'nothing'}")
    return sizes[0]


def printable(text: str, most: int = MAX_WORDS) -> str:
    """A member's text, safe for tables and logs."""
    return "".join(one if one.isprintable() else "?" for one in text[:most])


def lie(what: str) -> ProtocolError:
    """The error for an impossible answer."""
    return ProtocolError(f"its description of its devices is invalid: {what}", advice=OLD)
