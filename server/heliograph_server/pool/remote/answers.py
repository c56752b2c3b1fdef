"""Whether what a member answers can be true. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from heliograph_proto.devices import Memory, OpAnswer
from heliograph_proto.errors import ProtocolError
from heliograph_proto.graph import Graph
from heliograph_proto.plans import PlanInfo
from heliograph_proto.types import TensorType

#: The most bytes of a device that anybody believes.
MAX_MEMORY_BYTES = 2**56
#: The most of a member's words that is shown or kept.
MAX_WORDS = 200
MAX_REASON = 1000

OLD = "is it a daemon of this version?"


def check_memory(device: str, memory: Memory) -> Memory:
    """Raises ProtocolError for sizes that cannot be."""
    if memory.total_bytes > MAX_MEMORY_BYTES or memory.free_bytes > memory.total_bytes:
        raise lie(f"device {device} has {memory.free_bytes:,} of {memory.total_bytes:,} bytes free")
    return memory


def one_answer(answers: Sequence[OpAnswer]) -> OpAnswer:
    """The answer to one question about an op. Raises ProtocolError unless it is one."""
    if len(answers) != 1:
        raise lie(f"asked about one op it gives {len(answers)} answers")
    (found,) = answers
    # It is kept, and shown to clients.
    return replace(found, why_not=printable(found.why_not, MAX_REASON)) if found.why_not else found


def check_plan(info: PlanInfo, graph: Graph) -> None:
    """Whether a plan gives what the graph that it was asked for does. Raises ProtocolError."""
    wanted = [(one.name, graph.type_of(one.value)) for one in graph.outputs]
    if [(port.name, port.type) for port in info.outputs] != wanted:
        raise ProtocolError("a plan of a member does not give what its graph does", advice=OLD)
    if info.compute_bytes > MAX_MEMORY_BYTES:
        raise ProtocolError(f"a plan takes {info.compute_bytes:,} bytes", advice=OLD)


def checked_size(sizes: Sequence[int], tensor: TensorType) -> int:
    """What one tensor takes. Raises ProtocolError for a size that cannot be."""
    if len(sizes) != 1 or not tensor.nbytes <= sizes[0] <= 2 * tensor.nbytes + 2**30:
        raise lie(f"a tensor of {tensor.nbytes:,} bytes takes {', '.join(map(str, sizes[:4])) or 'nothing'}")
    return sizes[0]


def printable(text: str, most: int = MAX_WORDS) -> str:
    """A member's words, as a table and a log can show them."""
    return "".join(one if one.isprintable() else "?" for one in text[:most])


def lie(what: str) -> ProtocolError:
    """The error for what cannot be true."""
    return ProtocolError(f"what it says of its devices cannot be: {what}", advice=OLD)
